"""The generalized delta rule: its order, its special case, and RWKV-7's limits; see also test_recurrences.py."""

import pytest
import torch

from heddle.numerics.recurrent.gated_delta import CHUNK_TOKENS, DeltaInputs, gated_delta_rule, l2_normalize
from heddle.numerics.recurrent.general_delta import GENERAL_DELTA, _solved
from heddle.numerics.recurrent.recurrence import RecurrenceFacts
from tests.laws.planting import calls
from tests.numerics.recurrences import GENERAL, assert_close, formula, narrowed, random, run


def test_a_wrong_order_of_removal_and_writing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that removes what it writes itself."""
    calls(_solved, "tril", lambda x, diagonal: x.tril(0))(monkeypatch)
    inputs, state = random(GENERAL, 9)
    difference = run(GENERAL, "chunked", inputs, state)[0] - formula(GENERAL, inputs, state)[0]
    assert float(difference.abs().max()) > 1e-2


def test_the_gated_delta_rule_is_a_special_case() -> None:
    inputs, state = random(GENERAL, 2 * CHUNK_TOKENS + 3, packed=True)
    beta, k = inputs.v[..., :1].sigmoid(), l2_normalize(inputs.k)
    delta = DeltaInputs(inputs.q, k, inputs.v, inputs.log_decay, beta[..., 0], inputs.call_segment_ids)
    general = inputs._replace(k=beta * k, b=beta * k, c=k)
    want = gated_delta_rule(delta, state.clone())
    for kernel in ("chunked", "batched", "reference"):
        assert_close(run(GENERAL, kernel, general, state), want, 1e-11)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -0.6065306597126334])
def test_equal_keys_at_the_limits_of_rwkv7_stay_exact(decay: float) -> None:
    """a = 1 and one removal key for all tokens; float32 beside float64."""
    inputs, state = random(GENERAL, 3 * CHUNK_TOKENS)
    key = l2_normalize(inputs.b[:, :, :1]).expand_as(inputs.b)
    log_decay = torch.full_like(inputs.log_decay, decay)
    inputs = inputs._replace(b=key, c=key / log_decay.exp(), log_decay=log_decay)
    expected = run(GENERAL, "reference", inputs, state)
    size = float(expected[0].abs().max())
    for kernel in ("chunked", "batched"):
        assert_close(run(GENERAL, kernel, inputs, state), expected, 1e-11 * size)
        assert_close(run(GENERAL, kernel, narrowed(inputs), state.float()), expected, 2e-6 * size)


def test_4096_tokens_stay_finite_and_equal() -> None:
    inputs, state = random(GENERAL, 4096, shape=(1, 1, 1, 4, 3))
    expected = run(GENERAL, "chunked", inputs, state)
    for kernel in ("chunked", "batched", "reference"):
        actual = run(GENERAL, kernel, narrowed(inputs), state.float())
        assert_close(actual, expected, 2e-6 * float(expected[0].abs().max()))


def test_a_gpu_takes_all_chunks_at_once() -> None:
    facts = RecurrenceFacts(2, gradients=False, device="cuda")
    assert GENERAL_DELTA.first_supported(facts).name == "batched"
