"""The generalized delta rule: every kernel against a loop of its formula, one head and one token at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.gated_delta import CHUNK_TOKENS, DeltaInputs, gated_delta_rule, l2_normalize
from heddle.numerics.recurrent.general_delta import (
    GENERAL_DELTA,
    GeneralDeltaInputs,
    _solved,
    general_delta_flops,
    general_delta_rule,
)
from heddle.numerics.recurrent.recurrence import RecurrenceFacts
from tests.laws.planting import calls

NAMES = ("q", "k", "v", "b", "c", "log_decay")


def formula(inputs: GeneralDeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = S_{t−1} (diag(w) − κ̂ᵀ (a ⊙ κ̂)) + vᵀ k̃ with S [d_v, d_k], as RWKV-7's paper writes it; b and c general."""
    out, last = torch.zeros_like(inputs.v), state.clone()
    rows, heads, length, _ = inputs.v.shape
    for row in range(rows):
        for head in range(heads):
            s, document = state[row, head].t(), 0
            for t in range(length):
                if inputs.call_segment_ids is not None and int(inputs.call_segment_ids[row, t]) != document:
                    s, document = torch.zeros_like(s), int(inputs.call_segment_ids[row, t])
                q, k, v, b, c, log_decay = (x[row, head, t] for x in inputs[:6])
                w = log_decay.exp()
                s = s @ (torch.diag(w) - torch.outer(c * w, b)) + torch.outer(v, k)
                out[row, head, t] = s @ q
            last[row, head] = s.t()
    return out, last


def random(
    length: int, packed: bool = False, shape: tuple[int, ...] = (2, 3, 5, 4), bounded: bool = True
) -> tuple[GeneralDeltaInputs, Tensor]:
    """Inputs and a state of `shape` (rows, heads, d_k, d_v) in float64; bounded: decays of at most RWKV-7's rate."""
    rows, heads, d_k, d_v = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    removal, size = l2_normalize(normal(rows, heads, length, d_k)), (rows, heads, length, d_k)
    drawn = normal(*size)
    log_decay = -0.60653 * drawn.sigmoid() if bounded else -drawn.square()
    return GeneralDeltaInputs(
        normal(*size),
        normal(*size),
        normal(rows, heads, length, d_v),
        removal * normal(*size).sigmoid(),
        removal / log_decay.exp() if bounded else removal,
        log_decay,
        (normal(rows, length) > 1.3).cumsum(1) if packed else None,
    ), normal(rows, heads, d_k, d_v)


def narrowed(inputs: GeneralDeltaInputs) -> GeneralDeltaInputs:
    return inputs._replace(**{name: getattr(inputs, name).float() for name in NAMES})


def run(kernel: str, inputs: GeneralDeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    with kernels(general_delta=kernel):
        return general_delta_rule(inputs, state.clone())


LENGTHS = [1, 2, 7, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 3]


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_values_equal_the_formula(length: int, packed: bool, bounded: bool) -> None:
    inputs, state = random(length, packed, bounded=bounded)
    expected = formula(inputs, state)
    for kernel in ("reference", "chunked", "batched", *(["step"] if length == 1 else [])):
        for actual_part, expected_part in zip(run(kernel, inputs, state), expected, strict=True):
            torch.testing.assert_close(actual_part, expected_part, rtol=0, atol=1e-11)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", ["reference", "chunked", "batched"])
def test_gradients_equal_those_of_the_formula(kernel: str, packed: bool) -> None:
    inputs, state = random(CHUNK_TOKENS + 9, packed, (1, 2, 4, 3))
    tensors = [x.detach().requires_grad_() for x in (*inputs[:6], state)]
    named: dict[str, Any] = dict(zip(NAMES, tensors[:6], strict=True))
    inputs = inputs._replace(**named)

    def gradients(result: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result[0].sin().sum() + result[1].cos().sum(), tensors)

    actual, expected = gradients(run(kernel, inputs, tensors[6])), gradients(formula(inputs, tensors[6]))
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_a_wrong_order_of_removal_and_writing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that removes what it writes itself."""
    calls(_solved, "tril", lambda x, diagonal: x.tril(0))(monkeypatch)
    inputs, state = random(9)
    difference = run("chunked", inputs, state)[0] - formula(inputs, state)[0]
    assert float(difference.abs().max()) > 1e-2


def test_the_gated_delta_rule_is_a_special_case() -> None:
    inputs, state = random(2 * CHUNK_TOKENS + 3, packed=True)
    beta, k = inputs.v[..., :1].sigmoid(), l2_normalize(inputs.k)
    delta = DeltaInputs(inputs.q, k, inputs.v, inputs.log_decay, beta[..., 0], inputs.call_segment_ids)
    general = inputs._replace(k=beta * k, b=beta * k, c=k)
    want = gated_delta_rule(delta, state.clone())
    for kernel in ("chunked", "batched", "reference"):
        for got_part, want_part in zip(run(kernel, general, state), want, strict=True):
            torch.testing.assert_close(got_part, want_part, rtol=0, atol=1e-11)


def test_no_token() -> None:
    inputs, state = random(0)
    y, after = general_delta_rule(inputs, state)
    assert y.shape == (2, 3, 0, 4)
    assert torch.equal(after, state)


def test_a_step_gives_the_reason_why_it_does_not_support_a_call() -> None:
    with pytest.raises(ConfigError, match="one token, not 2"):
        run("step", *random(2))


def test_a_token_that_changes_nothing() -> None:
    inputs, state = random(CHUNK_TOKENS + 5)
    still = torch.zeros(CHUNK_TOKENS + 5, dtype=torch.bool)
    still[3:CHUNK_TOKENS] = True
    zeroed = {name: getattr(inputs, name).masked_fill(still[:, None], 0.0) for name in ("b", "k", "log_decay")}
    without = inputs._replace(**{name: getattr(inputs, name)[:, :, ~still] for name in NAMES})
    for kernel in ("reference", "chunked", "batched"):
        actual = run(kernel, inputs._replace(**zeroed), state)[1]
        torch.testing.assert_close(actual, run(kernel, without, state)[1], rtol=0, atol=1e-11)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -0.6065306597126334])
def test_equal_keys_at_the_limits_of_rwkv7_stay_exact(decay: float) -> None:
    """a = 1 and one removal key for all tokens; float32 beside float64."""
    inputs, state = random(3 * CHUNK_TOKENS)
    key = l2_normalize(inputs.b[:, :, :1]).expand_as(inputs.b)
    log_decay = torch.full_like(inputs.log_decay, decay)
    inputs = inputs._replace(b=key, c=key / log_decay.exp(), log_decay=log_decay)
    expected = run("reference", inputs, state)
    size = float(expected[0].abs().max())
    for kernel in ("chunked", "batched"):
        narrow = run(kernel, narrowed(inputs), state.float())
        for actual, single, wanted in zip(run(kernel, inputs, state), narrow, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-11 * size)
            torch.testing.assert_close(single.double(), wanted, rtol=0, atol=2e-6 * size)


def test_4096_tokens_stay_finite_and_equal() -> None:
    inputs, state = random(4096, shape=(1, 1, 4, 3))
    expected, narrow = run("chunked", inputs, state), narrowed(inputs)
    size = float(expected[0].abs().max())
    for kernel in ("chunked", "batched", "reference"):
        for actual, wanted in zip(run(kernel, narrow, state.float()), expected, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=2e-6 * size)


def test_documents_do_not_influence_each_other() -> None:
    inputs, state = random(2 * CHUNK_TOKENS + 5)
    ids = (torch.arange(2 * CHUNK_TOKENS + 5) >= CHUNK_TOKENS + 3).long().expand(2, -1)
    second = ids[0] == 1
    changed = inputs._replace(v=torch.where(second[:, None], inputs.v, inputs.v * 7.0 + 1.0), call_segment_ids=ids)
    for kernel in ("chunked", "batched"):
        one = run(kernel, inputs._replace(call_segment_ids=ids), state)
        other = run(kernel, changed, state * 3.0)
        assert torch.equal(one[0][:, :, second], other[0][:, :, second])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("length", [1, 6, CHUNK_TOKENS + 1])
def test_the_chosen_kernel(length: int) -> None:
    facts = RecurrenceFacts(length, gradients=False)
    assert GENERAL_DELTA.first_supported(facts).name == ("step" if length == 1 else "chunked")
    on_device = facts._replace(tokens=length + 1, device="cuda")
    assert GENERAL_DELTA.first_supported(on_device).name == "batched"


def test_flops_are_those_that_torch_counts_in_the_reference() -> None:
    inputs, state = random(9)
    with FlopCounterMode(display=False) as counter, count_flops() as flops, kernels(general_delta="reference"):
        general_delta_rule(inputs, state)
    assert counter.get_total_flops() == general_delta_flops(2 * 9, 3, 5, 4) == flops[0]


def test_products_stay_in_float32_under_autocast() -> None:
    inputs, state = random(CHUNK_TOKENS + 2)
    narrow = narrowed(inputs)
    expected = general_delta_rule(narrow, state.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = general_delta_rule(narrow, state.float())
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)
