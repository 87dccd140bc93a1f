"""Softmax attention to packed documents in one call: torch's `varlen_attn`, a flash kernel over a list of documents.

The tokens of all rows stand one after another, and `cu_seqlens` says where each document starts. It is computed on the
device, so that the host does not wait, and once for all layers.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.sdpa import in_autocast_dtype, pad_to_equal_widths, with_sink


@cache
def varlen_parameters() -> frozenset[str]:
    """The parameters of this torch's `varlen_attn`. They differ from release to release."""
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def cu_seqlens(mask: AttentionMask) -> Tensor:
    """Tokens before each document of packed rows, and of all of them: int32 [documents + 1], on the mask's device."""
    assert mask.doc_lengths is not None
    rows, length = mask.q_positions.shape
    documents, device = sum(map(len, mask.doc_lengths)), mask.q_positions.device
    is_start = torch.ones(rows, length, dtype=torch.bool, device=device)
    if mask.q_segment_ids is not None and length:
        is_start[:, 1:] = mask.q_segment_ids[:, 1:] != mask.q_segment_ids[:, :-1]
    elif length:
        is_start[:, 1:] = False  # `fill_`, which copies nothing from the host
    lengths = torch.zeros(documents + 1, dtype=torch.int32, device=device)
    numbers = is_start.flatten().cumsum(0)  # of the document of each token, from 1 on
    return lengths.scatter_add_(0, numbers, torch.ones_like(numbers, dtype=torch.int32)).cumsum(0, dtype=torch.int32)


def longest_document(mask: AttentionMask) -> int:
    """A bound of the documents' lengths, which the kernel's grid is made for. A power of two: few values occur."""
    assert mask.doc_lengths is not None
    most = max((size for row in mask.doc_lengths for size in row), default=1)
    return 1 << (most - 1).bit_length()


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, sink: Tensor | None) -> Tensor:
    """q [B, H, T, d_k], k [B, G, T, d_k], v [B, G, T, d_v] -> [B, H, T, d_v]. sink: [B, H, T, 1], without gradients."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    rows, d_v = q.shape[0], v.shape[3]
    q, k, v = pad_to_equal_widths(*in_autocast_dtype(q, k, v))
    starts = mask.cached("cu_seqlens", lambda: cu_seqlens(mask))
    most = longest_document(mask)
    if mask.causal:
        window = (-1 if mask.window is None else mask.window - 1, 0)
    else:
        window = (-1, -1) if mask.window is None else (mask.window, mask.window)
    options: dict[str, Any] = {"return_aux": AuxRequest(lse=True), "scale": scale, "window_size": window}
    if "enable_gqa" in varlen_parameters():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    result: Any = varlen_attn(q, k, v, starts, starts, most, most, **options)
    y: Tensor = result[0].unflatten(0, (rows, -1)).transpose(1, 2)[..., :d_v]
    if sink is None:
        return y
    return with_sink(y, result[1].unflatten(1, (rows, -1)).transpose(0, 1), sink)
