"""The attention kernels of CUDA as `LaunchCounter` counts them: shapes only, at the rates of one fused kernel.

The forward pass is one launch and the backward pass two, with the FLOPs of the visible pairs. So it is for a compiled
FlexAttention: a forward kernel, then the row sums of y · dy, then one kernel for all three gradients. A sink adds the
launches of a fused product with its share of the softmax.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

from heddle.numerics.attention import flex
from heddle.numerics.attention.mask import visible_pairs
from tests.accelerator.launches import ATTENTION_RATES, LaunchCounter, attend

FLEX_RATE = 350e12  # FLOP/s of a causal forward pass in bfloat16 on an H100, by published measurements


def functions(counter: LaunchCounter) -> dict[Any, Callable[..., Any]]:
    """What answers operators that are called by name."""
    return {
        torch.ops.aten._scaled_dot_product_flash_attention: lambda *a, **k: _flash(counter, *a, **k),
        torch.ops.aten._scaled_dot_product_cudnn_attention: lambda *a, **k: _cudnn(counter, *a, **k),
        torch.ops.aten._scaled_dot_product_efficient_attention: lambda *a, **k: _efficient(counter, *a, **k),
    }


def patches(counter: LaunchCounter) -> dict[tuple[ModuleType, str], Any]:
    """What replaces functions, by module and name."""
    return {
        (varlen, "varlen_attn"): wraps(varlen.varlen_attn)(lambda *a, **k: _varlen(counter, *a, **k)),
        (flex, "compiled_kernel"): lambda kind: lambda *a: _flex(counter, *a),
    }


def _log_sum_exp(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _flash(
    counter: LaunchCounter, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    pairs = q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
    return attend(counter, (q, k, v), pairs, ATTENTION_RATES[True, False, False]), _log_sum_exp(q)


def _cudnn(counter: LaunchCounter, *arguments: Any, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, _, _, dropout, causal = arguments
    return _flash(counter, q, k, v, dropout, causal, scale)


def _efficient(counter: LaunchCounter, *arguments: Any, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v, bias, _, _, causal = arguments
    pairs = q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
    rate = ATTENTION_RATES[q.dtype != torch.float32, bias is not None, False]
    return attend(counter, (q, k, v), pairs, rate), _log_sum_exp(q)


def _varlen(
    counter: LaunchCounter, *arguments: Any, window_size: tuple[int, int], **options: Any
) -> tuple[Tensor, Tensor]:
    """Documents count as equally long."""
    q, k, v, cu_q = arguments[:4]
    length = q.shape[0] // (cu_q.shape[0] - 1)
    before = length if window_size[0] < 0 else window_size[0] + 1
    pairs = (cu_q.shape[0] - 1) * visible_pairs(length, length, before, window_size[1] == 0)
    y = attend(counter, (q, k, v), pairs, ATTENTION_RATES[True, False, False])
    return y, torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)


def _flex(
    counter: LaunchCounter, q: Tensor, k: Tensor, v: Tensor, block_mask: Any, tensors: flex.FlexTensors,
    kind: flex.FlexKind,
) -> Tensor:  # fmt: skip
    """Documents are not known to fake tensors: the pairs are those of rows of one document."""
    pairs = visible_pairs(q.shape[2], k.shape[2], kind.window, kind.causal)
    rate = FLEX_RATE if q.dtype != torch.float32 else FLEX_RATE / 8
    y = attend(counter, (q, k, v), pairs, rate)
    if tensors.sink is None:
        return y
    with counter.fuse():
        return (y * (_log_sum_exp(q) - tensors.sink[:, None]).sigmoid()[..., None]).to(q.dtype)
