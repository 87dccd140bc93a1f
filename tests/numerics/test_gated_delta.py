"""The gated delta rule, with a decay per head or per channel: every kernel against the papers' recurrence."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.gated_delta import (
    CHUNK_TOKENS,
    DELTA_RULE,
    DeltaInputs,
    delta_rule_flops,
    gated_delta_rule,
    l2_normalize,
)
from heddle.numerics.recurrent.recurrence import RecurrenceFacts


def paper(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = S_{t−1} Diag(α_t) (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t, S [d_v, d_k].

    Gated DeltaNet's formula where α is a number, and the transpose of Kimi Delta Attention's where it is a vector.
    """
    out = torch.zeros_like(inputs.v)
    rows, heads, length, _ = inputs.v.shape
    repeats, last = heads // inputs.k.shape[1], state.clone()
    for row in range(rows):
        for head in range(heads):
            s, document = state[row, head].t(), 0
            for t in range(length):
                if inputs.call_segment_ids is not None and int(inputs.call_segment_ids[row, t]) != document:
                    s, document = torch.zeros_like(s), int(inputs.call_segment_ids[row, t])
                q, k, v = inputs.q[row, head // repeats, t], inputs.k[row, head // repeats, t], inputs.v[row, head, t]
                alpha, beta = inputs.log_decay[row, head, t].exp(), inputs.beta[row, head, t]
                erase = torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)
                s = s @ torch.diag(alpha.expand(len(k))) @ erase + beta * torch.outer(v, k)
                out[row, head, t] = s @ q
            last[row, head] = s.t()
    return out, last


def random(
    length: int, packed: bool = False, shape: tuple[int, ...] = (2, 2, 4, 5, 3), channels: int = 1
) -> tuple[DeltaInputs, Tensor]:
    """Inputs and a state of `shape` (rows, key heads, heads, d_k, d_v) in float64, with `channels` decays per head."""
    rows, groups, heads, d_k, d_v = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    log_decay = -normal(rows, heads, length, channels).square()
    starts = normal(rows, length) > 1.3
    return DeltaInputs(
        l2_normalize(normal(rows, groups, length, d_k)),
        l2_normalize(normal(rows, groups, length, d_k)),
        normal(rows, heads, length, d_v),
        log_decay,
        normal(rows, heads, length).sigmoid(),
        starts.cumsum(1) if packed else None,
    ), normal(rows, heads, d_k, d_v)


def narrowed(inputs: DeltaInputs) -> DeltaInputs:
    q, k, v, log_decay, beta = (x.float() for x in inputs[:5])
    return DeltaInputs(q, k, v, log_decay, beta)


def run(kernel: str, inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    with kernels(delta=kernel):
        return gated_delta_rule(inputs, state.clone())


LENGTHS = [1, 2, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS + 3]


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_values_equal_the_papers_recurrence(length: int, packed: bool, channels: int) -> None:
    inputs, state = random(length, packed, channels=channels)
    expected = paper(inputs, state)
    for kernel in ("reference", "chunked", "batched", *(["step"] if length == 1 else [])):
        for actual_part, expected_part in zip(run(kernel, inputs, state), expected, strict=True):
            torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["reference", "chunked", "batched"])
def test_gradients_equal_the_papers_recurrence(kernel: str, packed: bool, channels: int) -> None:
    inputs, state = random(CHUNK_TOKENS + 9, packed, (1, 1, 2, 4, 3), channels)
    tensors = [x.requires_grad_() for x in (*inputs[:5], state)]

    def gradients(result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result[0].sin().sum() + result[1].cos().sum(), tensors)

    for actual, expected in zip(gradients(run(kernel, inputs, state)), gradients(paper(inputs, state)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_no_token() -> None:
    inputs, state = random(0)
    y, after = gated_delta_rule(inputs, state)
    assert y.shape == (2, 4, 0, 3)
    assert torch.equal(after, state)


def test_a_step_gives_the_reason_why_it_does_not_support_a_call() -> None:
    with pytest.raises(ConfigError, match="one token, not 2"):
        run("step", *random(2))
    inputs, state = random(1)
    with pytest.raises(ConfigError, match="gradients are required"):
        run("step", inputs._replace(v=inputs.v.requires_grad_()), state)


def test_a_token_that_changes_nothing() -> None:
    inputs, state = random(CHUNK_TOKENS + 5)
    still = torch.zeros(CHUNK_TOKENS + 5, dtype=torch.bool)
    still[3:CHUNK_TOKENS] = True
    with_no_ops = inputs._replace(
        beta=inputs.beta.masked_fill(still, 0.0), log_decay=inputs.log_decay.masked_fill(still[:, None], 0.0)
    )
    q, k, v, log_decay, beta = (x[:, :, ~still] for x in with_no_ops[:5])
    without = DeltaInputs(q, k, v, log_decay, beta)
    for kernel in ("reference", "chunked", "batched"):
        torch.testing.assert_close(
            run(kernel, with_no_ops, state)[1], run(kernel, without, state)[1], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -1e4, -1e30])
def test_equal_keys_and_extreme_gates_stay_exact(decay: float, channels: int) -> None:
    """Powers of the system, or exponentials of differences of sums, would overflow or lose precision here."""
    inputs, state = random(2 * CHUNK_TOKENS, channels=channels)
    inputs = inputs._replace(
        k=inputs.k[:, :, :1].expand_as(inputs.k),
        beta=torch.ones_like(inputs.beta),
        log_decay=inputs.log_decay * 0 + decay,
    )
    expected = run("reference", inputs, state)
    narrow = narrowed(inputs)
    for kernel in ("chunked", "batched"):
        for actual_part, single_precision, expected_part in zip(
            run(kernel, inputs, state), run(kernel, narrow, state.float()), expected, strict=True
        ):
            torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-12)
            torch.testing.assert_close(single_precision.double(), expected_part, rtol=0, atol=2e-5)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("keys", ["random", "equal", "in turns"])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -1e-2, -1.0])
@pytest.mark.parametrize("lowest", [1.9, 2.0])
def test_beta_near_two_stays_exact(lowest: float, decay: float, keys: str, channels: int) -> None:
    """β from `lowest` to 2, five chunks: each token reflects the state along its key, so errors do not die away."""
    inputs, state = near_two(lowest, decay, keys, channels)
    expected = run("reference", inputs, state)
    size = float(expected[0].abs().max())
    narrow = narrowed(inputs)
    for kernel in ("chunked", "batched"):
        for actual_part, single_precision, expected_part in zip(
            run(kernel, inputs, state), run(kernel, narrow, state.float()), expected, strict=True
        ):
            torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-10)
            torch.testing.assert_close(single_precision.double(), expected_part, rtol=0, atol=1e-4 * size)


def near_two(lowest: float, decay: float, keys: str, channels: int) -> tuple[DeltaInputs, Tensor]:
    length = 5 * CHUNK_TOKENS + 3
    inputs, state = random(length, channels=channels)
    uniform = torch.rand(inputs.beta.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = {"random": torch.arange(length), "equal": torch.zeros(length), "in turns": torch.arange(length) % 2}[keys]
    return inputs._replace(
        k=inputs.k[:, :, chosen.long()],
        beta=lowest + (2.0 - lowest) * uniform,
        log_decay=inputs.log_decay * 0 + decay,
    ), state


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("keys", ["random", "equal"])
@pytest.mark.parametrize("kernel", ["chunked", "batched"])
def test_gradients_of_beta_near_two_stay_exact(kernel: str, keys: str, channels: int) -> None:
    inputs, state = near_two(1.9, -1e-2, keys, channels)
    tensors = [x.requires_grad_() for x in (*inputs[:5], state)]
    actual, expected = (
        torch.autograd.grad(sum(part.sin().sum() for part in run(name, inputs, state)), tensors)  # type: ignore[arg-type]
        for name in (kernel, "reference")
    )
    for gradient, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 5])
def test_a_sudden_strong_decay_costs_no_precision(channels: int) -> None:
    """After α near zero, decays near one must be as exact as before: their logarithms are summed separately."""
    inputs, state = random(CHUNK_TOKENS, channels=channels)
    log_decay = torch.full_like(inputs.log_decay, -1e-3)
    log_decay[:, :, 5] = -3e4
    inputs = inputs._replace(log_decay=log_decay)
    expected, _ = run("reference", inputs, state)
    for kernel in ("chunked", "batched"):
        actual, _ = run(kernel, narrowed(inputs), state.float())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)


def test_channels_that_decay_at_one_rate_equal_one_decay_per_head() -> None:
    inputs, state = random(2 * CHUNK_TOKENS + 3, packed=True)
    per_channel = inputs._replace(log_decay=inputs.log_decay.expand(-1, -1, -1, 5))
    for actual, expected in zip(run("chunked", per_channel, state), run("chunked", inputs, state), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)


def test_16384_tokens_stay_finite_and_equal() -> None:
    inputs, state = random(16384, shape=(1, 1, 1, 4, 3))
    inputs = inputs._replace(log_decay=inputs.log_decay * 1e-4)
    narrow = narrowed(inputs)
    expected = run("chunked", inputs, state)
    for kernel in ("chunked", "batched", "reference"):
        actual = run(kernel, narrow, state.float())
        for actual_part, expected_part in zip(actual, expected, strict=True):
            torch.testing.assert_close(actual_part.double(), expected_part, rtol=0, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 5])
def test_documents_do_not_influence_each_other(channels: int) -> None:
    inputs, state = random(2 * CHUNK_TOKENS + 5, channels=channels)
    call_segment_ids = (torch.arange(2 * CHUNK_TOKENS + 5) >= CHUNK_TOKENS + 3).long().expand(2, -1)
    second_document = call_segment_ids[0] == 1
    changed = inputs._replace(
        v=torch.where(second_document[:, None], inputs.v, inputs.v * 7.0 + 1.0), call_segment_ids=call_segment_ids
    )
    first, second = (
        run("chunked", inputs._replace(call_segment_ids=call_segment_ids), state),
        run("chunked", changed, state * 3.0),
    )
    assert torch.equal(first[0][:, :, second_document], second[0][:, :, second_document])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("length", [1, 6, CHUNK_TOKENS + 1])
def test_the_chosen_kernel(length: int) -> None:
    facts = RecurrenceFacts(length, gradients=False)
    assert DELTA_RULE.first_supported(facts).name == ("step" if length == 1 else "chunked")


def test_flops_are_those_that_torch_counts_in_the_reference() -> None:
    inputs, state = random(9)
    with FlopCounterMode(display=False) as counter, count_flops() as flops, kernels(delta="reference"):
        gated_delta_rule(inputs, state)
    assert counter.get_total_flops() == delta_rule_flops(2 * 9, 4, 5, 3) == flops[0]


def test_products_stay_in_float32_under_autocast() -> None:
    inputs, state = random(CHUNK_TOKENS + 2)
    narrow = narrowed(inputs)
    expected = gated_delta_rule(narrow, state.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gated_delta_rule(narrow, state.float())
    assert all(
        torch.equal(actual_part, expected_part) for actual_part, expected_part in zip(actual, expected, strict=True)
    )
