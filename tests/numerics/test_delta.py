"""The gated delta rule: every form against the paper's sentence, token by token, and what it must bear."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from heddle.errors import ConfigError
from heddle.numerics.dispatch.flop_counter import counting
from heddle.numerics.kernels import kernels
from heddle.numerics.recurrent import gated_delta as module
from heddle.numerics.recurrent.gated_delta import CHUNK, Rule, delta, flops, unit


def paper(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ, o_t = S_t q_t, with S [d_v, d_k] as the paper writes it."""
    out = torch.zeros_like(rule.v)
    rows, heads, length, _ = rule.v.shape
    repeats, last = heads // rule.k.shape[1], memory.clone()
    for row in range(rows):
        for head in range(heads):
            s, document = memory[row, head].t(), 0
            for t in range(length):
                if rule.segments is not None and int(rule.segments[row, t]) != document:
                    s, document = torch.zeros_like(s), int(rule.segments[row, t])
                q, k, v = rule.q[row, head // repeats, t], rule.k[row, head // repeats, t], rule.v[row, head, t]
                alpha, beta = rule.log_decay[row, head, t].exp(), rule.beta[row, head, t]
                s = alpha * s @ (torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k)) + beta * torch.outer(v, k)
                out[row, head, t] = s @ q
            last[row, head] = s.t()
    return out, last


def random(length: int, packed: bool = False, shape: tuple[int, ...] = (2, 2, 4, 5, 3)) -> tuple[Rule, Tensor]:
    """A rule and a memory of `shape` (rows, key heads, heads, d_k, d_v) in float64."""
    rows, groups, heads, d_k, d_v = shape
    generator = torch.Generator().manual_seed(length)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    log_decay = -normal(rows, heads, length).square()
    starts = normal(rows, length) > 1.3
    return Rule(
        unit(normal(rows, groups, length, d_k)),
        unit(normal(rows, groups, length, d_k)),
        normal(rows, heads, length, d_v),
        log_decay,
        normal(rows, heads, length).sigmoid(),
        starts.cumsum(1) if packed else None,
    ), normal(rows, heads, d_k, d_v)


def run(form: str, rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    with kernels(delta=form):
        return delta(rule, memory.clone())


LENGTHS = [1, 2, 7, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_values_are_the_papers(length: int, packed: bool) -> None:
    rule, memory = random(length, packed)
    want = paper(rule, memory)
    for form in ("reference", "chunked", *(["step"] if length == 1 else [])):
        for got, wanted in zip(run(form, rule, memory), want, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["reference", "chunked"])
def test_gradients_are_the_papers(form: str, packed: bool) -> None:
    rule, memory = random(CHUNK + 9, packed, (1, 1, 2, 4, 3))
    tensors = [x.requires_grad_() for x in (*rule[:5], memory)]

    def gradients(found: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(found[0].sin().sum() + found[1].cos().sum(), tensors)

    for got, want in zip(gradients(run(form, rule, memory)), gradients(paper(rule, memory)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_no_token() -> None:
    rule, memory = random(0)
    y, after = delta(rule, memory)
    assert y.shape == (2, 4, 0, 3)
    assert torch.equal(after, memory)


def test_a_step_says_why_it_cannot_serve() -> None:
    with pytest.raises(ConfigError, match="one token, here are 2"):
        run("step", *random(2))
    rule, memory = random(1)
    with pytest.raises(ConfigError, match="gradients are wanted"):
        run("step", rule._replace(v=rule.v.requires_grad_()), memory)


def test_a_token_that_changes_nothing() -> None:
    rule, memory = random(CHUNK + 5)
    still = torch.zeros(CHUNK + 5, dtype=torch.bool)
    still[3:CHUNK] = True
    quiet = rule._replace(beta=rule.beta.masked_fill(still, 0.0), log_decay=rule.log_decay.masked_fill(still, 0.0))
    without = Rule(*(x[:, :, ~still] for x in quiet[:5]))
    for form in ("reference", "chunked"):
        torch.testing.assert_close(run(form, quiet, memory)[1], run(form, without, memory)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, -1e-6, -5.0, -1e4, -1e30])
def test_equal_keys_and_extreme_gates_stay_exact(decay: float) -> None:
    """What powers of the system, or exponentials of differences of sums, would blow up or lose."""
    rule, memory = random(2 * CHUNK)
    rule = rule._replace(
        k=rule.k[:, :, :1].expand_as(rule.k), beta=torch.ones_like(rule.beta), log_decay=rule.log_decay * 0 + decay
    )
    want = run("reference", rule, memory)
    narrow = Rule(*(x.float() for x in rule[:5]))
    for got, single, wanted in zip(
        run("chunked", rule, memory), run("chunked", narrow, memory.float()), want, strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(single.double(), wanted, rtol=0, atol=2e-5)


def test_sudden_forgetting_costs_no_precision() -> None:
    """After α near zero, decays near one must be as exact as before: their logarithms are summed apart."""
    rule, memory = random(CHUNK)
    log_decay = torch.full_like(rule.log_decay, -1e-3)
    log_decay[:, :, 5] = -3e4
    rule = rule._replace(log_decay=log_decay)
    want, _ = run("reference", rule, memory)
    got, _ = run("chunked", Rule(*(x.float() for x in rule[:5])), memory.float())
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


def test_16384_tokens_stay_finite_and_equal() -> None:
    rule, memory = random(16384, shape=(1, 1, 1, 4, 3))
    rule = rule._replace(log_decay=rule.log_decay * 1e-4)
    narrow = Rule(*(x.float() for x in rule[:5]))
    want = run("chunked", rule, memory)
    for got in (run("chunked", narrow, memory.float()), run("reference", narrow, memory.float())):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-4)


def test_a_document_is_not_touched_by_the_others() -> None:
    rule, memory = random(2 * CHUNK + 5)
    segments = (torch.arange(2 * CHUNK + 5) >= CHUNK + 3).long().expand(2, -1)
    here = segments[0] == 1
    changed = rule._replace(v=torch.where(here[:, None], rule.v, rule.v * 7.0 + 1.0), segments=segments)
    first, second = run("chunked", rule._replace(segments=segments), memory), run("chunked", changed, memory * 3.0)
    assert torch.equal(first[0][:, :, here], second[0][:, :, here])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("length", [1, 6, CHUNK + 1])
def test_the_chosen_form(length: int) -> None:
    facts = module.Facts(length, gradients=False)
    assert module.DELTA.first(facts).name == ("step" if length == 1 else "chunked")


def test_flops_are_those_that_torch_counts_in_the_reference() -> None:
    rule, memory = random(9)
    with FlopCounterMode(display=False) as counter, counting() as tally, kernels(delta="reference"):
        delta(rule, memory)
    assert counter.get_total_flops() == flops(2 * 9, 4, 5, 3) == tally[0]


def test_products_stay_wide_under_autocast() -> None:
    rule, memory = random(CHUNK + 2)
    narrow = Rule(*(x.float() for x in rule[:5]))
    want = delta(narrow, memory.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = delta(narrow, memory.float())
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
