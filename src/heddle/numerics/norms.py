"""RMSNorm (Zhang & Sennrich 2019) `y = γ ⊙ x / sqrt(mean(x²) + ε)` and LayerNorm (Ba et al. 2016).

Statistics are computed in at least float32; float64 stays float64.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics import native
from heddle.numerics.dispatch import Kernel, Operation, device_type
from heddle.torch_private import foreach_norm


class LayerNormFacts(NamedTuple):
    """What decides the kernel of LayerNorm. Without a weight, weight_dtype is x's and weight_dims 0."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    weight_dims: int
    device: str


class RMSNormFacts(NamedTuple):
    """What decides the kernel of RMSNorm. cast: as in `reference`; the weight as in `LayerNormFacts`.

    native: whether its C++ operator serves these tensors.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    weight_dims: int
    device: str
    offset: float
    cast: str
    native: bool = False


def at_least_float32(x: Tensor) -> Tensor:
    """x itself if it is float32 or float64, else a float32 copy."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def rounded_to_dtypes(number: float) -> dict[torch.dtype, float]:
    """The number rounded to each dtype, as Gemma does with scales of embeddings: sqrt(3072) is 55.5 in bfloat16."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return {dtype: torch.tensor(number, dtype=dtype, device="cpu").item() for dtype in dtypes}


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Within the block, autocast is disabled on x's device."""
    device_kind = x.device.type
    enabled = torch.amp.is_autocast_available(device_kind) and torch.is_autocast_enabled(device_kind)
    return torch.autocast(device_kind, enabled=False) if enabled else nullcontext()


def reference(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm over the last dimension: x [..., width], weight [width] (or [heads, width]) -> x's shape and dtype.

    Without a weight γ is 1. `offset` is added to the weight (1 for Gemma's `1 + γ`). `cast` says when the result is
    cast back to x's dtype: "before" γ is applied (Llama) or "after" it (Gemma, OLMo-2).
    """
    wide = at_least_float32(x)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if cast == "before":
        return with_offset(weight, offset, x.dtype).to(x.dtype) * y.to(x.dtype)
    gamma = weight.to(wide.dtype) + offset
    return (gamma * y).to(x.dtype)


def with_offset(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """The weight plus its offset, added in the wider of its own dtype and that of what it multiplies."""
    return weight.to(torch.promote_types(weight.dtype, dtype)) + offset if offset else weight


def _native(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    y: Tensor = torch.ops.heddle.rms_norm(x, weight, eps, offset, cast == "before")
    return y


def _native_unsupported(facts: RMSNormFacts) -> str | None:
    if not facts.native:
        return native.NOT_IN_USE
    return "each head has its own weight" if facts.weight_dims > 1 else native.unsupported_dtype(facts.dtype)


def _fused(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    y = functional.rms_norm(x, x.shape[-1:], weight, eps)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _normalized(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast: str) -> Tensor:
    """torch's fused norm without a weight, then the weight in the dtype in which `reference` applies it.

    torch computes in float32 and rounds once, as the reference does. Autocast may widen its result: `to` narrows it.
    """
    if weight is None or cast == "before":
        y = functional.rms_norm(x, x.shape[-1:], None, eps).to(x.dtype)
        if weight is None:
            return y
        return with_offset(weight, offset, x.dtype).to(x.dtype) * y
    wide = at_least_float32(x)
    gamma = weight.to(wide.dtype)
    gamma = gamma + offset if offset else gamma
    if weight.dim() == 1:
        return functional.rms_norm(wide, weight.shape, gamma, eps).to(x.dtype)
    return (gamma * functional.rms_norm(wide, wide.shape[-1:], None, eps)).to(x.dtype)


def _fused_unsupported(facts: RMSNormFacts) -> str | None:
    if facts.offset:
        return "the weight has an offset"
    if facts.dtype not in (torch.float32, torch.float64):
        if facts.device == "cpu":
            return f"{facts.dtype} is cast to float32 for the statistics, which a CPU does step by step"
        if facts.cast == "before" and facts.weight_dims:
            return f"the result is cast back to {facts.dtype} before the weight"
    if facts.weight_dims > 1:
        return "each head has its own weight"
    if facts.weight_dtype != facts.dtype:
        return "x and the weight differ in dtype"
    return None


def _steps_unsupported(facts: RMSNormFacts | LayerNormFacts) -> str | None:
    return None if facts.device == "cpu" else "each step is a separate launch"


RMS_NORM: Operation[RMSNormFacts] = Operation(
    "rms_norm",
    (
        Kernel("native", _native, _native_unsupported, traceable=False),
        Kernel("fused", _fused, _fused_unsupported),
        Kernel("steps", reference, _steps_unsupported),
        Kernel("normalized", _normalized, lambda facts: None),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, cast: str = "before") -> Tensor:
    """RMSNorm over the last dimension. The arguments are described in `reference`."""
    serves = native.serves("rms_norm", x, weight)
    facts = RMSNormFacts(x.dtype, *_weight_facts(x, weight), device_type(x), offset, cast, serves)
    y: Tensor = RMS_NORM.choose(facts).run(x, weight, eps, offset, cast)
    return y


def _weight_facts(x: Tensor, weight: Tensor | None) -> tuple[torch.dtype, int]:
    """weight_dtype and weight_dims."""
    return (x.dtype, 0) if weight is None else (weight.dtype, weight.dim())


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm in at least float32, step by step. The arguments are described in `layer_norm`."""
    wide = at_least_float32(x)
    y = functional.layer_norm(wide, wide.shape[-1:], None, None, eps)
    y = y if weight is None else y * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def _fused_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps).to(x.dtype)


def _fused_layer_norm_unsupported(facts: LayerNormFacts) -> str | None:
    if facts.weight_dims > 1:
        return "each head has its own weight"
    return None if facts.weight_dtype == facts.dtype else "x and the weight differ in dtype"


LAYER_NORM: Operation[LayerNormFacts] = Operation(
    "layer_norm",
    (
        Kernel("steps", layer_norm_reference, _steps_unsupported),
        Kernel("fused", _fused_layer_norm, _fused_layer_norm_unsupported),
        Kernel("reference", layer_norm_reference, lambda facts: None),
    ),
)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension with population variance. Statistics are in at least float32.

    x [..., width], weight and bias [width] (or [heads, width]), both may be None -> x's shape and dtype.
    """
    kernel = LAYER_NORM.choose(LayerNormFacts(x.dtype, *_weight_facts(x, weight), device_type(x)))
    y: Tensor = kernel.run(x, weight, bias, eps)
    return y


def euclidean_norms(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of each of n tensors of one dtype, [n]; in at least float32 by the C++ operator."""
    if native.serves("norms", *tensors):
        each: Tensor = torch.ops.heddle.norms(tensors)
        return each
    return torch.stack(list(foreach_norm(tensors)))


# Sinkhorn normalization (Sinkhorn & Knopp 1967): divide the columns and rows of a matrix by their sums in turn.


def sinkhorn(logits: Tensor, iterations: int, eps: float = 0.0) -> Tensor:
    """Normalize exp(logits) [..., n, n] by columns, then rows, `iterations` times. At least float32, same shape.

    Rows sum to 1 up to rounding, columns approximately. It works on logarithms, so that all finite logits have a finite
    result and gradient. `eps` is added to the elements after the first columns, and to every sum after that, as in
    DeepSeek V4: rows then sum to a little less than 1.
    """
    logs = at_least_float32(logits)
    if eps:
        return _sinkhorn_with_eps(logs, iterations, eps)
    for _ in range(iterations):
        logs = logs - logs.logsumexp(-2, keepdim=True)
        logs = logs - logs.logsumexp(-1, keepdim=True)
    return logs.exp()


def _sinkhorn_with_eps(logs: Tensor, iterations: int, eps: float) -> Tensor:
    matrix = logs.softmax(-2) + eps
    for step in range(iterations):
        if step:
            matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
    return matrix
