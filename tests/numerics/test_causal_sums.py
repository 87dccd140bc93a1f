"""Sums that decay: every form against a loop over tokens, values and gradients, over chunks, padding and documents."""

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import chunked_sums
from heddle.numerics.recurrent.causal_sums import CAUSAL_SUMS, causal_means, causal_sums, flops
from heddle.numerics.recurrent.chunked_sums import Places, inverse

BATCH, HEADS, D_K, D_V = 2, 3, 4, 5
FORMS = [form.name for form in CAUSAL_SUMS.forms]
DECAYS = {"no decay": None, "decay": [0.0, -0.03, -2.0]}


class Case(NamedTuple):
    """Which tokens are real, and each token's document; both [B, T]."""

    real: list[list[int]]
    documents: list[list[int]]


def even(length: int) -> Case:
    return Case([[1] * length] * BATCH, [[0] * length] * BATCH)


HOLES = [[1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0]]
PACKED = [[0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]]
CASES = {
    "none": even(0),
    "one": even(1),
    "two": even(2),
    "eleven": even(11),
    "holes": Case(HOLES, even(11).documents),
    "documents": Case(even(11).real, PACKED),
    "documents with holes": Case(HOLES, PACKED),
}


def places_of(case: Case) -> Places:
    real, documents = torch.tensor(case.real).view(BATCH, -1), torch.tensor(case.documents).view(BATCH, -1)
    whole = bool((documents == 0).all())
    return Places(None if bool(real.all()) else real.cumsum(1), None if whole else documents)


def draw(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a state."""
    length = len(case.real[0])
    shapes = [(length, D_K), (length, D_K), (length, D_V), (D_K, D_V)]
    q, k, v, state = (torch.randn(BATCH, HEADS, *shape, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, state)]


def masked(k: Tensor, case: Case) -> Tensor:
    """Keys are zero at padding."""
    return k * torch.tensor(case.real).view(BATCH, 1, -1, 1)


def loop(inputs: list[Tensor], log_decay: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """What the papers say: one row, head and token at a time."""
    q, k, v, state = inputs
    gamma = torch.ones(HEADS, dtype=torch.float64) if log_decay is None else log_decay.exp()
    rows, ends = [], []
    for b in range(BATCH):
        for h in range(HEADS):
            held, document, out = state[b, h], 0, [torch.zeros(0, v.shape[3], dtype=torch.float64)]
            for t, (real, own) in enumerate(zip(case.real[b], case.documents[b], strict=True)):
                if own != document:
                    held, document = torch.zeros_like(held), own
                if real:
                    held = gamma[h] * held + torch.outer(k[b, h, t], v[b, h, t])
                out.append((q[b, h, t] @ held)[None])
            rows.append(torch.cat(out))
            ends.append(held)
    return torch.stack(rows).unflatten(0, (BATCH, HEADS)), torch.stack(ends).unflatten(0, (BATCH, HEADS))


def decay_of(name: str) -> Tensor | None:
    found = DECAYS[name]
    return None if found is None else torch.tensor(found, dtype=torch.float64, requires_grad=True)


def settings(patch: pytest.MonkeyPatch, chunk: int, chunks: int) -> None:
    """Chunks of so many tokens, so many of them together."""
    patch.setattr(chunked_sums, "CHUNK", chunk)
    patch.setattr(chunked_sums, "SCORES", chunk * chunk * BATCH * HEADS * chunks)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["reference", "recurrent"])
def test_plain_forms_are_what_the_loop_says(form: str, name: str, decay: str) -> None:
    inputs, log_decay = draw(CASES[name]), decay_of(decay)
    sources = [*inputs, *([] if log_decay is None else [log_decay])]
    want = loop(inputs, log_decay, CASES[name])
    q, k, v, state = inputs
    with kernels(causal_sums=form):
        y, after = causal_sums(q, masked(k, CASES[name]), v, log_decay, places_of(CASES[name]), state)
    assert after is not None
    got = y, after
    probes = [torch.randn_like(x) for x in want]
    slopes = [
        torch.autograd.grad(
            [(x * probe).sum() for x, probe in zip(pair, probes, strict=True) if x.requires_grad],
            sources,
            materialize_grads=True,
        )
        for pair in (got, want)
    ]
    for one, other in zip([*got, *slopes[0]], [*want, *slopes[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.real[0]) > 1])
@pytest.mark.parametrize(("chunk", "chunks"), [(1, 3), (3, 1), (3, 2), (4, 9), (11, 1), (64, 1)])
def test_chunks_are_what_the_loop_says(
    chunk: int, chunks: int, name: str, decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings(monkeypatch, chunk, chunks)
    inputs, log_decay = draw(CASES[name]), decay_of(decay)
    inputs[3] = torch.zeros_like(inputs[3])
    sources = [*inputs[:3], *([] if log_decay is None else [log_decay])]
    want, _ = loop(inputs, log_decay, CASES[name])
    q, k, v, _ = inputs
    with kernels(causal_sums="chunked"):
        got, _ = causal_sums(q, masked(k, CASES[name]), v, log_decay, places_of(CASES[name]))
    probe = torch.randn_like(want)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    slopes = [torch.autograd.grad((x * probe).sum(), sources) for x in (got, want)]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.real[0]) > 1])
def test_chunks_carry_a_state(name: str, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(monkeypatch, 3, 2)
    inputs, log_decay = [x.detach() for x in draw(CASES[name])], decay_of(decay)
    with torch.no_grad():
        want = loop(inputs, log_decay, CASES[name])
        q, k, v, state = inputs
        with kernels(causal_sums="chunked"):
            got = causal_sums(q, masked(k, CASES[name]), v, log_decay, places_of(CASES[name]), state)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_sums_are_at_least_float32(form: str, dtype: torch.dtype, bound: float) -> None:
    case, log_decay = CASES["documents with holes"], torch.tensor(DECAYS["decay"])
    q, k, v, state = (x.detach() for x in draw(case, dtype))
    want = loop([x.double() for x in (q, k, v, state)], log_decay.double(), case)
    with kernels(causal_sums=form), torch.autocast("cpu", dtype=torch.bfloat16):
        got = causal_sums(q, masked(k, case).to(dtype), v, log_decay, places_of(case), state.float())
    for one, other in zip(got, want, strict=True):
        assert one is not None
        assert one.dtype == torch.float32
        assert float((one.double() - other).square().mean() / other.square().mean()) <= bound


def test_forms_agree_over_a_long_text_and_stay_finite() -> None:
    """16,384 tokens: sums that never decay grow without overflow, and those that do forget at once stay exact."""
    length, log_decay = 16384, torch.tensor([0.0, math.log1p(-(2.0**-5)), -80.0])
    q, k, v = (torch.randn(1, HEADS, length, 2).abs() for _ in range(3))
    found = {}
    for form in ("recurrent", "chunked"):
        with torch.no_grad(), kernels(causal_sums=form):
            found[form] = causal_sums(q, k, v, log_decay, Places(), torch.zeros(1, HEADS, 2, 2))
    for one, other in zip(found["chunked"], found["recurrent"], strict=True):
        assert one is not None
        assert other is not None
        assert bool(one.isfinite().all())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_later_tokens_change_no_earlier_bit_across_chunks() -> None:
    q, k, v, _ = (x.detach() for x in draw(even(150)))
    log_decay = decay_of("decay")
    before, _ = causal_sums(q, k, v, log_decay, Places())
    for start in (1, 63, 64, 65, 149):
        other_q, other_k, other_v = (
            torch.cat((x[:, :, :start], torch.randn_like(x[:, :, start:])), dim=2) for x in (q, k, v)
        )
        after, _ = causal_sums(other_q, other_k, other_v, log_decay, Places())
        assert torch.equal(after[:, :, :start], before[:, :, :start])


def test_documents_change_no_bit_of_each_other_across_chunks() -> None:
    bounds = [0, 3, 64, 70, 128, 150]
    case = Case(even(150).real, [[i for i, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]] * BATCH)
    q, k, v, _ = (x.detach() for x in draw(case))
    before, _ = causal_sums(q, k, v, decay_of("decay"), places_of(case))
    for start, stop in pairwise(bounds):
        inside = torch.zeros(150, dtype=torch.bool)
        inside[start:stop] = True
        other_q, other_k, other_v = (torch.where(inside[:, None], torch.randn_like(x), x) for x in (q, k, v))
        after, _ = causal_sums(other_q, other_k, other_v, decay_of("decay"), places_of(case))
        assert torch.equal(after[:, :, ~inside], before[:, :, ~inside])


def test_gradients_do_not_pass_through_a_state_in_chunks() -> None:
    q, k, v, state = draw(CASES["eleven"])
    with kernels(causal_sums="chunked"), pytest.raises(ConfigError, match="gradients do not pass through a state"):
        causal_sums(q, k, v, None, Places(), state)


def test_flops_are_those_that_torch_counts() -> None:
    q, k, v, _ = (x.detach() for x in draw(CASES["eleven"]))
    with FlopCounterMode(display=False) as counter:
        for t in range(11):  # one product to add a token, one to read the sum
            q[:, :, t : t + 1] @ (k[:, :, t : t + 1].mT @ v[:, :, t : t + 1])
    assert counter.get_total_flops() == flops(11, BATCH, HEADS, (D_K, D_V))


def test_inverse_is_zero_where_there_is_nothing_to_divide_by() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([0.0, torch.finfo(dtype).smallest_normal / 4, 1e-30, 2.0], dtype=dtype, requires_grad=True)
        y = inverse(x)
        (slope,) = torch.autograd.grad(y[[0, 1, 3]].sum(), x)
        assert y[:2].tolist() == slope[:2].tolist() == [0.0, 0.0]
        torch.testing.assert_close(y[2:], 1 / x[2:])
        assert float(slope[3]) == -0.25


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.real[0]) > 1])
@pytest.mark.parametrize(("chunk", "chunks"), [(3, 2), (4, 9), (64, 1)])
@pytest.mark.parametrize("form", ["chunked", "reference"])
def test_means_are_what_the_loop_says(
    form: str, chunk: int, chunks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sums v beside a column of ones; where a query meets no key its mean and gradients are zero."""
    settings(monkeypatch, chunk, chunks)
    case = CASES[name]
    q, k, v, state = (x.detach().abs() for x in draw(case))
    k[:, 0] = 0.0
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    ones = torch.ones_like(v[..., :1])
    state = torch.cat((state, state[..., :1]), dim=-1)
    wants = []
    for start in (torch.zeros_like(state), state):
        sums, after = loop([q, masked(k, case), torch.cat((v, ones), dim=-1), start], None, case)
        nothing = sums[..., -1:] == 0
        wants.append((torch.where(nothing, 0.0, sums[..., :-1] / torch.where(nothing, 1.0, sums[..., -1:])), after))
    with kernels(causal_means=form):
        got, none = causal_means(q, masked(k, case), v, places_of(case))
        with torch.no_grad():
            carried = causal_means(q, masked(k, case), v, places_of(case), state)
    assert none is None
    for one, other in zip([got, *carried], [wants[0][0], *wants[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    probe = torch.randn_like(got)
    slopes = [torch.autograd.grad((x * probe).sum(), (q, k, v)) for x in (got, wants[0][0])]
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_very_long_text_of_keys_that_sum_to_zero() -> None:
    """131,072 tokens: where features of keys are all zero the answer is zero, later it is a mean of values."""
    length = 131072
    q, k, v = (torch.randn(1, 1, length, 2).relu() + shift for shift in (0.1, 0.0, 0.0))
    k[:, :, : length // 2] = 0.0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y, _ = causal_means(q, k, v, Places())
    assert not y[:, :, : length // 2].detach().any()
    assert bool(y.isfinite().all())
    assert float(y[:, :, -1000:].detach().mean()) == pytest.approx(
        float(v[:, :, length // 2 :].detach().mean()), rel=0.05
    )
    for gradient in torch.autograd.grad(y.sin().sum(), inputs):
        assert bool(gradient.isfinite().all())
