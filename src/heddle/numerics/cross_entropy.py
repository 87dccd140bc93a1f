"""Cross-entropy of a head, in chunks of tokens: the logits of a whole batch never exist at once.

    loss = Σ_n [ logsumexp_v(z_nv) − z_{n, target_n} ],   z_nv = cap · tanh(scale · (h_n · W_v + b_v) / cap)

The gradient is made in the forward pass, while a chunk's logits are at hand, so each logit is computed once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.linear import flops
from heddle.numerics.norms import at_least_float32

CHUNK_ELEMENTS = 2**24  # logits that exist at one time: 64 MB in float32


class End(NamedTuple):
    """weight [vocab, width] and bias [vocab] of a head; scale multiplies its logits, softcap bounds them."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


def bounded(numbers: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Scaled, then bounded by `cap · tanh(· / cap)`."""
    if scale != 1.0:
        numbers = numbers * scale
    return numbers if softcap is None else torch.tanh(numbers / softcap) * softcap


def reference(hidden: Tensor, end: End, targets: Tensor) -> Tensor:
    """Losses in nats, [N], of hidden [N, width] and targets int64 [N]; all logits at once."""
    numbers = at_least_float32(functional.linear(hidden, end.weight, end.bias))
    return functional.cross_entropy(bounded(numbers, end.scale, end.softcap), targets, reduction="none")


def losses(hidden: Tensor, end: End, targets: Tensor) -> Tensor:
    """As `reference`, in chunks; for evaluation, no gradient."""
    size = _chunk(end.weight)
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    with torch.no_grad():
        return torch.cat([reference(part, end, target) for part, target in pairs])


def loss_sum(hidden: Tensor, end: End, targets: Tensor) -> Tensor:
    """Sum of the losses in nats, a scalar in at least float32, with gradients to hidden, weight and bias.

    Within `torch.autocast` products run in its dtype, sums and exponentials in float32.
    """
    count(flops(hidden.shape[0], end.weight.shape[1], end.weight.shape[0]))
    device = hidden.device.type
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    total: Tensor = _LossSum.apply(hidden, end.weight, end.bias, targets, (narrow, end.scale, end.softcap))
    return total


def _chunk(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // weight.shape[0])


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, facts: tuple[Any, ...]
    ) -> Tensor:
        narrow, scale, softcap = facts
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        narrow_weight, narrow_hidden = weight.to(narrow), hidden.to(narrow)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        to_hidden = torch.empty_like(narrow_hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        to_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wants_bias else None
        size = _chunk(weight)
        for start in range(0, hidden.shape[0], size):
            here = slice(start, start + size)
            part, target = narrow_hidden[here], targets[here, None]
            raw = (part @ narrow_weight.T).to(wide)
            logits = bounded(raw if bias is None else raw.add_(bias), scale, softcap)
            bend = None if softcap is None else 1.0 - (logits / softcap) ** 2  # of the bound, at each logit
            picked = logits.gather(1, target)
            highest = logits.amax(1, keepdim=True)
            exponentials = logits.sub_(highest).exp_()
            sums = exponentials.sum(1, keepdim=True)
            total += (sums.log() + highest - picked).sum()
            if to_hidden is None and to_weight is None and to_bias is None:
                continue
            slope = exponentials.div_(sums)  # softmax
            slope.scatter_add_(1, target, torch.full_like(picked, -1.0))
            if bend is not None:
                slope.mul_(bend)
            if scale != 1.0:
                slope.mul_(scale)
            if to_bias is not None:
                to_bias += slope.sum(0)
            slope = slope.to(narrow)
            if to_hidden is not None:
                torch.mm(slope, narrow_weight, out=to_hidden[here])
            if to_weight is not None and narrow == wide:
                to_weight.addmm_(slope.T, part)
            elif to_weight is not None:
                to_weight += slope.T @ part
        ctx.save_for_backward(to_hidden, to_weight, to_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, *to_rest = ctx.saved_tensors
        scale = gradients[0]
        hidden_dtype, *dtypes = ctx.dtypes
        rest = (None if x is None else (x * scale).to(dtype) for x, dtype in zip(to_rest, dtypes, strict=True))
        return None if to_hidden is None else to_hidden.to(hidden_dtype) * scale, *rest, None, None
