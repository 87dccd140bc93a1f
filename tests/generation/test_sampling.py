"""Sampling: greedy, temperature, top-k and top-p; the random numbers depend on seed, row and step alone."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError, MachineError
from heddle.generation.decode import Sampler

LOGITS = [2.0, 0.5, 1.0, -1.0, 0.5]
DRAWS = 4000


def token_shares(sampler: Sampler, logits: list[float] | None = None, rows: int = DRAWS) -> list[float]:
    """How often each token comes, over rows of the same logits."""
    same = torch.tensor([logits or LOGITS], dtype=torch.float32).expand(rows, -1)
    counts = torch.bincount(sampler.sample(same, step=3), minlength=same.shape[1])
    return [int(count) / rows for count in counts]


def chi_square(shares: list[float], expected: list[float], rows: int = DRAWS) -> float:
    return sum((s - e) ** 2 / e for s, e in zip(shares, expected, strict=True) if e > 0) * rows


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def renormalized(probabilities: list[float], tokens: set[int]) -> list[float]:
    total = sum(probabilities[token] for token in tokens)
    return [p / total if token in tokens else 0.0 for token, p in enumerate(probabilities)]


CRITICAL = 18.5  # chi-square of 4 degrees of freedom, probability 0.001


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(1.0, seed=1), softmax(LOGITS)),
        (Sampler(0.5, seed=2), softmax(LOGITS, 0.5)),
        (Sampler(3.0, seed=3), softmax(LOGITS, 3.0)),
        (Sampler(1.0, top_k=2, seed=4), renormalized(softmax(LOGITS), {0, 2})),
        (
            Sampler(1.0, top_k=3, seed=5),
            renormalized(softmax(LOGITS), {0, 1, 2}),
        ),  # 1 and 4 are equal
        (Sampler(1.0, top_p=0.6, seed=6), renormalized(softmax(LOGITS), {0, 2})),
        (Sampler(1.0, top_p=0.5, seed=7), renormalized(softmax(LOGITS), {0})),
        (
            Sampler(1.0, top_k=3, top_p=0.72, seed=8),
            renormalized(softmax(LOGITS), {0, 2}),
        ),  # after top_k
        (Sampler(1.0, top_k=99, top_p=1.0, seed=9), softmax(LOGITS)),
    ],
)
def test_tokens_come_as_often_as_they_should(sampler: Sampler, expected: list[float]) -> None:
    shares = token_shares(sampler)
    assert all(share == 0 for share, p in zip(shares, expected, strict=True) if p == 0)
    assert chi_square(shares, expected) < CRITICAL


def test_a_sampler_that_forgets_the_temperature_is_caught() -> None:
    assert chi_square(token_shares(Sampler(1.0)), softmax(LOGITS, 0.8)) > CRITICAL


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert token_shares(Sampler(temperature, seed=4)) == [1.0, 0, 0, 0, 0]


def test_a_huge_temperature_is_even() -> None:
    assert chi_square(token_shares(Sampler(1e300)), [0.2] * 5) < CRITICAL


def test_something_always_remains() -> None:
    assert token_shares(Sampler(1.0, top_k=1, top_p=1e-12)) == [1.0, 0, 0, 0, 0]
    assert token_shares(Sampler(1.0, top_p=1e-9), logits=[3.0] * 4) == [1.0, 0, 0, 0]
    assert token_shares(Sampler(1.0), logits=[-math.inf, 0.0, -math.inf]) == [0, 1.0, 0]
    assert token_shares(Sampler(1.0), logits=[1e30, -1e30]) == [1.0, 0]


def test_greedy_takes_the_lowest_of_equal_indices() -> None:
    logits = torch.zeros(3, 7000)
    logits[0, [6999, 5, 700]] = 1.0
    logits[1, [4097, 4096]] = 2.0
    assert Sampler().sample(logits, 0).tolist() == [5, 4096, 0]


def test_a_row_is_drawn_by_its_number_and_step_alone() -> None:
    sampler = Sampler(1.0, seed=11)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    together = sampler.sample(logits, 4)
    assert torch.equal(sampler.sample(logits[:2], 4), together[:2])
    other = logits.clone()
    other[3:] = 0.0
    assert torch.equal(sampler.sample(other, 4)[:3], together[:3])
    assert torch.equal(sampler.sample(logits, 4), together)
    even = torch.zeros(64, 50)
    assert not torch.equal(sampler.sample(even, 4), sampler.sample(even, 5))
    assert not torch.equal(sampler.sample(even, 4), Sampler(1.0, seed=12).sample(even, 4))
    assert len(set(sampler.sample(even, 4).tolist())) > 10  # rows draw apart


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    logits = torch.zeros(8, 50)
    first = Sampler(1.0).sample(logits, 0)
    before = torch.get_rng_state()
    assert torch.equal(Sampler(1.0).sample(logits, 0), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_an_error(temperature: float, bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[2, 4] = bad
    with pytest.raises(MachineError, match="logits"):
        Sampler(temperature).sample(logits, 0)
    with pytest.raises(MachineError, match="logits"):
        Sampler(temperature).sample(torch.full((1, 5), -math.inf), 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sampler(-0.1), "temperature -0.1:"),
        (lambda: Sampler(math.nan), "temperature nan"),
        (lambda: Sampler(math.inf), "temperature inf"),
        (lambda: Sampler(1.0, top_k=0), "top_k 0:"),
        (lambda: Sampler(1.0, top_p=0.0), "top_p 0.0:"),
        (lambda: Sampler(1.0, top_p=1.5), "top_p 1.5"),
        (lambda: Sampler(1.0, top_p=math.nan), "top_p nan"),
        (lambda: Sampler(seed=-1), "seed -1"),
    ],
)
def test_a_wrong_setting_is_named(make: Callable[[], Sampler], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(says)


def test_low_precision_logits_are_sampled_in_double() -> None:
    logits: Tensor = torch.tensor([LOGITS]).expand(DRAWS, -1).bfloat16()
    counts = torch.bincount(Sampler(1.0, seed=1).sample(logits, 3), minlength=5)
    assert chi_square([int(count) / DRAWS for count in counts], softmax(LOGITS)) < CRITICAL
