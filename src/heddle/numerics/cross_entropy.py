"""Cross-entropy of an output head in chunks of tokens: the logits of a whole batch never exist at once.

    loss = Σ_n [ logsumexp_v(z_nv) − z_{n, target_n} ],   z_nv = cap · tanh(scale · (h_n · W_v + b_v) / cap)

The gradient is computed in the forward pass, while a chunk's logits exist, so that each logit is computed once.

Distillation adds the divergence from a teacher's distribution q (Hinton et al. 2015, temperature 1):

    KL = Σ_n Σ_v q_nv · (log q_nv − log p_nv),   d(a · loss + b · KL) / dz = (a + b) · p − a · onehot(target) − b · q
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import add_flops
from heddle.numerics.linear import linear_flops
from heddle.numerics.norms import at_least_float32

CHUNK_ELEMENTS = 2**24  # logits that exist at one time: 64 MB in float32


class OutputHead(NamedTuple):
    """weight [vocab, width] and bias [vocab] of a head. `scale` multiplies the logits, then `softcap` bounds them."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


class TeacherOutput(NamedTuple):
    """Another model's hidden states [N, its width] for the same tokens, and its head over the same vocabulary."""

    hidden: Tensor
    head: OutputHead


class DistillationSums(NamedTuple):
    """Sums over tokens, in nats; scalars. Only `weighted` has gradients."""

    weighted: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Multiply logits by `scale`, then bound them by `softcap · tanh(· / softcap)`."""
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def reference(hidden: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    """Losses in nats, [N], of hidden [N, width] and targets int64 [N]. All logits exist at once."""
    logits = at_least_float32(functional.linear(hidden, head.weight, head.bias))
    return functional.cross_entropy(scale_and_cap(logits, head.scale, head.softcap), targets, reduction="none")


def token_losses(hidden: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    """As `reference`, but in chunks and without gradients, for evaluation."""
    chunk_size = _chunk_size(head.weight)
    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    with torch.no_grad():
        return torch.cat([reference(hidden_chunk, head, target_chunk) for hidden_chunk, target_chunk in chunks])


def loss_sum(hidden: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    """Sum of the losses in nats, a scalar in at least float32, with gradients to hidden, weight and bias.

    Within `torch.autocast`, products run in its dtype, sums and exponentials in float32.
    """
    _count_flops(hidden, head)
    no_teacher = None, 1.0, 0.0
    return _sums(hidden, head, targets, no_teacher)[0]


def distillation_sums(
    hidden: Tensor, head: OutputHead, targets: Tensor, teacher: TeacherOutput, text_weight: float, logits_weight: float
) -> DistillationSums:
    """As `loss_sum`, of `text_weight` · cross-entropy + `logits_weight` · KL(teacher ‖ model); gradients as there.

    The teacher gets no gradient. Its logits, too, exist in chunks only.
    """
    _count_flops(hidden, head)
    _count_flops(*teacher)
    return DistillationSums(*_sums(hidden, head, targets, (teacher, text_weight, logits_weight)))


def _count_flops(hidden: Tensor, head: OutputHead) -> None:
    add_flops(linear_flops(hidden.shape[0], head.weight.shape[1], head.weight.shape[0]))


def _sums(hidden: Tensor, head: OutputHead, targets: Tensor, teaching: tuple[Any, ...]) -> tuple[Tensor, ...]:
    device = hidden.device.type
    product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    options = product_dtype, head.scale, head.softcap, *teaching
    sums: tuple[Tensor, ...] = _WeightedSum.apply(hidden, head.weight, head.bias, targets, options)
    return sums


def _log_probabilities(
    teacher: TeacherOutput, chunk: slice, product_dtype: torch.dtype, sum_dtype: torch.dtype
) -> Tensor:
    """Return the log-probabilities [chunk, vocab] of a teacher."""
    weight, bias, scale, softcap = teacher.head
    logits = (teacher.hidden[chunk].to(product_dtype) @ weight.to(product_dtype).T).to(sum_dtype)
    return torch.log_softmax(scale_and_cap(logits if bias is None else logits.add_(bias), scale, softcap), 1)


def _chunk_size(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // weight.shape[0])


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        product_dtype, scale, softcap, teacher, text_weight, logits_weight = options
        sum_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        cast_weight, cast_hidden = weight.to(product_dtype), hidden.to(product_dtype)
        total, divergence = (torch.zeros((), dtype=sum_dtype, device=hidden.device) for _ in range(2))
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(cast_hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs_bias else None
        chunk_size = _chunk_size(weight)
        for start in range(0, hidden.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            hidden_chunk, target = cast_hidden[chunk], targets[chunk, None]
            raw = (hidden_chunk @ cast_weight.T).to(sum_dtype)
            logits = scale_and_cap(raw if bias is None else raw.add_(bias), scale, softcap)
            cap_derivative = None if softcap is None else 1.0 - (logits / softcap) ** 2
            target_logits = logits.gather(1, target)
            max_logits = logits.amax(1, keepdim=True)
            logits.sub_(max_logits)
            if teacher is not None:
                log_q = _log_probabilities(teacher, chunk, product_dtype, sum_dtype)
                q = log_q.exp()
                # where q is 0 its term is 0, even if a banned token has a logit of minus infinity
                divergence += log_q.sub_(logits).mul_(q).masked_fill_(q == 0, 0.0).sum()
            exponentials = logits.exp_()
            sums = exponentials.sum(1, keepdim=True)
            if teacher is not None:
                divergence += sums.log().sum()
            total += (sums.log() + max_logits - target_logits).sum()
            if grad_hidden is None and grad_weight is None and grad_bias is None:
                continue
            grad_logits = exponentials.div_(sums)  # softmax
            if teacher is not None:
                grad_logits.mul_(text_weight + logits_weight).sub_(q, alpha=logits_weight)
            grad_logits.scatter_add_(1, target, torch.full_like(target_logits, -text_weight))
            if cap_derivative is not None:
                grad_logits.mul_(cap_derivative)
            if scale != 1.0:
                grad_logits.mul_(scale)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(product_dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, cast_weight, out=grad_hidden[chunk])
            if grad_weight is not None and product_dtype == sum_dtype:
                grad_weight.addmm_(grad_logits.T, hidden_chunk)
            elif grad_weight is not None:
                grad_weight += grad_logits.T @ hidden_chunk
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        if teacher is None:
            return (total,)
        ctx.mark_non_differentiable(total, divergence)
        return text_weight * total + logits_weight * divergence, total, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *other_grads = ctx.saved_tensors
        grad_loss = gradients[0]
        hidden_dtype, *dtypes = ctx.dtypes
        pairs = zip(other_grads, dtypes, strict=True)
        scaled_grads = (None if gradient is None else (gradient * grad_loss).to(dtype) for gradient, dtype in pairs)
        return None if grad_hidden is None else grad_hidden.to(hidden_dtype) * grad_loss, *scaled_grads, None, None
