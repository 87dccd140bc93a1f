"""Keyed random numbers: their distribution, and that they depend on seed, step, sample and site only."""

from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.numerics import random as module
from heddle.numerics.random import RandomKey, RandomStream, TensorSlice, uniform, uniform_double, use_random_key

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
def test_other_keys_give_independent_numbers(other: dict[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("shape", "start"),
    [((5, 1000), (0, 0)), ((2, 7), (0, 0)), ((3, 400), (2, 600)), ((1, 1), (4, 999)), ((5, 3), (0, 1))],
)
def test_a_slice_of_a_sample_is_drawn_alone(shape: tuple[int, int], start: tuple[int, int]) -> None:
    whole = draw()
    with use_random_key(RandomKey(1, 2, torch.arange(4))):
        part = uniform((4, *shape), 0, CPU, TensorSlice((5, 1000), start))
    rows, columns = (slice(first, first + size) for first, size in zip(start, shape, strict=True))
    assert torch.equal(part, whole[:, rows, columns])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw()
    monkeypatch.setattr(module, "CHUNK", 64)
    assert torch.equal(draw(), whole)


def test_numbers_for_sampling_have_53_bits() -> None:
    """Tokens less likely than 6e-8, the finest step of 24 bits, can be drawn."""
    numbers = uniform_double(RandomStream.of(3, 0, 0), torch.arange(200_000))
    assert 0.0 <= float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1.0
    assert bool((numbers * 2.0**53 == (numbers * 2.0**53).floor()).all())
    assert int(((numbers * 2.0**53).long() % 2**29 != 0).sum()) > 199_000
    assert torch.equal(uniform_double(RandomStream.of(3, 0, 0), torch.tensor([77, 5])), numbers[[77, 5]])
    assert not torch.equal(uniform_double(RandomStream.of(4, 0, 0), torch.arange(9)), numbers[:9])
    assert not torch.equal(uniform_double(RandomStream.of(3, 0, 1), torch.arange(9)), numbers[:9])


def test_the_key_is_reset_after_its_block() -> None:
    first = draw()
    torch.manual_seed(0)
    assert not torch.equal(uniform((4, 5, 1000), 0, CPU), first)
