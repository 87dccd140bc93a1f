"""Cross-entropy of an output head in chunks of tokens: the logits of a whole batch never exist at once.

    loss = Σ_n [ logsumexp_v(z_nv) − z_{n, target_n} ],   z_nv = cap · tanh(scale · (h_n · W_v + b_v) / cap)

Exponentials are added pairwise or in blocks: on a CPU, torch's log_softmax adds a row's in one float32 sum per lane,
which loses 3e-5 nats at 262,144 tokens.

The gradient is computed in the forward pass, while a chunk's logits exist, so that each logit is computed once.

Distillation adds the divergence from a teacher's distribution q (Hinton et al. 2015, temperature 1):

    KL = Σ_n Σ_v q_nv · (log q_nv − log p_nv),   d(a · loss + b · KL) / dz = (a + b) · p − a · onehot(target) − b · q
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics import native
from heddle.numerics.dispatch import DeviceSize, Kernel, Operation, add_flops, device_type, has_triton
from heddle.numerics.linear import linear_flops
from heddle.numerics.norms import at_least_float32
from heddle.torch_private import is_fake

# Elementwise steps of the loss over one chunk of logits [n, vocab]: its sums, and the gradient of the logits.
#
# For targets t and a teacher's log-probabilities log q, both steps compute, with p the softmax of the scaled logits z,
#
#     total += Σ_n [logsumexp(z_n) − z_n,t],   divergence += Σ_n Σ_v q · (log q − log p),
#     dz = (text_weight + logits_weight) · p − text_weight · onehot(t) − logits_weight · q


class ChunkOptions(NamedTuple):
    """What a step needs besides tensors. gradients: whether the logits and the bias need them."""

    scale: float
    softcap: float | None
    text_weight: float
    logits_weight: float
    product_dtype: torch.dtype
    gradients: tuple[bool, bool]


def scale_and_cap(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Multiply logits by `scale`, then bound them by `softcap · tanh(· / softcap)`."""
    if scale != 1.0:
        logits = logits * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def step_in_place(
    raw: Tensor, bias: Tensor | None, target: Tensor, log_q: Tensor | None, options: ChunkOptions, sums: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """As `fused_step`, but the steps write into the memory of the logits, and each is a pass over it."""
    (total, divergence), softcap, text_weight, logits_weight = sums, *options[1:4]
    raw = raw.to(total.dtype)
    logits = scale_and_cap(raw if bias is None else raw.add_(bias), options.scale, softcap)
    cap_derivative = None if softcap is None else 1.0 - (logits / softcap) ** 2
    target_logits = logits.gather(1, target)
    max_logits = logits.amax(1, keepdim=True)
    logits.sub_(max_logits)
    if log_q is not None:
        q = log_q.exp()
        # where q is 0 its term is 0, even if a banned token has a logit of minus infinity
        divergence += log_q.sub_(logits).mul_(q).masked_fill_(q == 0, 0.0).sum()
    exponentials = logits.exp_()
    exp_sums = exponentials.sum(1, keepdim=True)
    if log_q is not None:
        divergence += exp_sums.log().sum()
    total += (exp_sums.log() + max_logits - target_logits).sum()
    if not options.gradients[0]:
        return None, None
    grad_logits = exponentials.div_(exp_sums)  # softmax
    if log_q is not None:
        grad_logits.mul_(text_weight + logits_weight).sub_(q, alpha=logits_weight)
    grad_logits.scatter_add_(1, target, torch.full_like(target_logits, -text_weight))
    if cap_derivative is not None:
        grad_logits.mul_(cap_derivative)
    if options.scale != 1.0:
        grad_logits.mul_(options.scale)
    return grad_logits.to(options.product_dtype), grad_logits.sum(0) if options.gradients[1] else None


def fused_step(
    raw: Tensor, bias: Tensor | None, target: Tensor, log_q: Tensor | None, options: ChunkOptions, sums: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """raw [n, vocab] before bias, scale and softcap, target int64 [n, 1] -> the gradients of raw and of the bias.

    No step writes into another's result, so that a compiler reads the logits twice and writes their gradient once.
    """
    loss, kl, grad_logits, grad_bias = _chunk_sums(raw, bias, target, log_q, options, sums[0].dtype)
    sums[0] += loss
    if kl is not None:
        sums[1] += kl
    return grad_logits, grad_bias


def _chunk_sums(
    raw: Tensor,
    bias: Tensor | None,
    target: Tensor,
    log_q: Tensor | None,
    options: ChunkOptions,
    sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The sums of the cross-entropy and of the divergence, and the gradients, of one chunk."""
    scale, softcap, text_weight, logits_weight = options[:4]
    logits = raw.to(sum_dtype)
    logits = scale_and_cap(logits if bias is None else logits + bias, scale, softcap)
    log_sums = logits.logsumexp(1, keepdim=True)
    loss, kl = (log_sums - logits.gather(1, target)).sum(), None
    q = None if log_q is None else log_q.exp()
    if log_q is not None and q is not None:
        # where q is 0 its term is 0, even if a banned token has a logit of minus infinity
        kl = ((log_q - logits + log_sums) * q).masked_fill(q == 0, 0.0).sum()
    if not options.gradients[0]:
        return loss, kl, None, None
    is_target = torch.arange(raw.shape[1], device=raw.device) == target
    grad = (logits - log_sums).exp() * (text_weight + logits_weight) - is_target.to(sum_dtype) * text_weight
    if q is not None:
        grad = grad - logits_weight * q
    if softcap is not None:
        grad = grad * (1.0 - (logits / softcap) ** 2)
    grad = grad * scale if scale != 1.0 else grad
    return loss, kl, grad.to(options.product_dtype), grad.sum(0) if options.gradients[1] else None


@cache
def compiled_step() -> Callable[..., Any]:
    """`fused_step`, compiled once for each kind of head and size of chunk."""
    return torch.compile(fused_step, dynamic=False)


def results_of_compiled_step(
    raw: Tensor, bias: Tensor | None, target: Tensor, log_q: Tensor | None, options: ChunkOptions, sums: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """What `compiled_step` allocates, without values: for fake tensors."""
    needs_gradient, needs_bias = options.gradients
    return (
        raw.new_empty(raw.shape, dtype=options.product_dtype) if needs_gradient else None,
        raw.new_empty(raw.shape[1], dtype=sums[0].dtype) if needs_bias else None,
    )


# Each chunk adds to the gradient of the weight, so an accelerator computes few, large ones: 2^29 logits take 1 GB in
# bfloat16, and as much for their gradient. Where elementwise steps are not compiled, float32 logits take 2 GB more.
CHUNK_ELEMENTS = DeviceSize(2**24, 2**29)  # logits that exist at one time: 64 MB in float32 on a CPU
CHUNK_MULTIPLE = DeviceSize(1, 128)  # tokens: accelerators multiply tiles of this many rows


class OutputHead(NamedTuple):
    """weight [vocab, width] and bias [vocab] of a head. `scale` multiplies the logits, then `softcap` bounds them.

    transform: applied to the hidden states first, [N, width] -> [N, width]. once: the loss has one backward pass, which
    needs no second matrix as large as the weight; another over the same graph raises RuntimeError.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    once: bool = False

    def apply_transform(self, hidden: Tensor) -> "TeacherOutput":
        """The hidden states after the transform, and the head without it."""
        return TeacherOutput(
            hidden if self.transform is None else self.transform(hidden), self._replace(transform=None)
        )


class TeacherOutput(NamedTuple):
    """Another model's hidden states [N, its width] for the same tokens, and its head over the same vocabulary."""

    hidden: Tensor
    head: OutputHead


class Objective(NamedTuple):
    """The loss: `text_weight` · cross-entropy + `logits_weight` · divergence from the teacher, if any."""

    teacher: TeacherOutput | None = None
    text_weight: float = 1.0
    logits_weight: float = 0.0


class LossFacts(NamedTuple):
    """What decides the kernel of the loss. native: whether its C++ operator serves these tensors.

    plain: neither a bias, a softcap nor a teacher.
    """

    device: str
    native: bool = False
    plain: bool = False


class DistillationSums(NamedTuple):
    """Sums over tokens, in nats; scalars. Only `weighted` has gradients."""

    weighted: Tensor
    cross_entropy: Tensor
    divergence: Tensor


def reference(hidden: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    """Losses in nats, [N], of hidden [N, width] and targets int64 [N]. All logits exist at once."""
    logits = at_least_float32(functional.linear(hidden, head.weight, head.bias))
    logits = scale_and_cap(logits, head.scale, head.softcap)
    return logits.logsumexp(1) - logits.gather(1, targets[:, None])[:, 0]


def token_losses(hidden: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    """As `reference`, but in chunks and without gradients, for evaluation."""
    chunk_size = _chunk_size(head.weight)
    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    with torch.no_grad():
        return torch.cat([reference(*head.apply_transform(part), target_part) for part, target_part in chunks])


def loss_sum(hidden: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
    """Sum of the losses in nats, a scalar in at least float32, with gradients to hidden, weight and bias.

    Within `torch.autocast`, products run in its dtype, sums and exponentials in float32.
    """
    hidden, head = head.apply_transform(hidden)
    _count_flops(hidden, head)
    return _sums(hidden, head, targets, Objective())[0]


def distillation_sums(
    hidden: Tensor, head: OutputHead, targets: Tensor, teacher: TeacherOutput, text_weight: float, logits_weight: float
) -> DistillationSums:
    """As `loss_sum`, but of `text_weight` · cross-entropy + `logits_weight` · KL(teacher ‖ model).

    The teacher gets no gradient. Its logits, too, exist in chunks only.
    """
    hidden, head = head.apply_transform(hidden)
    with torch.no_grad():
        teacher = teacher.head.apply_transform(teacher.hidden)
    _count_flops(hidden, head)
    _count_flops(*teacher)
    return DistillationSums(*_sums(hidden, head, targets, Objective(teacher, text_weight, logits_weight)))


def _count_flops(hidden: Tensor, head: OutputHead) -> None:
    add_flops(linear_flops(hidden.shape[0], head.weight.shape[1], head.weight.shape[0]))


def _sums(hidden: Tensor, head: OutputHead, targets: Tensor, objective: Objective) -> tuple[Tensor, ...]:
    serves = native.serves("cross_entropy", hidden, head.weight)
    plain = head.bias is None and head.softcap is None and objective.teacher is None
    kernel = LINEAR_CROSS_ENTROPY.choose(LossFacts(device_type(hidden), serves, plain))
    sums: tuple[Tensor, ...] = kernel.run(hidden, head, targets, objective)
    return sums


def reference_sums(hidden: Tensor, head: OutputHead, targets: Tensor, objective: Objective) -> tuple[Tensor, ...]:
    """The sums of `_WeightedSum`, by autograd. All logits exist at once."""
    teacher, text_weight, logits_weight = objective
    total = reference(hidden, head, targets).sum()
    if teacher is None:
        return (total,)
    logits, teacher_logits = (
        scale_and_cap(at_least_float32(functional.linear(x, end.weight, end.bias)), end.scale, end.softcap)
        for x, end in ((hidden, head), teacher)
    )
    q = teacher_logits.detach().softmax(-1)
    divergence = functional.kl_div(logits.log_softmax(-1), q, reduction="sum")
    return text_weight * total + logits_weight * divergence, total.detach(), divergence.detach()


def _native_step(
    raw: Tensor, bias: None, target: Tensor, log_q: None, options: ChunkOptions, sums: list[Tensor]
) -> tuple[Tensor | None, None]:
    """As `step_in_place`, in one pass over each row."""
    needs_gradient = options.gradients[0]
    sums[0] += torch.ops.heddle.cross_entropy_(raw, target, options.scale, options.text_weight, needs_gradient)
    return (raw if needs_gradient else None), None


def _native(hidden: Tensor, head: OutputHead, targets: Tensor, objective: Objective) -> tuple[Tensor, ...]:
    return _weighted_sum(_native_step, hidden, head, targets, objective)


def _native_unsupported(facts: LossFacts) -> str | None:
    if not facts.native:
        return native.NOT_IN_USE
    return None if facts.plain else "there is a bias, a softcap or a teacher"


def _chunked(hidden: Tensor, head: OutputHead, targets: Tensor, objective: Objective) -> tuple[Tensor, ...]:
    return _weighted_sum(step_in_place, hidden, head, targets, objective)


def _fused(hidden: Tensor, head: OutputHead, targets: Tensor, objective: Objective) -> tuple[Tensor, ...]:
    if device_type(hidden) != "cuda" or not has_triton() or is_compiling():
        step = fused_step
    elif hidden.device.type == "cuda":
        step = compiled_step()
    else:  # it stands for a tensor on a GPU
        step = results_of_compiled_step if is_fake(hidden) else fused_step
    return _weighted_sum(step, hidden, head, targets, objective)


def _weighted_sum(
    step: Callable[..., Any], hidden: Tensor, head: OutputHead, targets: Tensor, objective: Objective
) -> tuple[Tensor, ...]:
    device = hidden.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    product_dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    options = step, product_dtype, head.scale, head.softcap, *objective, head.once
    sums: tuple[Tensor, ...] = _WeightedSum.apply(hidden, head.weight, head.bias, targets, options)
    return sums


def _log_probabilities(
    teacher: TeacherOutput, chunk: slice, product_dtype: torch.dtype, sum_dtype: torch.dtype
) -> Tensor:
    """Return the log-probabilities [chunk, vocab] of a teacher."""
    weight, bias, scale, softcap = teacher.head[:4]
    logits = (teacher.hidden[chunk].to(product_dtype) @ weight.to(product_dtype).T).to(sum_dtype)
    logits = scale_and_cap(logits if bias is None else logits.add_(bias), scale, softcap)
    return logits - logits.logsumexp(1, keepdim=True)


def _chunk_size(weight: Tensor) -> int:
    size, multiple = max(1, CHUNK_ELEMENTS.on(weight) // weight.shape[0]), CHUNK_MULTIPLE.on(weight)
    return max(size - size % multiple, min(size, multiple))


class _WeightedSum(torch.autograd.Function):
    """The first option, `step`, computes one chunk's sums, and the gradients of its logits and of the bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        step, product_dtype, scale, softcap, teacher, text_weight, logits_weight, once = options
        sum_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        cast_weight, cast_hidden = weight.to(product_dtype), hidden.to(product_dtype)
        totals = [torch.zeros((), dtype=sum_dtype, device=hidden.device) for _ in range(2)]
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_bias = bias is not None and needs_bias
        grad_hidden = torch.empty_like(cast_hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs_bias else None
        needed = needs_hidden or needs_weight or needs_bias, needs_bias
        chunk_options = ChunkOptions(scale, softcap, text_weight, logits_weight, product_dtype, needed)
        chunk_size = _chunk_size(weight)
        for start in range(0, hidden.shape[0], chunk_size):
            chunk = slice(start, start + chunk_size)
            hidden_chunk, target = cast_hidden[chunk], targets[chunk, None]
            log_q = None if teacher is None else _log_probabilities(teacher, chunk, product_dtype, sum_dtype)
            grad_logits, chunk_grad_bias = step(
                hidden_chunk @ cast_weight.T, bias, target, log_q, chunk_options, totals
            )
            if grad_bias is not None:
                grad_bias += chunk_grad_bias
            if grad_hidden is not None:
                torch.mm(grad_logits, cast_weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden_chunk)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.once = once
        ctx.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        total, divergence = totals
        if teacher is None:
            return (total,)
        ctx.mark_non_differentiable(total, divergence)
        return text_weight * total + logits_weight * divergence, total, divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, *other_grads = ctx.saved_tensors
        grad_loss = gradients[0]
        hidden_dtype, *dtypes = ctx.dtypes
        scale = Tensor.mul_ if ctx.once else Tensor.mul
        pairs = zip(other_grads, dtypes, strict=True)
        scaled_grads = (None if gradient is None else scale(gradient, grad_loss).to(dtype) for gradient, dtype in pairs)
        return None if grad_hidden is None else grad_hidden.to(hidden_dtype) * grad_loss, *scaled_grads, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in total's dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif (
        total.device.type == "cuda" or is_fake(total)
    ) and not is_compiling():  # one pass over total, and no rounding of the product
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _chunked_unsupported(facts: LossFacts) -> str | None:
    return "each elementwise step reads and writes all logits" if facts.device == "cuda" and has_triton() else None


LINEAR_CROSS_ENTROPY = Operation(
    "linear_cross_entropy",
    (
        Kernel("native", _native, _native_unsupported, traceable=False),
        Kernel("chunked", _chunked, _chunked_unsupported, traceable=False),
        Kernel("fused", _fused, lambda facts: None),
        Kernel("reference", reference_sums, lambda facts: None),
    ),
)
