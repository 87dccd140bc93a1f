"""Elementwise steps of the loss over one chunk of logits [n, vocab]: its sums, and the gradient of the logits.

For targets t and a teacher's log-probabilities log q, both steps compute, with p the softmax of the scaled logits z,

    total += Σ_n [logsumexp(z_n) − z_n,t],   divergence += Σ_n Σ_v q · (log q − log p),
    dz = (text_weight + logits_weight) · p − text_weight · onehot(t) − logits_weight · q
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ChunkOptions(NamedTuple):
    """What a step needs besides tensors. gradients: whether those of the logits, and of the bias, are required."""

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


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values: one of torch's FakeTensorMode, which takes a second to import."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def results_of_compiled_step(
    raw: Tensor, bias: Tensor | None, target: Tensor, log_q: Tensor | None, options: ChunkOptions, sums: list[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """What `compiled_step` allocates, without values: for fake tensors."""
    needs_gradient, needs_bias = options.gradients
    return (
        raw.new_empty(raw.shape, dtype=options.product_dtype) if needs_gradient else None,
        raw.new_empty(raw.shape[1], dtype=sums[0].dtype) if needs_bias else None,
    )
