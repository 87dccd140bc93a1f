"""The gated delta rule: equal keys, β near two, sudden decays and long texts; see also test_recurrences.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.numerics.recurrent.gated_delta import CHUNK_TOKENS
from tests.numerics.recurrences import CHANNEL_DELTA, DELTA, Rule, assert_close, narrowed, random, run

each_rule = pytest.mark.parametrize("rule", [DELTA, CHANNEL_DELTA], ids=["head", "channel"])


@each_rule
@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -1e4, -1e30])
def test_equal_keys_and_extreme_gates_stay_exact(decay: float, rule: Rule) -> None:
    """Powers of the system, or exponentials of differences of sums, would overflow or lose precision here."""
    inputs, state = random(rule, 2 * CHUNK_TOKENS)
    inputs = inputs._replace(
        k=inputs.k[:, :, :1].expand_as(inputs.k),
        beta=torch.ones_like(inputs.beta),
        log_decay=inputs.log_decay * 0 + decay,
    )
    expected = run(rule, "reference", inputs, state)
    for kernel in ("chunked", "batched"):
        assert_close(run(rule, kernel, inputs, state), expected, 1e-12)
        assert_close(run(rule, kernel, narrowed(inputs), state.float()), expected, 2e-5)


@each_rule
@pytest.mark.parametrize("keys", ["random", "equal", "in turns"])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -1e-2, -1.0])
@pytest.mark.parametrize("lowest", [1.9, 2.0])
def test_beta_near_two_stays_exact(lowest: float, decay: float, keys: str, rule: Rule) -> None:
    """β from `lowest` to 2, five chunks: each token reflects the state along its key, so errors do not die away."""
    inputs, state = near_two(lowest, decay, keys, rule)
    expected = run(rule, "reference", inputs, state)
    size = float(expected[0].abs().max())
    for kernel in ("chunked", "batched"):
        assert_close(run(rule, kernel, inputs, state), expected, 1e-10)
        assert_close(run(rule, kernel, narrowed(inputs), state.float()), expected, 1e-4 * size)


def near_two(lowest: float, decay: float, keys: str, rule: Rule) -> tuple[Any, Tensor]:
    length = 5 * CHUNK_TOKENS + 3
    inputs, state = random(rule, length)
    uniform = torch.rand(inputs.beta.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = {"random": torch.arange(length), "equal": torch.zeros(length), "in turns": torch.arange(length) % 2}[keys]
    return inputs._replace(
        k=inputs.k[:, :, chosen.long()],
        beta=lowest + (2.0 - lowest) * uniform,
        log_decay=inputs.log_decay * 0 + decay,
    ), state


@each_rule
@pytest.mark.parametrize("keys", ["random", "equal"])
@pytest.mark.parametrize("kernel", ["chunked", "batched"])
def test_gradients_of_beta_near_two_stay_exact(kernel: str, keys: str, rule: Rule) -> None:
    inputs, state = near_two(1.9, -1e-2, keys, rule)
    tensors = [x.requires_grad_() for x in (*inputs[:5], state)]
    actual, expected = (
        torch.autograd.grad(sum(part.sin().sum() for part in run(rule, name, inputs, state)), tensors)  # type: ignore[arg-type]
        for name in (kernel, "reference")
    )
    for gradient, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9)


@each_rule
def test_a_sudden_strong_decay_costs_no_precision(rule: Rule) -> None:
    """After α near zero, decays near one must be as exact as before: their logarithms are summed separately."""
    inputs, state = random(rule, CHUNK_TOKENS)
    log_decay = torch.full_like(inputs.log_decay, -1e-3)
    log_decay[:, :, 5] = -3e4
    inputs = inputs._replace(log_decay=log_decay)
    expected, _ = run(rule, "reference", inputs, state)
    for kernel in ("chunked", "batched"):
        actual, _ = run(rule, kernel, narrowed(inputs), state.float())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-6)


def test_channels_that_decay_at_one_rate_equal_one_decay_per_head() -> None:
    inputs, state = random(DELTA, 2 * CHUNK_TOKENS + 3, packed=True)
    per_channel = inputs._replace(log_decay=inputs.log_decay.expand(-1, -1, -1, 5))
    assert_close(run(DELTA, "chunked", per_channel, state), run(DELTA, "chunked", inputs, state), 1e-13)


def test_16384_tokens_stay_finite_and_equal() -> None:
    inputs, state = random(DELTA, 16384, shape=(1, 1, 1, 4, 3))
    inputs = inputs._replace(log_decay=inputs.log_decay * 1e-4)
    expected = run(DELTA, "chunked", inputs, state)
    for kernel in ("chunked", "batched", "reference"):
        assert_close(run(DELTA, kernel, narrowed(inputs), state.float()), expected, 1e-4)
