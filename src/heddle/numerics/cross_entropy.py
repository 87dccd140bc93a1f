"""Cross-entropy of a linear head, in chunks of tokens: the logits of a whole batch never exist at once.

    loss = Σ_n [ logsumexp_v(h_n · W_v) − h_n · W_{target_n} ]

The gradient is made in the forward pass, while a chunk's logits are at hand, so each logit is computed once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.counting import count
from heddle.numerics.linear import flops
from heddle.numerics.norms import at_least_float32

CHUNK_ELEMENTS = 2**24  # logits that exist at one time: 64 MB in float32


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Losses in nats, [N], of hidden [N, width], weight [vocab, width], targets int64 [N]; all logits at once."""
    return functional.cross_entropy(at_least_float32(hidden @ weight.T), targets, reduction="none")


def losses(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """As `reference`, in chunks; for evaluation, no gradient."""
    size = _chunk(weight)
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    with torch.no_grad():
        return torch.cat([reference(part, weight, target) for part, target in pairs])


def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the losses in nats, a scalar in at least float32, with gradients to hidden and weight.

    Within `torch.autocast` products run in its dtype, sums and exponentials in float32.
    """
    count(flops(hidden.shape[0], weight.shape[1], weight.shape[0]))
    device = hidden.device.type
    narrow = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    total: Tensor = _LossSum.apply(hidden, weight, targets, narrow)
    return total


def _chunk(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // weight.shape[0])


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, narrow: torch.dtype) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        narrow_weight, narrow_hidden = weight.to(narrow), hidden.to(narrow)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(narrow_hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        size = _chunk(weight)
        for start in range(0, hidden.shape[0], size):
            here = slice(start, start + size)
            part, target = narrow_hidden[here], targets[here, None]
            logits = (part @ narrow_weight.T).to(wide)
            picked = logits.gather(1, target)
            highest = logits.amax(1, keepdim=True)
            exponentials = logits.sub_(highest).exp_()
            sums = exponentials.sum(1, keepdim=True)
            total += (sums.log() + highest - picked).sum()
            if to_hidden is None and to_weight is None:
                continue
            slope = exponentials.div_(sums)  # softmax
            slope.scatter_add_(1, target, torch.full_like(picked, -1.0))
            slope = slope.to(narrow)
            if to_hidden is not None:
                torch.mm(slope, narrow_weight, out=to_hidden[here])
            if to_weight is not None and narrow == wide:
                to_weight.addmm_(slope.T, part)
            elif to_weight is not None:
                to_weight += slope.T @ part
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_weight = ctx.saved_tensors
        scale = gradients[0]
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            None if to_hidden is None else to_hidden.to(hidden_dtype) * scale,
            None if to_weight is None else (to_weight * scale).to(weight_dtype),
            None,
            None,
        )
