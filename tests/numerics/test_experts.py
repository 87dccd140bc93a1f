"""Experts: every form against a loop over single choices, gradients, refusals and operations."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError
from heddle.numerics.activations import Activation, clamped, glu
from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.dispatch.operation import witnessing
from heddle.numerics.experts.mixture import EXPERTS, Choices, Weights, experts, flops
from heddle.numerics.kernels import kernels
from heddle.numerics.linear import Packs, packing

EXPERTS_, WIDTH, HIDDEN = 5, 16, 8
FORMS = [form.name for form in EXPERTS.forms]


TANH = glu(torch.tanh)


def relu2(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
    first = functional.relu(up if gate is None else gate).square()
    return first if gate is None else first * up


def made(gated: bool, bias: bool, dtype: torch.dtype = torch.float64) -> Weights:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(EXPERTS_, *shape, generator=generator, dtype=torch.float64).to(dtype) * 0.5

    up, down = draw(HIDDEN, WIDTH), draw(WIDTH, HIDDEN)
    gate = draw(HIDDEN, WIDTH) if gated else None
    if not bias:
        return Weights(up, down, gate)
    return Weights(up, down, gate, draw(HIDDEN), draw(WIDTH), draw(HIDDEN) if gated else None)


def chosen(
    tokens: int, top_k: int, drop: bool = False, keep: bool = False, dtype: torch.dtype = torch.float64
) -> Choices:
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(tokens, EXPERTS_, generator=generator)
    scores[:, 3] = -1.0  # nobody takes it, unless all are taken
    named = scores.argsort(-1, descending=True)[:, :top_k]
    if drop:
        named = named.masked_fill(torch.rand(tokens, top_k, generator=generator) < 0.4, -1)
        named[:1] = -1
    mask = (torch.rand(tokens, top_k, HIDDEN, generator=generator) < 0.7).to(dtype) / 0.7 if keep else None
    gates = torch.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(dtype)
    return Choices(named, gates, mask, not drop)


def plain(x: Tensor, choices: Choices, weights: Weights, activation: Activation) -> Tensor:
    """One choice at a time."""
    rows = []
    for token in range(len(x)):
        y = torch.zeros_like(x[0])
        for slot, expert in enumerate(choices.experts[token].tolist()):
            if expert < 0:
                continue
            own = [None if weight is None else weight[expert] for weight in weights]
            up, down, gate, up_bias, down_bias, gate_bias = own
            assert up is not None
            assert down is not None
            gated = None if gate is None else gate @ x[token] + (0 if gate_bias is None else gate_bias)
            hidden = activation(up @ x[token] + (0 if up_bias is None else up_bias), gated)
            if choices.keep is not None:
                hidden = hidden * choices.keep[token, slot]
            y = y + choices.gates[token, slot] * (down @ hidden + (0 if down_bias is None else down_bias))
        rows.append(y)
    return torch.stack(rows)


def slopes(y: Tensor, learned: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().sum(), learned, materialize_grads=True))


def close(got: Tensor, want: Tensor, bound: float) -> None:
    """Relative to the largest number, where that is above 1."""
    torch.testing.assert_close(got, want, rtol=0, atol=bound * max(1.0, float(want.detach().abs().max())))


CASES = {
    "gated": (True, False, 2, False, False),
    "gated with biases": (True, True, 2, False, False),
    "plain": (False, False, 1, False, False),
    "plain with biases and drops": (False, True, 3, True, False),
    "gated, some kept": (True, True, 3, True, True),
    "all experts": (True, False, 5, False, False),
}


@pytest.mark.parametrize("form", ["sorted", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_forms_and_their_gradients(name: str, form: str) -> None:
    gated, bias, top_k, drop, keep = CASES[name]
    x = torch.randn(11, WIDTH, dtype=torch.float64, requires_grad=True)
    weights, choices = made(gated, bias), chosen(11, top_k, drop, keep)
    learned = [x, choices.gates, *(weight for weight in weights if weight is not None)]
    for value in learned:
        value.requires_grad_()
    want = plain(x, choices, weights, relu2)
    with kernels(experts=form):
        got = experts(x, choices, weights, relu2)
    close(got, want, 1e-12)
    for one, other in zip(slopes(got, learned), slopes(want, learned), strict=True):
        close(one, other, 1e-12)


LIMIT, ALPHA = 0.9, 1.3  # some rows are beyond it, some within


def scalar(up: float, gate: float) -> float:
    """The clamped SwiGLU of single numbers."""
    bounded = LIMIT if gate > LIMIT else gate
    return (max(-LIMIT, min(up, LIMIT)) + 1) * bounded / (1 + math.exp(-ALPHA * bounded))


def scalars(up: Tensor, gate: Tensor | None = None, /) -> Tensor:
    assert gate is not None
    made = [scalar(*pair) for pair in zip(up.flatten().tolist(), gate.flatten().tolist(), strict=True)]
    return up.new_tensor(made).view(up.shape)


def test_clamped_is_its_formula_and_its_slopes_are_differences() -> None:
    up = torch.linspace(-3, 3, 40, dtype=torch.float64)[:, None].expand(40, 40).clone().requires_grad_()
    gate = torch.linspace(-4, 4, 40, dtype=torch.float64).expand(40, 40).clone().requires_grad_()
    got = clamped(LIMIT, ALPHA)(up, gate)
    torch.testing.assert_close(got, scalars(up, gate), rtol=0, atol=1e-14)
    found = torch.autograd.grad(got.sum(), (up, gate))
    for index, slope in enumerate(found):
        step = [1e-6 * (index == 0), 1e-6 * (index == 1)]
        ahead, behind = (scalars(up + sign * step[0], gate + sign * step[1]) for sign in (1, -1))
        torch.testing.assert_close(slope, (ahead - behind) / 2e-6, rtol=0, atol=1e-8)


@pytest.mark.parametrize("form", ["few", "sorted", "reference"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0]])
def test_clamped_experts(name: str, form: str) -> None:
    _, bias, top_k, drop, keep = CASES[name]
    x = torch.randn(7, WIDTH, dtype=torch.float64)
    weights, choices = made(True, bias), chosen(7, top_k, drop, keep)
    with kernels(experts=form):
        got = experts(x, choices, weights, clamped(LIMIT, ALPHA))
    close(got, plain(x, choices, weights, scalars), 1e-12)


@pytest.mark.parametrize("form", ["sorted", "grouped"])
def test_slopes_of_clamped_experts(form: str) -> None:
    dtype = torch.float32 if form == "grouped" else torch.float64
    x = torch.randn(11, WIDTH, dtype=dtype)
    weights, choices = made(True, True, dtype), chosen(11, 3, True, True, dtype)
    learned = [x, choices.gates, *(weight for weight in weights if weight is not None)]
    for value in learned:
        value.requires_grad_()
    answers = []
    for one in (form, "reference"):
        with kernels(experts=one):
            answers.append(slopes(experts(x, choices, weights, clamped(LIMIT, ALPHA)), learned))
    for got, want in zip(*answers, strict=True):
        close(got, want, 1e-4 if form == "grouped" else 1e-12)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_few_tokens(name: str, tokens: int) -> None:
    gated, bias, top_k, drop, keep = CASES[name]
    x = torch.randn(tokens, WIDTH, dtype=torch.float64)
    weights, choices = made(gated, bias), chosen(tokens, top_k, drop, keep)
    with kernels(experts="few"):
        got = experts(x, choices, weights, TANH)
    torch.testing.assert_close(got, plain(x, choices, weights, TANH), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", CASES)
def test_grouped(name: str, dtype: torch.dtype, bound: float) -> None:
    """The form of other devices, which here runs on the CPU."""
    gated, bias, top_k, drop, keep = CASES[name]
    x = torch.randn(11, WIDTH).to(dtype).requires_grad_()
    weights, choices = made(gated, bias, dtype), chosen(11, top_k, drop, keep, dtype)
    learned = [x, choices.gates, *(weight for weight in weights if weight is not None)]
    for value in learned:
        value.requires_grad_()
    with kernels(experts="grouped"):
        got = experts(x, choices, weights, glu(functional.silu))
    with kernels(experts="reference"):
        want = experts(x, choices, weights, glu(functional.silu))
    close(got, want, bound)
    for one, other in zip(slopes(got, learned), slopes(want, learned), strict=True):
        close(one, other, bound)


@pytest.mark.parametrize("form", ["sorted", "grouped", "reference"])
def test_an_expert_without_tokens_has_a_gradient_of_zero(form: str) -> None:
    weights = made(True, True, torch.float32)
    for weight in weights:
        assert weight is not None
        weight[3] = float("nan")
        weight.requires_grad_()
    x = torch.randn(7, WIDTH, requires_grad=True)
    with kernels(experts=form):
        y = experts(x, chosen(7, 2, dtype=torch.float32), weights, glu(functional.silu))
    found = torch.autograd.grad(y.sum(), [x, *(weight for weight in weights if weight is not None)])
    assert bool(y.isfinite().all())
    assert bool(found[0].isfinite().all())
    for slope in found[1:]:
        assert not bool(slope[3].any())
        assert bool(slope.isfinite().all())


@pytest.mark.parametrize("form", ["sorted", "reference", "few"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_choice_at_all(form: str, tokens: int) -> None:
    weights, x = made(True, True), torch.randn(tokens, WIDTH, dtype=torch.float64)
    choices = Choices(torch.full((tokens, 2), -1), torch.ones(tokens, 2, dtype=torch.float64))
    with torch.no_grad(), kernels(experts=form):
        assert torch.equal(experts(x, choices, weights, TANH), torch.zeros(tokens, WIDTH, dtype=torch.float64))
    if form != "few":
        x.requires_grad_()
        with kernels(experts=form):
            y = experts(x, choices, weights, TANH)
        (found,) = torch.autograd.grad(y.sum(), [x], materialize_grads=True)
        assert torch.equal(found, torch.zeros_like(x))


def test_only_wanted_gradients_are_made() -> None:
    weights, x = made(True, False), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    weights.down.requires_grad_()
    with kernels(experts="sorted"):
        y = experts(x, chosen(6, 2), weights, TANH)
    y.sum().backward()
    assert weights.down.grad is not None
    assert weights.up.grad is None
    assert x.grad is not None


def test_a_second_gradient_is_refused() -> None:
    weights, x = made(True, False), torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    with kernels(experts="sorted"):
        y = experts(x, chosen(6, 2), weights, TANH)
    with pytest.raises(ConfigError, match="no second gradient"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_autocast_multiplies_in_its_dtype_and_gradients_keep_theirs() -> None:
    weights = made(True, True, torch.float32)
    for weight in weights:
        assert weight is not None
        weight.requires_grad_()
    x, choices = torch.randn(9, WIDTH, requires_grad=True), chosen(9, 2, dtype=torch.float32)
    want = experts(x, choices, weights, glu(functional.silu))
    with torch.autocast("cpu", torch.bfloat16):
        got = experts(x, choices, weights, glu(functional.silu))
        got.float().sum().backward()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0, atol=0.2)
    assert weights.up.grad is not None
    assert weights.up.grad.dtype == torch.float32


def test_experts_are_packed_once_and_anew_after_a_change() -> None:
    weights = Weights(torch.randn(3, 512, 512), torch.randn(3, 512, 512))
    choices = Choices(torch.tensor([[2, 0]]), torch.rand(1, 2), None, True)
    x = torch.randn(1, 512)
    with torch.no_grad():
        want = experts(x, choices, weights, TANH)
        kept: Packs = {}
        with packing(kept):
            for _ in range(3):
                torch.testing.assert_close(experts(x, choices, weights, TANH), want, rtol=1e-4, atol=1e-2)
            ((_, _, copies),) = kept.values()
            assert sorted(copies) == [0, 2]
            weights.up.mul_(2.0)
            changed = experts(x, choices, weights, TANH)
    with torch.no_grad():
        torch.testing.assert_close(changed, experts(x, choices, weights, TANH), rtol=1e-4, atol=1e-2)


def test_forms_say_why_they_cannot_serve() -> None:
    weights, x = made(True, False), torch.randn(40, WIDTH, dtype=torch.float64)
    for form, words in (("grouped", "takes no torch.float64"), ("few", "takes 64 choices, here are 80")):
        with pytest.raises(ConfigError, match=words), torch.no_grad(), kernels(experts=form):
            experts(x, chosen(40, 2), weights, TANH)
    with pytest.raises(ConfigError, match="gradients are wanted"), kernels(experts="few"):
        experts(x[:1].requires_grad_(), chosen(1, 2), weights, TANH)


@pytest.mark.parametrize(
    ("device", "dtype", "form"),
    [("cpu", torch.float32, "sorted"), ("cuda", torch.bfloat16, "grouped"), ("cuda", torch.float64, "reference")],
)
def test_the_choice_depends_on_the_device_alone(device: str, dtype: torch.dtype, form: str) -> None:
    weights = made(True, False, dtype).each(lambda weight: weight.to("meta"))
    some = chosen(100, 2, dtype=dtype)
    choices = Choices(some.experts.to("meta"), some.gates.to("meta"), None, True)
    with witnessing(device) as seen:
        experts(torch.empty(100, WIDTH, dtype=dtype, device="meta"), choices, weights, TANH)
    assert [choice.form for choice in seen] == [form]


def test_flops_are_those_of_the_chosen() -> None:
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    with counting() as tally:
        experts(x, chosen(6, 2), made(True, False), TANH)
        experts(x, chosen(6, 3), made(False, False), TANH)
    assert tally[0] == flops(12, WIDTH, HIDDEN, True) + flops(18, WIDTH, HIDDEN, False)
    assert tally[0] == 12 * 2 * 3 * WIDTH * HIDDEN + 18 * 2 * 2 * WIDTH * HIDDEN
