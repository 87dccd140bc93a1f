"""Attention: every form against plain loops, values and gradients; padding, documents, windows and tails."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.attention.observer import Observation, observe, observing
from heddle.numerics.attention.score_modifiers import Extras
from heddle.numerics.attention.softmax import ATTENTION, attention, attention_weights, flops, reference
from heddle.numerics.attention.visibility import Visibility, ordered
from heddle.numerics.kernels import kernels
from heddle.parts.context.layout import Layout
from tests.numerics.oracle import attend, sees, weigh


class Shape(NamedTuple):
    """Rows, heads, groups, widths of keys and values."""

    batch: int = 2
    heads: int = 4
    groups: int = 2
    d_k: int = 6
    d_v: int = 5


def tail(queries: int, keys: int, window: int | None = None, causal: bool = True) -> Visibility:
    """Queries that are the last of consecutive keys."""
    q, k = ordered(2, queries, keys, torch.device("cpu"))
    everything = (queries == 1 and (window is None or keys <= window)) or (not causal and window is None)
    return Visibility(q, k, window=window, causal=causal, ordered=True, everything=everything)


def packed(window: int | None = None) -> Visibility:
    return Layout.packed([[4, 7, 1], [1, 2, 9]]).seen(window, True)


def padded(window: int | None = None, causal: bool = True) -> Visibility:
    return Layout.padded([9, 4], side="left").seen(window, causal)


CASES: dict[str, Callable[[], Visibility]] = {
    "full": lambda: tail(9, 9),
    "tail": lambda: tail(3, 9),
    "one query": lambda: tail(1, 9),
    "window": lambda: tail(40, 40, window=5),
    "window of one": lambda: tail(20, 20, window=1),
    "window on a tail": lambda: tail(17, 23, window=4),
    "bidirectional": lambda: tail(9, 9, causal=False),
    "bidirectional window": lambda: tail(40, 40, window=3, causal=False),
    "packed": packed,
    "packed with a window": lambda: packed(3),
    "padded": padded,
    "padded with a window": lambda: padded(3),
    "padded and bidirectional": lambda: padded(causal=False),
}
FORMS = [form.name for form in ATTENTION.forms]
OPTIONS = {
    "plain": (None, False, False),
    "softcap": (0.4, False, False),
    "sink": (None, True, False),
    "softcap and sink": (0.4, True, False),
    "slopes": (None, False, True),
    "slopes and sink": (None, True, True),
    "slopes, softcap and sink": (0.4, True, True),
}


def options(name: str, dtype: torch.dtype = torch.float64) -> Extras:
    """The options of that name for four heads."""
    softcap, sink, slopes = OPTIONS[name]
    values = torch.tensor([-1.0, 0.3, 0.9, 2.0], dtype=dtype)
    fixed = torch.tensor([0.7, 0.31, 0.05, 0.003], dtype=torch.promote_types(dtype, torch.float32))
    return Extras(softcap, values.requires_grad_() if sink else None, fixed if slopes else None)


def graded(extras: Extras) -> list[Tensor]:
    """What of the options has a gradient."""
    return [] if extras.sink is None else [extras.sink]


def draw(seen: Visibility, shape: Shape, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = seen.q_positions.shape[1], seen.k_positions.shape[1]
    q = torch.randn(shape.batch, shape.heads, queries, shape.d_k, dtype=torch.float64)
    k = torch.randn(shape.batch, shape.groups, keys, shape.d_k, dtype=torch.float64)
    v = torch.randn(shape.batch, shape.groups, keys, shape.d_v, dtype=torch.float64)
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()


@pytest.mark.parametrize("shape", [Shape(), Shape(heads=3, groups=3, d_v=8), Shape(heads=6, groups=1)])
@pytest.mark.parametrize("case", CASES)
def test_reference_is_what_plain_loops_say(case: str, shape: Shape) -> None:
    seen = CASES[case]()
    q, k, v = draw(seen, shape)
    got = reference(q, k, v, seen, 0.3)
    torch.testing.assert_close(got, attend(q.detach(), k.detach(), v.detach(), seen, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_options_are_what_plain_loops_say(case: str, option: str) -> None:
    seen, extras = CASES[case](), options(option)
    q, k, v = (x.detach() for x in draw(seen, Shape()))
    want = weigh(q, k, seen, 0.9, extras)
    with torch.no_grad():
        torch.testing.assert_close(attention_weights(q, k, seen, 0.9, extras), want, rtol=0, atol=1e-12)
        got = reference(q, k, v, seen, 0.9, None, extras)
    torch.testing.assert_close(got, attend(q, k, v, seen, 0.9, extras), rtol=0, atol=1e-12)


def serving() -> list[tuple[str, str, str]]:
    """(form, case, option) for every form that can serve a case."""
    return [
        (form, case, option)
        for case in CASES
        for form in FORMS[:-1]
        for option in OPTIONS
        if serves(form, case, option)
    ]


def serves(form: str, case: str, option: str) -> bool:
    seen = CASES[case]()
    try:
        with kernels(attention=form), torch.no_grad():
            attention(*draw(seen, Shape()), seen, 0.3, None, options(option))
    except ConfigError as error:
        return "cannot serve here, because" not in str(error)  # any other refusal fails below
    return True


def test_every_form_serves_somewhere() -> None:
    assert {form for form, _, option in serving() if option == "plain"} == set(FORMS[:-1])
    assert {form for form, _, option in serving() if option == "sink"} == set(FORMS[:-1]) - {"unmasked"}
    assert {form for form, _, option in serving() if option == "softcap"} == set(FORMS[:-1]) - {"causal", "unmasked"}
    assert {form for form, _, option in serving() if option == "slopes"} == set(FORMS[:-1]) - {"causal"}


@pytest.mark.parametrize(("form", "case", "option"), serving())
def test_forms_equal_the_reference(form: str, case: str, option: str) -> None:
    seen, extras = CASES[case](), options(option)
    inputs = draw(seen, Shape())
    wanted = [*inputs, *graded(extras)]
    want = reference(*inputs, seen, 0.9, None, extras)
    probe = torch.randn_like(want)
    want_gradients = torch.autograd.grad((want * probe).sum(), wanted)
    with kernels(attention=form):
        got = attention(*inputs, seen, 0.9, None, extras)
        with torch.no_grad():
            alone = attention(*inputs, seen, 0.9, None, extras)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(alone, want.detach(), rtol=0, atol=1e-12)
    for one, other in zip(torch.autograd.grad((got * probe).sum(), wanted), want_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "case", "option"), serving())
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_forms_in_lower_precision(form: str, case: str, option: str, dtype: torch.dtype, bound: float) -> None:
    seen, extras = CASES[case](), options(option, dtype)
    q, k, v = (x.detach() for x in draw(seen, Shape(), dtype))
    exact = Extras(extras.softcap, *(None if x is None else x.double() for x in (extras.sink, extras.slopes)))
    want = reference(q.double(), k.double(), v.double(), seen, 0.3, None, exact).detach()
    for gradients in (True, False):
        if form == "unmasked" and dtype == torch.bfloat16:
            with kernels(attention=form), pytest.raises(ConfigError, match="a narrow product would round the scores"):
                attention(q, k, v, seen, 0.3, None, extras)
            continue
        with kernels(attention=form), torch.set_grad_enabled(gradients):
            got = attention(q, k, v, seen, 0.3, None, extras).detach()
        assert got.dtype == dtype
        assert float((got.double() - want).square().mean() / want.square().mean()) <= bound


@pytest.mark.parametrize("form", ["tiles", "reference"])
def test_a_query_that_sees_nothing_gives_zeros_and_no_gradient(form: str) -> None:
    seen = padded()
    q, k, v = draw(seen, Shape())
    with kernels(attention=form):
        y = attention(q, k, v, seen, 0.3)
    y.sum().backward()
    nothing = seen.q_positions < 0
    assert bool(nothing.any())
    assert y.detach().transpose(1, 2)[nothing].abs().max() == 0
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.transpose(1, 2)[nothing].abs().max() == 0


@pytest.mark.parametrize("form", ["tiles", "reference"])
def test_what_unused_slots_hold_reaches_nothing(form: str) -> None:
    seen = padded()
    q, k, v = (x.detach() for x in draw(seen, Shape()))
    unused = (seen.k_positions < 0)[:, None, :, None]
    bad_k, bad_v = (x.masked_fill(unused, float("nan")) for x in (k, v))
    real = (seen.q_positions >= 0)[:, None, :, None]
    with kernels(attention=form):
        clean = attention(q, k, v, seen, 0.3)
        poisoned = attention(q, bad_k, bad_v, seen, 0.3)
    assert torch.equal(torch.where(real, poisoned, 0.0), torch.where(real, clean, 0.0))


def test_large_scores_in_half_precision() -> None:
    seen = tail(4, 4)
    q, k, v = (torch.full((2, 2, 4, 64), 90.0, dtype=torch.float16) for _ in range(3))
    assert bool(attention(q, k, v, seen, 0.125).isfinite().all())
    assert bool(reference(q, k, v, seen, 0.125).isfinite().all())


def test_weights_sum_to_one_over_the_seen() -> None:
    seen = padded(3)
    q, k, _ = draw(seen, Shape())
    weights = attention_weights(q, k, seen, 0.3)
    mask = torch.tensor([[[sees(seen, b, t, s) for s in range(9)] for t in range(9)] for b in range(2)])
    assert torch.equal(weights > 0, mask[:, None].expand_as(weights))
    torch.testing.assert_close(weights.sum(-1), mask.any(-1)[:, None].double().expand(2, 4, 9), rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [None, "reference"])
def test_who_observes_is_given_the_weights_and_changes_nothing(form: str | None) -> None:
    seen, extras = padded(3), options("softcap and sink")
    q, k, v = (x.detach() for x in draw(seen, Shape()))
    taken: list[Observation] = []
    with kernels(**({} if form is None else {"attention": form})), torch.no_grad():
        want = attention(q, k, v, seen, 0.9, None, extras)
        with observing(taken.append):
            got = attention(q, k, v, seen, 0.9, None, extras)
        attention(q, k, v, seen, 0.9, None, extras)
    assert torch.equal(got, want)
    assert [one.groups for one in taken] == [2]
    torch.testing.assert_close(taken[0].weights, weigh(q, k, seen, 0.9, extras), rtol=0, atol=1e-12)


def test_nothing_is_made_for_nobody() -> None:
    made: list[str] = []

    def make() -> Observation:
        made.append("made")
        return Observation(torch.zeros(1, 1, 1, 1), 1)

    observe(make)
    assert made == []
    with observing(lambda observation: None):
        observe(make)
    assert made == ["made"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["unmasked", "folded", "tiles", "reference"])
def test_a_bias_far_from_the_first_position_is_not_rounded(form: str, dtype: torch.dtype) -> None:
    """After 3,000 keys: slope · j alone, or a bias in the narrow dtype, would be off by more than what is left."""
    if form == "unmasked" and dtype == torch.bfloat16:
        return
    seen = tail(1, 3000)
    q, k, v = (x.detach() for x in draw(seen, Shape(), dtype))
    extras = options("slopes", dtype)
    want = weigh(q[:1].double(), k[:1, :, -200:].double(), tail(1, 200), 0.3, options("slopes"))
    want = torch.einsum("bgrts,bgsd->bgrtd", want.unflatten(1, (2, 2)), v[:1, :, -200:].double()).flatten(1, 2)
    with kernels(attention=form):
        got = attention(q, k, v, seen, 0.3, None, extras)[:1]
    near = slice(0, 2)  # heads whose weights beyond 200 keys are below 1e-20
    error = float((got[:, near].double() - want[:, near]).square().mean() / want[:, near].square().mean())
    assert error <= (1e-12 if dtype == torch.float32 else 1e-4)


def test_a_bias_of_many_queries_is_made_a_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heddle.numerics.attention.softmax.BIASES", 4 * 40 * 17)
    seen, extras = tail(40, 40), options("slopes and sink")
    q, k, v = (x.detach() for x in draw(seen, Shape()))
    made: list[int] = []
    bias = Extras.bias

    def counted(self: Extras, here: Visibility) -> Tensor | None:
        found = bias(self, here)
        made.append(0 if found is None else found.numel())
        return found

    monkeypatch.setattr(Extras, "bias", counted)
    with kernels(attention="tiles"), torch.no_grad():
        got = attention(q, k, v, seen, 0.3, None, extras)
    assert made == [4 * 40 * 17, 4 * 40 * 17, 4 * 40 * 6]
    torch.testing.assert_close(got, reference(q, k, v, seen, 0.3, None, extras).detach(), rtol=0, atol=1e-12)


def test_flops_are_those_that_torch_counts() -> None:
    shape = Shape()
    seen = tail(9, 9, causal=False)
    q, k, v = (x.detach() for x in draw(seen, shape))
    with FlopCounterMode(display=False) as counter:
        reference(q, k, v, seen, 0.3)
    assert counter.get_total_flops() == flops(9 * 9, shape.batch, shape.heads, shape.d_k + shape.d_v)
