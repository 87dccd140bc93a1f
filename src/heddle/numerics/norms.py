"""RMSNorm (Zhang & Sennrich 2019) `y = γ ⊙ x / sqrt(mean(x²) + ε)` and LayerNorm (Ba et al. 2016).

Statistics are computed in at least float32; float64 stays float64.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.operation import Form, Operation


class NormFacts(NamedTuple):
    """What decides the form of RMSNorm."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    weight_dims: int
    offset: float


def at_least_float32(x: Tensor) -> Tensor:
    """x itself in float32 or float64, else its float32 copy."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Within the block products on x's device keep the dtype of what they multiply."""
    kind = x.device.type
    wanted = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if wanted else nullcontext()


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm over the last dimension: x [..., width], weight [width] (or [heads, width]) -> x's shape and dtype.

    `offset` is added to the weight (1 for Gemma's `1 + γ`). `cast` says when the result returns to x's
    dtype: "before" γ is applied (Llama) or "after" (Gemma, OLMo-2).
    """
    wide = at_least_float32(x)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "before":
        return (weight + offset if offset else weight).to(x.dtype) * y.to(x.dtype)
    gain = weight.to(wide.dtype) + offset
    return (gain * y).to(x.dtype)


def _fused(x: Tensor, weight: Tensor, eps: float, offset: float, cast: str) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _no_fused(facts: NormFacts) -> str | None:
    if facts.offset:
        return "the weight has an offset"
    if facts.dtype not in (torch.float32, torch.float64):
        return f"{facts.dtype} must be widened for the statistics and cast back at a chosen place"
    if facts.weight_dims > 1:
        return "each head has a weight of its own"
    if facts.weight_dtype != facts.dtype:
        return "x and the weight differ in dtype"
    return None


RMS_NORM = Operation(
    "rms_norm",
    (Form("fused", _fused, _no_fused), Form("reference", reference, lambda facts: None)),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm over the last dimension; see `reference` for the meaning of every argument."""
    form = RMS_NORM.choose(NormFacts(x.dtype, weight.dtype, weight.dim(), offset))
    y: Tensor = form.run(x, weight, eps, offset, cast)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension, population variance, statistics in at least float32.

    x [..., width], weight and bias [width] (or [heads, width]), bias may be None -> x's shape and dtype.
    """
    wide = at_least_float32(x)
    y = functional.layer_norm(wide, wide.shape[-1:], None, None, eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)
