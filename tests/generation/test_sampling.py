"""Choosing a token: greedy, temperature, top-k and top-p, each as said and by nothing but seed, row and step."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heddle.errors import ConfigError, MachineError
from heddle.generation.sampling import Sampling

LOGITS = [2.0, 0.5, 1.0, -1.0, 0.5]
DRAWS = 4000


def drawn(sampling: Sampling, logits: list[float] | None = None, rows: int = DRAWS) -> list[float]:
    """How often each token comes, over rows of the same logits."""
    same = torch.tensor([logits or LOGITS], dtype=torch.float32).expand(rows, -1)
    counts = torch.bincount(sampling.choose(same, step=3), minlength=same.shape[1])
    return [int(count) / rows for count in counts]


def chi_square(shares: list[float], expected: list[float], rows: int = DRAWS) -> float:
    return sum((s - e) ** 2 / e for s, e in zip(shares, expected, strict=True) if e > 0) * rows


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def kept(probabilities: list[float], tokens: set[int]) -> list[float]:
    total = sum(probabilities[token] for token in tokens)
    return [p / total if token in tokens else 0.0 for token, p in enumerate(probabilities)]


CRITICAL = 18.5  # chi-square of 4 degrees of freedom, probability 0.001


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, seed=1), softmax(LOGITS)),
        (Sampling(0.5, seed=2), softmax(LOGITS, 0.5)),
        (Sampling(3.0, seed=3), softmax(LOGITS, 3.0)),
        (Sampling(1.0, top_k=2, seed=4), kept(softmax(LOGITS), {0, 2})),
        (Sampling(1.0, top_k=3, seed=5), kept(softmax(LOGITS), {0, 1, 2})),  # 1 and 4 are equal: the lower index stays
        (Sampling(1.0, top_p=0.6, seed=6), kept(softmax(LOGITS), {0, 2})),
        (Sampling(1.0, top_p=0.5, seed=7), kept(softmax(LOGITS), {0})),
        (Sampling(1.0, top_k=3, top_p=0.72, seed=8), kept(softmax(LOGITS), {0, 2})),  # top_p reads what top_k left
        (Sampling(1.0, top_k=99, top_p=1.0, seed=9), softmax(LOGITS)),
    ],
)
def test_tokens_come_as_often_as_they_should(sampling: Sampling, expected: list[float]) -> None:
    shares = drawn(sampling)
    assert all(share == 0 for share, wanted in zip(shares, expected, strict=True) if wanted == 0)
    assert chi_square(shares, expected) < CRITICAL


def test_a_sampler_that_forgets_the_temperature_is_caught() -> None:
    assert chi_square(drawn(Sampling(1.0)), softmax(LOGITS, 0.8)) > CRITICAL


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert drawn(Sampling(temperature, seed=4)) == [1.0, 0, 0, 0, 0]


def test_a_huge_temperature_is_even() -> None:
    assert chi_square(drawn(Sampling(1e300)), [0.2] * 5) < CRITICAL


def test_something_always_remains() -> None:
    assert drawn(Sampling(1.0, top_k=1, top_p=1e-12)) == [1.0, 0, 0, 0, 0]
    assert drawn(Sampling(1.0, top_p=1e-9), logits=[3.0] * 4) == [1.0, 0, 0, 0]
    assert drawn(Sampling(1.0), logits=[-math.inf, 0.0, -math.inf]) == [0, 1.0, 0]
    assert drawn(Sampling(1.0), logits=[1e30, -1e30]) == [1.0, 0]


def test_greedy_takes_the_lowest_of_equal_indices() -> None:
    logits = torch.zeros(3, 7000)
    logits[0, [6999, 5, 700]] = 1.0
    logits[1, [4097, 4096]] = 2.0
    assert Sampling().choose(logits, 0).tolist() == [5, 4096, 0]


def test_a_row_is_drawn_by_its_number_and_step_alone() -> None:
    sampling = Sampling(1.0, seed=11)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    together = sampling.choose(logits, 4)
    assert torch.equal(sampling.choose(logits[:2], 4), together[:2])
    other = logits.clone()
    other[3:] = 0.0
    assert torch.equal(sampling.choose(other, 4)[:3], together[:3])
    assert torch.equal(sampling.choose(logits, 4), together)
    even = torch.zeros(64, 50)
    assert not torch.equal(sampling.choose(even, 4), sampling.choose(even, 5))
    assert not torch.equal(sampling.choose(even, 4), Sampling(1.0, seed=12).choose(even, 4))
    assert len(set(sampling.choose(even, 4).tolist())) > 10  # rows draw apart


def test_the_global_generator_is_neither_read_nor_moved() -> None:
    logits = torch.zeros(8, 50)
    first = Sampling(1.0).choose(logits, 0)
    before = torch.get_rng_state()
    assert torch.equal(Sampling(1.0).choose(logits, 0), first)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_an_error(temperature: float, bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[2, 4] = bad
    with pytest.raises(MachineError, match="the model's logits are not numbers"):
        Sampling(temperature).choose(logits, 0)
    with pytest.raises(MachineError, match="the model's logits are not numbers"):
        Sampling(temperature).choose(torch.full((1, 5), -math.inf), 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Sampling(-0.1), "temperature -0.1: must be 0 (greedy) or a number above it"),
        (lambda: Sampling(math.nan), "temperature nan"),
        (lambda: Sampling(math.inf), "temperature inf"),
        (lambda: Sampling(1.0, top_k=0), "top_k 0: must be at least 1"),
        (lambda: Sampling(1.0, top_p=0.0), "top_p 0.0: must be above 0 and at most 1"),
        (lambda: Sampling(1.0, top_p=1.5), "top_p 1.5"),
        (lambda: Sampling(1.0, top_p=math.nan), "top_p nan"),
        (lambda: Sampling(seed=-1), "seed -1"),
    ],
)
def test_a_wrong_setting_is_named(make: Callable[[], Sampling], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(says)


def test_low_precision_logits_are_sampled_in_double() -> None:
    logits: Tensor = torch.tensor([LOGITS]).expand(DRAWS, -1).bfloat16()
    counts = torch.bincount(Sampling(1.0, seed=1).choose(logits, 3), minlength=5)
    assert chi_square([int(count) / DRAWS for count in counts], softmax(LOGITS)) < CRITICAL
