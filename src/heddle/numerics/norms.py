"""RMSNorm (Zhang & Sennrich 2019) `y = γ ⊙ x / sqrt(mean(x²) + ε)` and LayerNorm (Ba et al. 2016).

Statistics are computed in at least float32; float64 stays float64.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.operation import Kernel, Operation


class RMSNormFacts(NamedTuple):
    """What decides the kernel of RMSNorm."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    weight_dims: int
    offset: float


def at_least_float32(x: Tensor) -> Tensor:
    """x itself if it is float32 or float64, else a float32 copy."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Within the block, autocast is disabled on x's device."""
    device_kind = x.device.type
    enabled = torch.amp.is_autocast_available(device_kind) and torch.is_autocast_enabled(device_kind)
    return torch.autocast(device_kind, enabled=False) if enabled else nullcontext()


def reference(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm over the last dimension: x [..., width], weight [width] (or [heads, width]) -> x's shape and dtype.

    `offset` is added to the weight (1 for Gemma's `1 + γ`). `cast` says when the result is cast back to x's dtype:
    "before" γ is applied (Llama) or "after" it (Gemma, OLMo-2).
    """
    wide = at_least_float32(x)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if cast == "before":
        return (weight + offset if offset else weight).to(x.dtype) * y.to(x.dtype)
    gamma = weight.to(wide.dtype) + offset
    return (gamma * y).to(x.dtype)


def _fused(x: Tensor, weight: Tensor, eps: float, offset: float, cast: str) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _fused_unsupported(facts: RMSNormFacts) -> str | None:
    if facts.offset:
        return "the weight has an offset"
    if facts.dtype not in (torch.float32, torch.float64):
        return f"{facts.dtype} must be cast to float32 for the statistics, and back before or after the weight"
    if facts.weight_dims > 1:
        return "each head has its own weight"
    if facts.weight_dtype != facts.dtype:
        return "x and the weight differ in dtype"
    return None


RMS_NORM = Operation(
    "rms_norm",
    (Kernel("fused", _fused, _fused_unsupported), Kernel("reference", reference, lambda facts: None)),
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm over the last dimension. The arguments are described in `reference`."""
    kernel = RMS_NORM.choose(RMSNormFacts(x.dtype, weight.dtype, weight.dim(), offset))
    y: Tensor = kernel.run(x, weight, eps, offset, cast)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension with population variance. Statistics are in at least float32.

    x [..., width], weight and bias [width] (or [heads, width]), bias may be None -> x's shape and dtype.
    """
    wide = at_least_float32(x)
    y = functional.layer_norm(wide, wide.shape[-1:], None, None, eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)
