"""Decaying sums: every kernel against a loop over tokens, with chunks, padding and documents."""

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import batched_chunks, chunked_sums
from heddle.numerics.recurrent.causal_sums import CAUSAL_SUMS, causal_means, causal_sums, causal_sums_flops
from heddle.numerics.recurrent.chunked_sums import CallLayout, safe_quotient, safe_reciprocal

BATCH, HEADS, D_K, D_V = 2, 3, 4, 5
KERNELS = [kernel.name for kernel in CAUSAL_SUMS.kernels if kernel.name != "fla"]
EMPTY = ("batched", "none")  # all chunks at once are at least one
DECAYS = {"no decay": None, "decay": [0.0, -0.03, -2.0]}


class Case(NamedTuple):
    """Which positions hold tokens, and each token's document; both [B, T]."""

    is_token: list[list[int]]
    segment_ids: list[list[int]]


def even(length: int) -> Case:
    return Case([[1] * length] * BATCH, [[0] * length] * BATCH)


HOLES = [[1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0]]
PACKED = [[0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]]
CASES = {
    "none": even(0),
    "one": even(1),
    "two": even(2),
    "eleven": even(11),
    "holes": Case(HOLES, even(11).segment_ids),
    "documents": Case(even(11).is_token, PACKED),
    "documents with holes": Case(HOLES, PACKED),
}


def layout_of(case: Case) -> CallLayout:
    is_token, segment_ids = torch.tensor(case.is_token).view(BATCH, -1), torch.tensor(case.segment_ids).view(BATCH, -1)
    single_document = bool((segment_ids == 0).all())
    return CallLayout(None if bool(is_token.all()) else is_token.cumsum(1), None if single_document else segment_ids)


def draw(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and a state."""
    length = len(case.is_token[0])
    shapes = [(length, D_K), (length, D_K), (length, D_V), (D_K, D_V)]
    q, k, v, state = (torch.randn(BATCH, HEADS, *shape, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, state)]


def masked(k: Tensor, case: Case) -> Tensor:
    """Keys are zero at padding."""
    return k * torch.tensor(case.is_token).view(BATCH, 1, -1, 1)


def loop(inputs: list[Tensor], log_decay: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    """The papers' recurrence, one row, head and token at a time."""
    q, k, v, state = inputs
    gamma = torch.ones(HEADS, dtype=torch.float64) if log_decay is None else log_decay.exp()
    rows, ends = [], []
    for b in range(BATCH):
        for h in range(HEADS):
            s, current_segment, out = state[b, h], 0, [torch.zeros(0, v.shape[3], dtype=torch.float64)]
            for t, (is_token, segment) in enumerate(zip(case.is_token[b], case.segment_ids[b], strict=True)):
                if segment != current_segment:
                    s, current_segment = torch.zeros_like(s), segment
                if is_token:
                    s = gamma[h] * s + torch.outer(k[b, h, t], v[b, h, t])
                out.append((q[b, h, t] @ s)[None])
            rows.append(torch.cat(out))
            ends.append(s)
    return torch.stack(rows).unflatten(0, (BATCH, HEADS)), torch.stack(ends).unflatten(0, (BATCH, HEADS))


def decay_of(name: str) -> Tensor | None:
    log_decay = DECAYS[name]
    return None if log_decay is None else torch.tensor(log_decay, dtype=torch.float64, requires_grad=True)


def set_chunks(patch: pytest.MonkeyPatch, chunk: int, chunks: int) -> None:
    """Set the number of tokens per chunk, and of chunks per group."""
    patch.setattr(chunked_sums, "CHUNK_TOKENS", chunk)
    patch.setattr(batched_chunks, "CHUNK_TOKENS", chunk)
    patch.setattr(batched_chunks, "SUM_BLOCK", max(2, chunks))
    patch.setattr(chunked_sums, "MAX_PAIRS", chunk * chunk * BATCH * HEADS * chunks)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(
    ("kernel", "name"),
    [(kernel, name) for kernel in ("reference", "recurrent", "batched") for name in CASES if (kernel, name) != EMPTY],
)
def test_plain_kernels_equal_the_loop(kernel: str, name: str, decay: str) -> None:
    inputs, log_decay = draw(CASES[name]), decay_of(decay)
    sources = [*inputs, *([] if log_decay is None else [log_decay])]
    expected = loop(inputs, log_decay, CASES[name])
    q, k, v, state = inputs
    with kernels(causal_sums=kernel):
        y, new_state = causal_sums(q, masked(k, CASES[name]), v, log_decay, layout_of(CASES[name]), state)
    assert new_state is not None
    actual = y, new_state
    probes = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(
            [(x * probe).sum() for x, probe in zip(pair, probes, strict=True) if x.requires_grad],
            sources,
            materialize_grads=True,
        )
        for pair in (actual, expected)
    ]
    for actual_part, expected_part in zip([*actual, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.is_token[0]) > 1])
@pytest.mark.parametrize(("chunk", "chunks"), [(1, 3), (3, 1), (3, 2), (4, 9), (11, 1), (64, 1)])
@pytest.mark.parametrize("kernel", ["chunked", "batched"])
def test_chunks_equal_the_loop(
    kernel: str, chunk: int, chunks: int, name: str, decay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_chunks(monkeypatch, chunk, chunks)
    inputs, log_decay = draw(CASES[name]), decay_of(decay)
    inputs[3] = torch.zeros_like(inputs[3])
    sources = [*inputs[:3], *([] if log_decay is None else [log_decay])]
    expected, _ = loop(inputs, log_decay, CASES[name])
    q, k, v, _ = inputs
    with kernels(causal_sums=kernel):
        actual, _ = causal_sums(q, masked(k, CASES[name]), v, log_decay, layout_of(CASES[name]))
    probe = torch.randn_like(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((x * probe).sum(), sources) for x in (actual, expected)]
    for actual_gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.is_token[0]) > 1])
@pytest.mark.parametrize("kernel", ["chunked", "batched"])
def test_chunks_continue_a_state(kernel: str, name: str, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunks(monkeypatch, 3, 2)
    inputs, log_decay = [x.detach() for x in draw(CASES[name])], decay_of(decay)
    with torch.no_grad():
        expected = loop(inputs, log_decay, CASES[name])
        q, k, v, state = inputs
        with kernels(causal_sums=kernel):
            actual = causal_sums(q, masked(k, CASES[name]), v, log_decay, layout_of(CASES[name]), state)
    for actual_part, expected_part in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-12), (torch.bfloat16, 1e-3)])
def test_sums_are_at_least_float32(kernel: str, dtype: torch.dtype, bound: float) -> None:
    case, log_decay = CASES["documents with holes"], torch.tensor(DECAYS["decay"])
    q, k, v, state = (x.detach() for x in draw(case, dtype))
    expected = loop([x.double() for x in (q, k, v, state)], log_decay.double(), case)
    with kernels(causal_sums=kernel), torch.autocast("cpu", dtype=torch.bfloat16):
        actual = causal_sums(q, masked(k, case).to(dtype), v, log_decay, layout_of(case), state.float())
    for actual_part, expected_part in zip(actual, expected, strict=True):
        assert actual_part is not None
        assert actual_part.dtype == torch.float32
        assert float((actual_part.double() - expected_part).square().mean() / expected_part.square().mean()) <= bound


def test_kernels_agree_over_many_tokens_and_stay_finite() -> None:
    """16,384 tokens: sums without decay do not overflow, and sums that decay at once stay exact."""
    length, log_decay = 16384, torch.tensor([0.0, math.log1p(-(2.0**-5)), -80.0])
    q, k, v = (torch.randn(1, HEADS, length, 2).abs() for _ in range(3))
    results = {}
    for kernel in ("recurrent", "chunked", "batched"):
        with torch.no_grad(), kernels(causal_sums=kernel):
            results[kernel] = causal_sums(q, k, v, log_decay, CallLayout(), torch.zeros(1, HEADS, 2, 2))
    for kernel in ("chunked", "batched"):
        for actual, recurrent in zip(results[kernel], results["recurrent"], strict=True):
            assert actual is not None
            assert recurrent is not None
            assert bool(actual.isfinite().all())
            torch.testing.assert_close(actual, recurrent, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", ["chunked", "batched"])
def test_later_tokens_change_no_earlier_bit_across_chunks(kernel: str) -> None:
    q, k, v, _ = (x.detach() for x in draw(even(150)))
    log_decay = decay_of("decay")
    with kernels(causal_sums=kernel):
        before, _ = causal_sums(q, k, v, log_decay, CallLayout())
    for start in (1, 63, 64, 65, 149):
        other_q, other_k, other_v = (
            torch.cat((x[:, :, :start], torch.randn_like(x[:, :, start:])), dim=2) for x in (q, k, v)
        )
        with kernels(causal_sums=kernel):
            after, _ = causal_sums(other_q, other_k, other_v, log_decay, CallLayout())
        assert torch.equal(after[:, :, :start], before[:, :, :start])


@pytest.mark.parametrize("kernel", ["chunked", "batched"])
def test_documents_change_no_bit_of_each_other_across_chunks(kernel: str) -> None:
    bounds = [0, 3, 64, 70, 128, 150]
    case = Case(even(150).is_token, [[i for i, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]] * BATCH)
    q, k, v, _ = (x.detach() for x in draw(case))
    with kernels(causal_sums=kernel):
        before, _ = causal_sums(q, k, v, decay_of("decay"), layout_of(case))
    for start, stop in pairwise(bounds):
        inside = torch.zeros(150, dtype=torch.bool)
        inside[start:stop] = True
        other_q, other_k, other_v = (torch.where(inside[:, None], torch.randn_like(x), x) for x in (q, k, v))
        with kernels(causal_sums=kernel):
            after, _ = causal_sums(other_q, other_k, other_v, decay_of("decay"), layout_of(case))
        assert torch.equal(after[:, :, ~inside], before[:, :, ~inside])


def test_gradients_do_not_pass_through_a_state_in_chunks() -> None:
    q, k, v, state = draw(CASES["eleven"])
    with kernels(causal_sums="chunked"), pytest.raises(ConfigError, match=r"gradients.*state"):
        causal_sums(q, k, v, None, CallLayout(), state)


def test_flops_are_those_that_torch_counts() -> None:
    q, k, v, _ = (x.detach() for x in draw(CASES["eleven"]))
    with FlopCounterMode(display=False) as counter:
        for t in range(11):  # one product to add a token, one to read the sum
            q[:, :, t : t + 1] @ (k[:, :, t : t + 1].mT @ v[:, :, t : t + 1])
    assert counter.get_total_flops() == causal_sums_flops(11, BATCH, HEADS, (D_K, D_V))


def test_safe_reciprocal_is_zero_where_x_is_too_small() -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([0.0, torch.finfo(dtype).smallest_normal / 4, 1e-30, 2.0], dtype=dtype, requires_grad=True)
        y = safe_reciprocal(x)
        (gradient,) = torch.autograd.grad(y[[0, 1, 3]].sum(), x)
        assert y[:2].tolist() == gradient[:2].tolist() == [0.0, 0.0]
        torch.testing.assert_close(y[2:], 1 / x[2:])
        assert float(gradient[3]) == -0.25


def test_the_gradient_of_a_quotient_of_small_numbers_is_finite() -> None:
    numerator = torch.tensor([0.0, 2e-30, 3.0], requires_grad=True)
    denominator = torch.tensor([0.0, 1e-30, 2.0], requires_grad=True)
    y = safe_quotient(numerator, denominator)
    gradients = torch.autograd.grad(y.sum(), (numerator, denominator))
    torch.testing.assert_close(y, torch.tensor([0.0, 2.0, 1.5]))
    torch.testing.assert_close(gradients, (torch.tensor([0.0, 1e30, 0.5]), torch.tensor([0.0, -2e30, -0.75])))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.is_token[0]) > 1])
@pytest.mark.parametrize(("chunk", "chunks"), [(3, 2), (4, 9), (64, 1)])
@pytest.mark.parametrize("kernel", ["chunked", "reference"])
def test_means_equal_the_loop(kernel: str, chunk: int, chunks: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop sums v with a column of ones. Where a query has no key, its mean and gradients are zero."""
    set_chunks(monkeypatch, chunk, chunks)
    case = CASES[name]
    q, k, v, state = (x.detach().abs() for x in draw(case))
    k[:, 0] = 0.0
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    ones = torch.ones_like(v[..., :1])
    state = torch.cat((state, state[..., :1]), dim=-1)
    expected_results = []
    for initial_state in (torch.zeros_like(state), state):
        sums, new_state = loop([q, masked(k, case), torch.cat((v, ones), dim=-1), initial_state], None, case)
        no_weight = sums[..., -1:] == 0
        expected_results.append(
            (torch.where(no_weight, 0.0, sums[..., :-1] / torch.where(no_weight, 1.0, sums[..., -1:])), new_state)
        )
    with kernels(causal_means=kernel):
        actual, no_state = causal_means(q, masked(k, case), v, layout_of(case))
        with torch.no_grad():
            with_state = causal_means(q, masked(k, case), v, layout_of(case), state)
    assert no_state is None
    for actual_part, expected_part in zip(
        [actual, *with_state], [expected_results[0][0], *expected_results[1]], strict=True
    ):
        torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-12)
    probe = torch.randn_like(actual)
    gradients = [torch.autograd.grad((x * probe).sum(), (q, k, v)) for x in (actual, expected_results[0][0])]
    for actual_part, expected_part in zip(*gradients, strict=True):
        torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-11)


def test_many_tokens_whose_first_half_has_zero_keys() -> None:
    """131,072 tokens: the output is zero while all key features are zero, and later a mean of values."""
    length = 131072
    q, k, v = (torch.randn(1, 1, length, 2).relu() + shift for shift in (0.1, 0.0, 0.0))
    k[:, :, : length // 2] = 0.0
    inputs = [x.requires_grad_() for x in (q, k, v)]
    y, _ = causal_means(q, k, v, CallLayout())
    assert not y[:, :, : length // 2].detach().any()
    assert bool(y.isfinite().all())
    assert float(y[:, :, -1000:].detach().mean()) == pytest.approx(
        float(v[:, :, length // 2 :].detach().mean()), rel=0.05
    )
    for gradient in torch.autograd.grad(y.sin().sum(), inputs):
        assert bool(gradient.isfinite().all())
