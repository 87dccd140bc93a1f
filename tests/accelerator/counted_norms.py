"""torch's RMSNorm as `LaunchCounter` counts it: on CUDA one launch forward and two backward, elsewhere many steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.accelerator.launches import BANDWIDTH, LaunchCounter, tensor_bytes


class _FusedNorm(torch.autograd.Function):
    """Shapes only. The backward pass has a second launch for the gradient of the weight, if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, counter: LaunchCounter) -> Tensor:
        ctx.x, ctx.weight, ctx.counter = x, weight, counter
        _count(counter, 2 * tensor_bytes(x))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _count(ctx.counter, 3 * tensor_bytes(ctx.x))
        if ctx.weight is None:
            return torch.empty_like(ctx.x), None, None
        _count(ctx.counter, 2 * tensor_bytes(ctx.x))
        return torch.empty_like(ctx.x), torch.empty_like(ctx.weight), None


def _count(counter: LaunchCounter, moved: int) -> None:
    counter.end_segment()
    counter.add(1, moved, 0, max(moved / BANDWIDTH, 2e-6))
    counter.total.operations["rms_norm"] += 1


def rms_norm(counter: LaunchCounter) -> Callable[..., Tensor]:
    """What answers torch's function. A compiler sees its steps, and fuses them with their neighbors."""

    def call(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if counter.fused_depth:
            return functional.rms_norm(x, shape, weight, eps)
        assert weight is None or weight.dtype == x.dtype  # torch would warn, and compute it in steps
        y: Tensor = _FusedNorm.apply(x, weight, counter)
        return y

    return call
