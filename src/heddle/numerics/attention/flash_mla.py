"""DeepSeek's FlashMLA: absorbed decoding of latent attention, split over keys, on Hopper GPUs in bfloat16.

It reads a cache in pages of 64 tokens, each anywhere in memory. A cache of heddle is one block per row, whose slots are
such pages if their number is a multiple of 64: it is handed over without a copy. The adapter was never run on a GPU.
"""

import torch
from torch import Tensor

from heddle.numerics.dispatch.libraries import optional_module

MODULE = "flash_mla"
PAGE = 64  # tokens
VALUE_WIDTH = 512  # of a latent, without the rotated dims


def flash_mla_unsupported() -> str | None:
    """Why FlashMLA cannot be called here, or None."""
    return "flash_mla is not installed" if optional_module(MODULE) is None else None


def has_pages(latents: Tensor) -> bool:
    """Whether latents [B, 1, S, width] are the first S slots of rows of whole pages, one after the other in memory."""
    batch, _, tokens, width = latents.shape
    slots, elements = _slots(latents), latents.untyped_storage().nbytes() // latents.element_size()
    in_rows = latents.stride()[2:] == (width, 1) and (batch == 1 or latents.stride(0) == slots * width)
    stored = latents.storage_offset() + batch * slots * width <= elements
    return in_rows and stored and 0 < tokens <= slots and slots % PAGE == 0


def _slots(latents: Tensor) -> int:
    batch, _, tokens, width = latents.shape
    return -(-tokens // PAGE) * PAGE if batch == 1 else latents.stride(0) // max(1, width)


def pages(latents: Tensor) -> Tensor:
    """latents [B, 1, S, width] for which `has_pages` -> all pages of their cache, [B · slots / 64, 64, 1, width]."""
    batch, width = latents.shape[0], latents.shape[3]
    shape = batch * _slots(latents) // PAGE, PAGE, 1, width
    return latents.as_strided(shape, (PAGE * width, width, width, 1))


def attend(q: Tensor, latents: Tensor, causal: bool, scale: float) -> Tensor:
    """q [B, H, T, 576] in the latent space, the last tokens of latents [B, 1, S, 576] -> [B, H, T, 512]."""
    if q.is_meta:  # `heddle show` on a machine that has the library
        return q.new_empty(*q.shape[:3], VALUE_WIDTH)
    module = optional_module(MODULE)
    assert module is not None
    batch, keys, all_pages = q.shape[0], latents.shape[2], pages(latents)
    table = torch.arange(len(all_pages), dtype=torch.int32, device=q.device).view(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=q.device)
    y, _ = module.flash_mla_with_kvcache(
        q.transpose(1, 2).contiguous(),
        all_pages,
        table,
        lengths,
        VALUE_WIDTH,
        module.get_mla_metadata()[0],
        softmax_scale=scale,
        causal=causal,
    )
    out: Tensor = y.transpose(1, 2)
    return out
