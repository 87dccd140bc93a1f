"""A stand-in for deepseek-ai/FlashMLA at 9241ae3 (flash_mla_interface.py, dense_decode.h): its checks, and loops."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.numerics.dispatch import libraries


def get_mla_metadata() -> tuple[object, None]:
    """What schedules the tiles of one call."""
    return "metadata", None


def flash_mla_with_kvcache(q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor, *rest: Any,
                           softmax_scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend, row by row and query by query, after the checks of the library. rest: head_dim_v, metadata."""
    head_dim_v, metadata = rest
    batch, queries, heads, width = q.shape
    assert metadata == "metadata"
    assert k_cache.shape[1:] == (64, 1, width), "pages of 64 tokens"
    assert (width, head_dim_v) == (576, 512)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert q.stride(-1) == k_cache.stride(-1) == block_table.stride(-1) == 1
    assert q.dtype == k_cache.dtype
    out = q.new_empty(batch, queries, heads, head_dim_v)
    for row in range(batch):
        keys = int(cache_seqlens[row])
        pages = [k_cache[page, :, 0] for page in block_table[row].tolist()]
        cache = torch.cat(pages)[:keys].double()
        for query in range(queries):
            visible = keys - queries + query + 1 if causal else keys
            weights = (q[row, query].double() @ cache[:visible].T * softmax_scale).softmax(-1)
            out[row, query] = (weights @ cache[:visible, :head_dim_v]).to(q.dtype)
    return out, torch.empty(batch, heads, queries)


def install_flash_mla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test, `flash_mla` can be imported."""
    libraries._modules.clear()
    module = ModuleType("flash_mla")
    vars(module).update(flash_mla_with_kvcache=flash_mla_with_kvcache, get_mla_metadata=get_mla_metadata)
    monkeypatch.setitem(sys.modules, "flash_mla", module)
