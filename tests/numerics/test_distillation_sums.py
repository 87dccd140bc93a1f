"""The chunked divergence from a teacher, and its gradients, against torch's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics import cross_entropy
from heddle.numerics.cross_entropy import (
    OutputHead,
    TeacherOutput,
    _chunk_sums,
    distillation_sums,
    loss_sum,
    step_in_place,
)
from heddle.numerics.dispatch import DeviceSize, count_flops
from heddle.numerics.kernels import kernels
from tests.laws.planting import assigned, calls, condition, operand_dropped, reads
from tests.numerics.largest_tensor import LargestTensor

TEXT, LOGITS, VOCABULARY, TOKENS = 0.3, 0.8, 11, 13


def draws(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def heads(**fields: Any) -> tuple[Tensor, OutputHead, TeacherOutput, Tensor]:
    """A model 6 wide, and a teacher 4 wide with a head of its own."""
    hidden, head = draws(TOKENS, 6), OutputHead(draws(VOCABULARY, 6), draws(VOCABULARY), **fields)
    teacher = TeacherOutput(draws(TOKENS, 4), OutputHead(draws(VOCABULARY, 4), scale=0.7, softcap=3.0))
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(4))
    for tensor in (hidden, head.weight, head.bias, teacher.head.weight, teacher.hidden):
        assert tensor is not None
        tensor.requires_grad_()
    return hidden, head, teacher, targets


def logits_of(hidden: Tensor, head: OutputHead) -> Tensor:
    logits = functional.linear(hidden, head.weight, head.bias) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def plain(hidden: Tensor, head: OutputHead, targets: Tensor, teacher: TeacherOutput) -> tuple[Tensor, Tensor, Tensor]:
    logits, q = logits_of(hidden, head), torch.softmax(logits_of(*teacher), -1).detach()
    divergence = functional.kl_div(torch.log_softmax(logits, -1), q, reduction="sum")
    loss = functional.cross_entropy(logits, targets, reduction="sum")
    return TEXT * loss + LOGITS * divergence, loss, divergence


def largest_difference(kernel: str = "chunked", **fields: Any) -> float:
    """Of the three sums, and of the gradients of hidden, weight and bias."""
    sides = []
    for ours in (True, False):
        hidden, head, teacher, targets = heads(**fields)
        with kernels(linear_cross_entropy=kernel):
            sums = (
                distillation_sums(hidden, head, targets, teacher, TEXT, LOGITS)
                if ours
                else plain(hidden, head, targets, teacher)
            )
        torch.autograd.backward(sums[0] * 0.37)
        assert teacher.hidden.grad is None
        assert teacher.head.weight.grad is None
        assert head.bias is not None
        gradients = [x.grad for x in (hidden, head.weight, head.bias) if x.grad is not None]
        assert len(gradients) == 3
        sides.append([*(x.detach() for x in sums), *gradients])
    return max(float((a - b).abs().max()) for a, b in zip(*sides, strict=True))


@pytest.mark.parametrize("fields", [{}, {"scale": 0.3}, {"scale": 2.5, "softcap": 0.7}])
@pytest.mark.parametrize("kernel", ["chunked", "fused", "reference"])
@pytest.mark.parametrize("chunk", [1, 4, 13, 10**6])
def test_sums_and_gradients_equal_torchs_in_chunks_of_any_size(
    chunk: int, kernel: str, fields: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", DeviceSize(chunk * VOCABULARY, chunk * VOCABULARY))
    assert largest_difference(kernel, **fields) <= 1e-10


BUGS = {
    "the divergence reversed": calls(
        step_in_place, "mul_", lambda difference, q, *, logits: difference.neg().mul_(logits.softmax(1)), nth=0
    ),
    "no sum of the divergence": assigned(step_in_place, "divergence", lambda added: 0.0, nth=1),
    "no weight of the gradient": calls(step_in_place, "mul_", lambda gradient, weight: gradient, nth=1),
    "no weight of the teacher": calls(step_in_place, "sub_", lambda gradient, q, alpha: gradient.sub_(q), nth=2),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    assert largest_difference() > 1e-3


FUSED_BUGS = {
    "the divergence reversed": calls(
        _chunk_sums,
        "masked_fill",
        lambda terms, is_zero, zero, *, logits, log_sums, log_q: (
            (logits - log_sums - log_q) * (logits - log_sums).exp()
        ).masked_fill(is_zero, zero),
    ),
    "logits that are not normalized": operand_dropped(_chunk_sums, "log_sums", nth=0),
    "no weight of the gradient": operand_dropped(_chunk_sums, "logits_weight", nth=1),
    "the target in float32": calls(_chunk_sums, "to", lambda is_target, dtype: is_target, nth=1),
    "no weight of the teacher": reads(_chunk_sums, "logits_weight", lambda weight: 1.0, nth=1),
    "no scale": condition(_chunk_sums, "scale", False),
    "no softcap": operand_dropped(_chunk_sums, "softcap", nth=1),
}


@pytest.mark.parametrize("bug", FUSED_BUGS)
def test_planted_bugs_in_the_fused_step_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FUSED_BUGS[bug](monkeypatch)
    assert largest_difference("fused", scale=2.5, softcap=0.7) > 1e-9


def test_the_text_alone_is_the_cross_entropy() -> None:
    hidden, head, teacher, targets = heads()
    sums = distillation_sums(hidden, head, targets, teacher, 1.0, 0.0)
    assert torch.equal(sums.weighted, loss_sum(hidden, head, targets))


@pytest.mark.parametrize("kernel", ["chunked", "fused"])
def test_a_banned_token_leaves_the_divergence_finite(kernel: str) -> None:
    hidden, head, teacher, targets = heads()
    banned = torch.zeros(VOCABULARY, dtype=torch.float64)
    banned[-1] = -math.inf
    heads_with_ban = [OutputHead(x.weight.detach(), banned) for x in (head, teacher.head)]
    targets = targets.clamp(max=VOCABULARY - 2)
    output = TeacherOutput(teacher.hidden, heads_with_ban[1])
    hidden.grad = None
    with kernels(linear_cross_entropy=kernel):
        sums = distillation_sums(hidden, heads_with_ban[0], targets, output, 0.0, 1.0)
    torch.autograd.backward(sums.weighted)
    fewer = [x.weight.detach()[:-1] for x in (head, teacher.head)]
    q = torch.softmax(teacher.hidden @ fewer[1].T, -1)
    expected = functional.kl_div(torch.log_softmax(hidden @ fewer[0].T, -1), q, reduction="sum")
    assert float(sums.divergence) == pytest.approx(float(expected.detach()), abs=1e-10)
    assert hidden.grad is not None
    assert bool(hidden.grad.isfinite().all())


def test_operations_of_both_heads_are_counted() -> None:
    hidden, head, teacher, targets = heads()
    with count_flops() as flops:
        distillation_sums(hidden, head, targets, teacher, TEXT, LOGITS)
    assert flops[0] == 2 * TOKENS * VOCABULARY * (6 + 4)


@pytest.mark.parametrize("chunk", [4, 10**6])
def test_all_logits_never_exist_at_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary, width = 64, 50, 3
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", DeviceSize(chunk * vocabulary, chunk * vocabulary))
    hidden, head = draws(tokens, width).requires_grad_(), OutputHead(draws(vocabulary, width).requires_grad_())
    teacher = TeacherOutput(draws(tokens, width), OutputHead(draws(vocabulary, width)))
    with LargestTensor() as largest:
        torch.autograd.backward(distillation_sums(hidden, head, torch.arange(tokens) % 50, teacher, 0.5, 0.5).weighted)
    assert largest.elements == min(chunk, tokens) * vocabulary
