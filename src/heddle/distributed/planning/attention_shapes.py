"""A stand-in for the fused attention of a GPU: it saves what the kernel saves, and computes nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

BACKWARD_PRODUCTS = 2.5  # FLOPs of the backward pass over those of the forward pass: scores are computed again


class AttentionShapes(TorchFunctionMode):
    """Within the block, `scaled_dot_product_attention` saves queries, keys, values, output and log-sum-exp.

    note(output, FLOPs) is called for each forward pass, note(None, FLOPs) for each backward pass. A causal call counts
    half of its pairs.
    """

    def __init__(self, note: Callable[[Tensor | None, float], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer attention, and leave the rest to torch."""
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v = args[:3]
        pairs = q.shape[-2] * k.shape[-2] * (0.5 if (kwargs or {}).get("is_causal") else 1.0)
        flops = 2.0 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1])
        return _FusedAttention.apply(q, k, v, flops, self.note)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: float, note: Any) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        ctx.flops, ctx.note = flops, note
        note(out, flops)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.note(None, BACKWARD_PRODUCTS * ctx.flops)
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None, None
