"""The chunked cross-entropy and its gradients against the plain one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics import cross_entropy
from heddle.numerics.cross_entropy import OutputHead
from heddle.numerics.dispatch import DeviceSize, count_flops
from heddle.numerics.kernels import kernels
from tests.conversion.memory import LiveStorages

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy.loss_sum(hidden, OutputHead(weight), targets)


def inputs(count: int = 13, vocab: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(count, 6, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocab, 6, dtype=dtype, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (count,), generator=generator)


def gradients(loss: Loss, scale: float = 1.0, **kind: Any) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, targets = inputs(**kind)
    value = loss(hidden, weight, targets)
    torch.autograd.backward(value * scale)
    assert hidden.grad is not None
    assert weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The definition, term by term."""
    logits = hidden @ weight.T
    return (logits.exp().sum(1).log() - logits.gather(1, targets[:, None])[:, 0]).sum()


def agrees(loss: Loss, scale: float = 0.37, **kind: Any) -> bool:
    pairs = zip(gradients(loss, scale, **kind), gradients(plain, scale, **kind), strict=True)
    return all(torch.allclose(actual, expected, rtol=0, atol=1e-10) for actual, expected in pairs)


@pytest.mark.parametrize("chunk", [1, 4, 12, 13, 14, 10**6])
def test_values_and_gradients_equal_the_definition_in_chunks_of_any_size(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", DeviceSize(chunk * 11, chunk * 11))
    assert agrees(loss_sum)
    hidden, weight, targets = inputs()
    losses = cross_entropy.token_losses(hidden, OutputHead(weight), targets)
    torch.testing.assert_close(losses, cross_entropy.reference(hidden, OutputHead(weight), targets), rtol=0, atol=1e-12)
    torch.testing.assert_close(losses.sum(), plain(hidden, weight, targets), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kernel", ["chunked", "fused", "reference"])
@pytest.mark.parametrize("fields", [{"scale": 0.3}, {"softcap": 1.5}, {"scale": 2.5, "softcap": 0.7}, {}])
def test_bias_scale_and_softcap(fields: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", DeviceSize(4 * 11, 4 * 11))
    results = []
    for side in ("torch", "heddle"):
        hidden, weight, targets = inputs()
        bias = torch.linspace(-1.0, 1.0, 11, dtype=torch.float64).requires_grad_()
        if side == "heddle":
            with kernels(linear_cross_entropy=kernel):
                value = cross_entropy.loss_sum(hidden, OutputHead(weight, bias, **fields), targets)
        else:
            logits = (hidden @ weight.T + bias) * fields.get("scale", 1.0)
            if "softcap" in fields:
                logits = fields["softcap"] * (logits / fields["softcap"]).tanh()
            value = functional.cross_entropy(logits, targets, reduction="sum")
        torch.autograd.backward(value)
        results.append((value.detach(), hidden.grad, weight.grad, bias.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def test_half_a_gradient_or_a_missing_row_is_detected() -> None:
    assert not agrees(lambda h, w, targets: loss_sum(0.5 * h + 0.5 * h.detach(), w, targets))
    assert not agrees(lambda h, w, targets: loss_sum(h, 0.5 * w + 0.5 * w.detach(), targets))
    assert not agrees(lambda h, w, targets: loss_sum(h[1:], w, targets[1:]))


def test_numerical_gradients_in_float64() -> None:
    hidden, weight, targets = inputs(count=4, vocab=5)
    assert torch.autograd.gradcheck(lambda h, w: loss_sum(h, w, targets), (hidden, weight))


def test_only_required_gradients_are_computed() -> None:
    hidden, weight, targets = inputs()
    loss_sum(hidden.detach(), weight, targets).backward()
    assert weight.grad is not None
    assert hidden.grad is None
    assert not loss_sum(hidden.detach(), weight.detach(), targets).requires_grad


def test_large_logits_and_certain_targets_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    right = loss_sum(hidden, weight, torch.tensor([0, 1]))
    assert right.item() == 0.0
    wrong = loss_sum(hidden, weight, torch.tensor([1, 0]))
    assert wrong.item() == pytest.approx(4e4, rel=1e-6)
    torch.autograd.backward(wrong)
    assert bool(torch.cat([hidden.grad.flatten(), weight.grad.flatten()]).isfinite().all())  # type: ignore[union-attr]


def test_not_a_number_is_not_hidden() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        hidden[5, 2] = math.nan
    assert math.isnan(loss_sum(hidden, weight, targets).item())


def test_a_large_vocabulary_adds_no_bias_in_float32() -> None:
    """Each exponential is rounded in the same direction where a long row is added one by one."""
    weight = torch.full((2**18, 1), -0.1).index_fill_(0, torch.tensor([0]), 0.0)
    hidden, targets = torch.ones(1, 1), torch.tensor([0])
    exact = functional.cross_entropy(weight.double().T, targets).item()
    assert abs(functional.cross_entropy(weight.T, targets).item() - exact) > 1e-5  # one by one
    assert abs(cross_entropy.token_losses(hidden, OutputHead(weight), targets).item() - exact) < 2e-6
    for kernel in ("chunked", "fused", "reference"):
        with kernels(linear_cross_entropy=kernel):
            assert abs(loss_sum(hidden, weight, targets).item() - exact) < 2e-6
    teacher = cross_entropy.TeacherOutput(hidden, OutputHead(weight))
    sums = cross_entropy.distillation_sums(hidden, OutputHead(weight), targets, teacher, 0.0, 1.0)
    assert abs(sums.divergence.item()) < 2e-5  # its terms are as large as log 2^18, and cancel


def test_within_autocast_the_error_is_that_of_bfloat16() -> None:
    hidden, weight, targets = inputs(count=64, vocab=40, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = loss_sum(hidden, weight, targets)
    torch.autograd.backward(narrow)
    actual_hidden, actual_weight = hidden.grad, weight.grad
    _, exact_hidden, exact_weight = gradients(plain, count=64, vocab=40, dtype=torch.float32)
    exact = plain(hidden, weight, targets)
    assert narrow.dtype == torch.float32
    assert abs(narrow.item() / exact.item() - 1) < 2e-3
    for actual, expected in ((actual_hidden, exact_hidden), (actual_weight, exact_weight)):
        assert actual is not None
        assert actual.dtype == torch.float32
        assert 0 < float((actual - expected).norm() / expected.norm()) < 1e-2


def test_weights_in_bfloat16_get_gradients_in_bfloat16_summed_in_float32() -> None:
    hidden, weight, targets = (x.detach() for x in inputs(count=300, vocab=20, dtype=torch.float32))
    narrow = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    value = loss_sum(narrow[0], narrow[1], targets)
    torch.autograd.backward(value)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    torch.autograd.backward(plain(wide[0], wide[1], targets))
    assert value.dtype == torch.float32
    for actual, expected in zip(narrow, wide, strict=True):
        assert actual.grad is not None
        assert expected.grad is not None
        assert actual.grad.dtype == torch.bfloat16
        assert float((actual.grad.double() - expected.grad).norm() / expected.grad.norm()) < 2e-2


def test_operations_are_counted_once_forward() -> None:
    hidden, weight, targets = inputs()
    with count_flops() as flops:
        loss_sum(hidden, weight, targets)
    assert flops[0] == 2 * 13 * 6 * 11


def test_it_agrees_with_torch() -> None:
    hidden, weight, targets = inputs()
    torch_loss = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    torch.testing.assert_close(loss_sum(hidden, weight, targets), torch_loss, rtol=0, atol=1e-10)


@pytest.mark.parametrize("distils", [False, True])
def test_one_backward_pass_needs_no_second_matrix_as_large_as_the_weight(distils: bool) -> None:
    """Its gradients have the same bits; another pass over the graph is an error, not a wrong gradient."""
    vocab, width = 4096, 256

    def step(once: bool, retain_graph: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        generator = torch.Generator().manual_seed(3)
        hidden, weight = (torch.randn(count, width, generator=generator).requires_grad_() for count in (8, vocab))
        head, bias = OutputHead(weight.detach()), torch.zeros(vocab).requires_grad_()
        teacher = cross_entropy.TeacherOutput(hidden.detach().flip(0), head)
        given = hidden, OutputHead(weight, bias, once=once), torch.randint(0, vocab, (8,), generator=generator)
        if distils:
            loss = cross_entropy.distillation_sums(*given, teacher, 0.1, 1.0).weighted
        else:
            loss = cross_entropy.loss_sum(*given)
        torch.autograd.backward(loss / 7, retain_graph=retain_graph)
        return loss / 7, [hidden.grad, weight.grad, bias.grad]

    with LiveStorages() as usual:
        _, expected = step(once=False)
    with LiveStorages() as saving:
        _, gradients = step(once=True)
    for one, other in zip(expected, gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
    assert saving.peak <= usual.peak - 0.8 * 4 * vocab * width
    torch.autograd.backward(step(once=False, retain_graph=True)[0])
    loss, _ = step(once=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        torch.autograd.backward(loss)
