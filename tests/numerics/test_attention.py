"""Attention: every form against plain loops, values and gradients; padding, documents, windows and tails."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.attention import ATTENTION, attention, attention_weights, flops, reference
from heddle.numerics.kernels import kernels
from heddle.numerics.visibility import Visibility, ordered
from heddle.parts.layout import Layout
from tests.numerics.oracle import attend, sees


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


def serving() -> list[tuple[str, str]]:
    """(form, case) for every form that can serve a case."""
    return [(form, case) for case in CASES for form in FORMS[:-1] if serves(form, case)]


def serves(form: str, case: str) -> bool:
    seen = CASES[case]()
    try:
        with kernels(attention=form), torch.no_grad():
            attention(*draw(seen, Shape()), seen, 0.3)
    except ConfigError as error:
        return "cannot serve here, because" not in str(error)  # any other refusal fails below
    return True


def test_every_form_serves_somewhere() -> None:
    assert {form for form, _ in serving()} == set(FORMS[:-1])


@pytest.mark.parametrize(("form", "case"), serving())
def test_forms_equal_the_reference(form: str, case: str) -> None:
    seen = CASES[case]()
    inputs = draw(seen, Shape())
    want = reference(*inputs, seen, 0.3)
    probe = torch.randn_like(want)
    want_gradients = torch.autograd.grad((want * probe).sum(), inputs)
    with kernels(attention=form):
        got = attention(*inputs, seen, 0.3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for one, other in zip(torch.autograd.grad((got * probe).sum(), inputs), want_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("form", "case"), serving())
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_forms_in_lower_precision(form: str, case: str, dtype: torch.dtype, bound: float) -> None:
    seen = CASES[case]()
    q, k, v = (x.detach() for x in draw(seen, Shape(), dtype))
    want = reference(q.double(), k.double(), v.double(), seen, 0.3)
    with kernels(attention=form):
        got = attention(q, k, v, seen, 0.3)
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


def test_flops_are_those_that_torch_counts() -> None:
    shape = Shape()
    seen = tail(9, 9, causal=False)
    q, k, v = (x.detach() for x in draw(seen, shape))
    with FlopCounterMode(display=False) as counter:
        reference(q, k, v, seen, 0.3)
    assert counter.get_total_flops() == flops(9 * 9, shape.batch, shape.heads, shape.d_k + shape.d_v)
