"""Mamba-2's state space duality: every kernel against the paper's recurrence, token by token, and extreme inputs."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.causal_sums import causal_sums_flops
from heddle.numerics.recurrent.recurrence import RecurrenceFacts
from heddle.numerics.recurrent.ssd import CHUNK_TOKENS, SSD, SSDInputs, state_space_duality


def paper(inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_{t−1} + Δ_t x_t B_tᵀ, y_t = h_t C_t + D x_t, with h [d_v, d_k] as the paper writes it."""
    out, last = torch.zeros_like(inputs.v), state.clone()
    rows, heads, length, _ = inputs.v.shape
    repeats = heads // inputs.k.shape[1]
    for row in range(rows):
        for head in range(heads):
            h, document = state[row, head].t(), 0
            for t in range(length):
                if inputs.call_segment_ids is not None and int(inputs.call_segment_ids[row, t]) != document:
                    h, document = torch.zeros_like(h), int(inputs.call_segment_ids[row, t])
                c, b = inputs.q[row, head // repeats, t], inputs.k[row, head // repeats, t]
                x, delta = inputs.v[row, head, t], inputs.time_step[row, head, t]
                h = inputs.log_decay[row, head, t].exp() * h + delta * torch.outer(x, b)
                out[row, head, t] = h @ c + inputs.skip[head] * x
            last[row, head] = h.t()
    return out, last


def random(length: int, packed: bool = False, shape: tuple[int, ...] = (2, 2, 4, 5, 3)) -> tuple[SSDInputs, Tensor]:
    """Inputs and a state of `shape` (rows, groups, heads, d_k, d_v) in float64."""
    rows, groups, heads, d_k, d_v = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    starts = normal(rows, length) > 1.3
    return SSDInputs(
        normal(rows, groups, length, d_k),
        normal(rows, groups, length, d_k),
        normal(rows, heads, length, d_v),
        -normal(rows, heads, length, 1).square(),
        normal(rows, heads, length, 1).square(),
        normal(heads),
        starts.cumsum(1) if packed else None,
    ), normal(rows, heads, d_k, d_v)


def run(kernel: str, inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    with kernels(ssd=kernel):
        return state_space_duality(inputs, state.clone())


def narrowed(inputs: SSDInputs) -> SSDInputs:
    q, k, v, log_decay, time_step, skip = (x.float() for x in inputs[:6])
    return SSDInputs(q, k, v, log_decay, time_step, skip)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 3])
def test_values_equal_the_papers_recurrence(length: int, packed: bool) -> None:
    inputs, state = random(length, packed)
    expected = paper(inputs, state)
    for kernel in ("reference", "chunked", "batched", *(["step"] if length == 1 else [])):
        for actual_part, expected_part in zip(run(kernel, inputs, state), expected, strict=True):
            torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["reference", "chunked", "batched"])
def test_gradients_equal_the_papers_recurrence(kernel: str, packed: bool) -> None:
    inputs, state = random(CHUNK_TOKENS + 9, packed, (1, 1, 2, 4, 3))
    tensors = [x.requires_grad_() for x in (*inputs[:6], state)]

    def gradients(result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result[0].sin().sum() + result[1].cos().sum(), tensors)

    for actual, expected in zip(gradients(run(kernel, inputs, state)), gradients(paper(inputs, state)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_no_token() -> None:
    inputs, state = random(0)
    y, after = state_space_duality(inputs, state)
    assert y.shape == (2, 4, 0, 3)
    assert torch.equal(after, state)


@pytest.mark.parametrize("kernel", ["chunked", "batched"])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -1e4, -1e30])
def test_extreme_decays_stay_exact(decay: float, kernel: str) -> None:
    inputs, state = random(2 * CHUNK_TOKENS)
    inputs = inputs._replace(log_decay=inputs.log_decay * 0 + decay)
    expected = run("reference", inputs, state)
    for actual, atol in (
        (run(kernel, inputs, state), 1e-12),
        (run(kernel, narrowed(inputs), state.float()), 2e-4),
    ):
        for actual_part, expected_part in zip(actual, expected, strict=True):
            torch.testing.assert_close(actual_part.double(), expected_part, rtol=0, atol=atol)


def test_a_sudden_strong_decay_costs_no_precision() -> None:
    """After α near zero, decays near one must be as exact as before: their logarithms are summed separately."""
    inputs, state = random(CHUNK_TOKENS)
    log_decay = torch.full_like(inputs.log_decay, -1e-3)
    log_decay[:, :, 5] = -3e4
    inputs = inputs._replace(log_decay=log_decay)
    expected, _ = run("reference", inputs, state)
    for kernel in ("chunked", "batched"):
        actual, _ = run(kernel, narrowed(inputs), state.float())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)
    assert float(expected.abs().max()) > 10


def test_documents_do_not_influence_each_other() -> None:
    inputs, state = random(2 * CHUNK_TOKENS + 5)
    call_segment_ids = (torch.arange(2 * CHUNK_TOKENS + 5) >= CHUNK_TOKENS + 3).long().expand(2, -1)
    second_document = call_segment_ids[0] == 1
    changed = inputs._replace(
        v=torch.where(second_document[:, None], inputs.v, inputs.v * 7.0 + 1.0), call_segment_ids=call_segment_ids
    )
    first = run("chunked", inputs._replace(call_segment_ids=call_segment_ids), state)
    second = run("chunked", changed, state * 3.0)
    assert torch.equal(first[0][:, :, second_document], second[0][:, :, second_document])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("length", [1, 6, CHUNK_TOKENS + 1])
def test_the_chosen_kernel(length: int) -> None:
    facts = RecurrenceFacts(length, gradients=False)
    assert SSD.first_supported(facts).name == ("step" if length == 1 else "chunked")


def test_flops_are_those_that_torch_counts_in_the_reference() -> None:
    inputs, state = random(9)
    with FlopCounterMode(display=False) as counter, count_flops() as flops, kernels(ssd="reference"):
        state_space_duality(inputs, state)
    assert counter.get_total_flops() == causal_sums_flops(9, 2, 4, (5, 3)) == flops[0]


def test_products_stay_in_float32_under_autocast() -> None:
    inputs, state = random(CHUNK_TOKENS + 2)
    expected = state_space_duality(narrowed(inputs), state.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = state_space_duality(narrowed(inputs), state.float())
    assert all(
        torch.equal(actual_part, expected_part) for actual_part, expected_part in zip(actual, expected, strict=True)
    )
