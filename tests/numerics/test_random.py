"""Keyed random numbers: their distribution, and that they depend on seed, step, sample and site only."""

import pytest
import torch
from torch import Tensor

from heddle.numerics.random import RandomKey, splitmix64, uniform, use_random_key

CPU = torch.device("cpu")


def draw(seed: int = 1, step: int = 2, samples: tuple[int, ...] = (0, 1, 2, 3), site: int = 0) -> Tensor:
    with use_random_key(RandomKey(seed, step, torch.tensor(samples))):
        return uniform((len(samples), 5, 1000), site, CPU)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_and_range(rate: float) -> None:
    numbers = draw(samples=tuple(range(20)))
    assert float(numbers.min()) >= 0.0
    assert float(numbers.max()) < 1.0
    dropped = int((numbers < rate).sum())
    count = numbers.numel()
    assert abs(dropped - rate * count) <= 4 * (count * rate * (1 - rate)) ** 0.5


def test_a_row_depends_on_its_sample_and_not_on_its_position() -> None:
    all_rows = draw(samples=(7, 3, 11, 5))
    assert torch.equal(all_rows[1:3], draw(samples=(3, 11)))
    assert torch.equal(all_rows[3:], draw(samples=(5,)))


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 3}, {"site": 1}, {"samples": (4, 5, 6, 7)}])
def test_other_keys_give_independent_numbers(other: dict) -> None:
    first, second = draw(), draw(**other)
    agree = float(((first < 0.5) == (second < 0.5)).float().mean())
    assert abs(agree - 0.5) <= 4 * (0.25 / first.numel()) ** 0.5


def test_rows_and_neighbors_are_independent() -> None:
    half = draw() < 0.5
    flat = half.flatten(1)
    for left, right in ((flat[0], flat[1]), (flat[:, 1:], flat[:, :-1]), (flat[:, 1000:], flat[:, :-1000])):
        agree = float((left == right).float().mean())
        assert abs(agree - 0.5) <= 4 * (0.25 / left.numel()) ** 0.5


def test_without_a_key_the_global_generator_is_used() -> None:
    torch.manual_seed(5)
    first = uniform((2, 3), 0, CPU)
    second = uniform((2, 3), 0, CPU)
    torch.manual_seed(5)
    assert torch.equal(uniform((2, 3), 0, CPU), first)
    assert not torch.equal(first, second)


def test_the_hash_is_splitmix64() -> None:
    """The finalizer computed in Python's integers of any size."""
    for value in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        x, mask = value % 2**64, 2**64 - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        x ^= x >> 31
        assert int(splitmix64(torch.tensor(value))) % 2**64 == x


def test_the_key_is_reset_after_its_block() -> None:
    first = draw()
    torch.manual_seed(0)
    assert not torch.equal(uniform((4, 5, 1000), 0, CPU), first)
