"""Mamba-2's state space duality with extreme decays; see also test_recurrences.py."""

import pytest
import torch

from heddle.numerics.recurrent.ssd import CHUNK_TOKENS
from tests.numerics.recurrences import STATE_SPACE, assert_close, narrowed, random, run


@pytest.mark.parametrize("kernel", ["chunked", "batched"])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -1e4, -1e30])
def test_extreme_decays_stay_exact(decay: float, kernel: str) -> None:
    inputs, state = random(STATE_SPACE, 2 * CHUNK_TOKENS)
    inputs = inputs._replace(log_decay=inputs.log_decay * 0 + decay)
    expected = run(STATE_SPACE, "reference", inputs, state)
    assert_close(run(STATE_SPACE, kernel, inputs, state), expected, 1e-12)
    assert_close(run(STATE_SPACE, kernel, narrowed(inputs), state.float()), expected, 2e-4)


def test_a_sudden_strong_decay_costs_no_precision() -> None:
    """After α near zero, decays near one must be as exact as before: their logarithms are summed separately."""
    inputs, state = random(STATE_SPACE, CHUNK_TOKENS)
    log_decay = torch.full_like(inputs.log_decay, -1e-3)
    log_decay[:, :, 5] = -3e4
    inputs = inputs._replace(log_decay=log_decay)
    expected, _ = run(STATE_SPACE, "reference", inputs, state)
    for kernel in ("chunked", "batched"):
        actual, _ = run(STATE_SPACE, kernel, narrowed(inputs), state.float())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-4)
    assert float(expected.abs().max()) > 10
