"""Delta rules, state space duality and the selective scan: every kernel against the papers' recurrences."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.dispatch import count_flops
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent.recurrence import RecurrenceFacts
from tests.numerics.recurrences import (
    CHANNEL_DELTA,
    DELTA,
    GENERAL,
    SELECTIVE,
    STATE_SPACE,
    UNBOUNDED,
    Result,
    Rule,
    assert_close,
    formula,
    narrowed,
    random,
    run,
    tensors_of,
)

RULES = {
    "delta": DELTA,
    "channel delta": CHANNEL_DELTA,
    "general": GENERAL,
    "unbounded general": UNBOUNDED,
    "ssd": STATE_SPACE,
    "selective scan": SELECTIVE,
}
LENGTHS = [(0, 1), (0, 2), (0, 7), (1, -1), (1, 0), (1, 1), (2, 0), (2, 3)]  # chunks, and tokens after them
KERNELS = ("reference", "chunked", "batched")
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@each_rule
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("chunks", "rest"), LENGTHS)
def test_values_equal_the_papers_recurrence(chunks: int, rest: int, packed: bool, rule: Rule) -> None:
    length = chunks * rule.chunk + rest
    inputs, state = random(rule, length, packed)
    expected = formula(rule, inputs, state)
    for kernel in (*KERNELS, *(["step"] if length == 1 else [])):
        assert_close(run(rule, kernel, inputs, state), expected, rule.atol[0])


@each_rule
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_equal_the_papers_recurrence(kernel: str, packed: bool, rule: Rule) -> None:
    inputs, state = random(rule, rule.chunk + 9, packed, (1, 1, 2, 4, 3))
    leaves = {name: x.detach().requires_grad_() for name, x in tensors_of(inputs).items()}
    inputs, tensors = inputs._replace(**leaves), [*leaves.values(), state.requires_grad_()]

    def gradients(result: Result) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(result[0].sin().sum() + result[1].cos().sum(), tensors)

    expected = gradients(formula(rule, inputs, state))
    for got, want in zip(gradients(run(rule, kernel, inputs, state)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=rule.atol[1])


@each_rule
def test_no_token(rule: Rule) -> None:
    inputs, state = random(rule, 0)
    y, after = rule.call(inputs, state)
    assert y.shape == (2, 4, 0, 3)
    assert torch.equal(after, state)


@each_rule
def test_a_step_gives_the_reason_why_it_does_not_support_a_call(rule: Rule) -> None:
    with pytest.raises(ConfigError, match="one token, not 2"):
        run(rule, "step", *random(rule, 2))
    inputs, state = random(rule, 1)
    with pytest.raises(ConfigError, match="gradients are required"):
        run(rule, "step", inputs._replace(v=inputs.v.requires_grad_()), state)


@each_rule
def test_a_token_that_changes_nothing(rule: Rule) -> None:
    inputs, state = random(rule, rule.chunk + 5)
    still = torch.zeros(rule.chunk + 5, dtype=torch.bool)
    still[3 : rule.chunk] = True
    tensors = {name: x for name, x in tensors_of(inputs).items() if x.ndim > 2}
    zeroed = {name: tensors[name].transpose(2, -1).masked_fill(still, 0.0).transpose(2, -1) for name in rule.quiet}
    without = inputs._replace(**{name: x[:, :, ~still] for name, x in tensors.items()})
    for kernel in KERNELS:
        actual = run(rule, kernel, inputs._replace(**zeroed), state)[1]
        torch.testing.assert_close(actual, run(rule, kernel, without, state)[1], rtol=0, atol=rule.atol[0])


@each_rule
def test_documents_do_not_influence_each_other(rule: Rule) -> None:
    inputs, state = random(rule, 2 * rule.chunk + 5)
    ids = (torch.arange(2 * rule.chunk + 5) >= rule.chunk + 3).long().expand(2, -1)
    second = ids[0] == 1
    changed = inputs._replace(v=torch.where(second[:, None], inputs.v, inputs.v * 7.0 + 1.0), call_segment_ids=ids)
    for kernel in ("chunked", "batched"):
        one = run(rule, kernel, inputs._replace(call_segment_ids=ids), state)
        other = run(rule, kernel, changed, state * 3.0)
        assert torch.equal(one[0][:, :, second], other[0][:, :, second])
        assert torch.equal(one[1], other[1])


@each_rule
@pytest.mark.parametrize("length", [1, 6, 65])
def test_the_chosen_kernel(length: int, rule: Rule) -> None:
    facts = RecurrenceFacts(length, gradients=False)
    assert rule.operation.first_supported(facts).name == ("step" if length == 1 else "chunked")


@each_rule
def test_flops_are_those_that_torch_counts_in_the_reference(rule: Rule) -> None:
    inputs, state = random(rule, 9)
    with FlopCounterMode(display=False) as counter, count_flops() as flops, kernels(**{rule.name: "reference"}):
        rule.call(inputs, state)
    assert counter.get_total_flops() == rule.flops == flops[0]


@each_rule
def test_products_stay_in_float32_under_autocast(rule: Rule) -> None:
    inputs, state = random(rule, rule.chunk + 2)
    narrow = narrowed(inputs)
    expected = rule.call(narrow, state.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = rule.call(narrow, state.float())
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)
