"""What a comparison can resolve and what a narrower interval needs, held to simulations."""

import dataclasses
import math

import numpy as np
import pytest

from heddle.lab.compare.statistics import PairStatistics, seed_statistics, t_quantile
from heddle.lab.compare.verdict import (
    anytime_level,
    detectable_difference,
    need_for,
    round_widths_below,
    seeds_for,
    smallest_resolvable,
)


def statistics_of(designs: int, seeds: int, text: float | None = None) -> PairStatistics:
    """Statistics whose every pair has a variance of 2 for one seed."""
    losses = np.random.default_rng(0).normal(size=(designs, seeds))
    error = None if text is None else np.full((designs, designs), text)
    statistics = seed_statistics(tuple("abcdefgh"[:designs]), losses, error, math.nan if text is None else 20.0)
    return dataclasses.replace(statistics, variance=np.full((designs, designs), 2.0))


@pytest.mark.parametrize("degrees", [1, 2, 7, 30])
def test_a_detectable_difference_is_resolved_as_often_as_claimed(degrees: int) -> None:
    rng = np.random.default_rng(degrees)
    critical = t_quantile(0.95, degrees)
    difference = detectable_difference(1.0, degrees, critical)
    draws = rng.normal(difference, 1.0, 40_000) / np.sqrt(rng.chisquare(degrees, 40_000) / degrees)
    assert np.mean(np.abs(draws) > critical) == pytest.approx(0.8, abs=0.008)
    # planted: the normal approximation's power is another, where seeds are few
    normal = 1.96 + 0.8416
    shifted = draws - (difference - normal) / np.sqrt(rng.chisquare(degrees, 40_000) / degrees)
    if degrees < 7:
        assert np.mean(np.abs(shifted) > critical) < 0.78


def test_the_smallest_resolvable_difference_of_a_pair() -> None:
    statistics = statistics_of(2, 3)
    error = math.sqrt(2 / 3)
    assert smallest_resolvable(statistics, 0, 1) == pytest.approx(detectable_difference(error, 2, t_quantile(0.95, 2)))
    rng = np.random.default_rng(2)
    resolvable = smallest_resolvable(statistics, 0, 1)
    assert resolvable is not None
    pairs = rng.normal(size=(4000, 2, 3))
    pairs[:, 0] += resolvable
    differences = pairs[:, 0] - pairs[:, 1]
    halves = t_quantile(0.95, 2) * differences.std(1, ddof=1) / math.sqrt(3)
    assert np.mean(np.abs(differences.mean(1)) > halves) == pytest.approx(0.8, abs=0.02)
    # text makes it larger; without seeds or text there is none
    with_text = smallest_resolvable(statistics_of(2, 3, 0.5), 0, 1)
    assert with_text is not None
    assert with_text > resolvable
    assert smallest_resolvable(statistics_of(2, 1), 0, 1) is None
    assert smallest_resolvable(dataclasses.replace(statistics, variance=np.zeros((2, 2))), 0, 1) == 0


@pytest.mark.parametrize("designs", [2, 4])
def test_the_seeds_of_a_need_are_enough_and_one_fewer_is_not(designs: int) -> None:
    statistics = statistics_of(designs, 3)
    seeds = seeds_for(statistics, 0, 1, 1.0)
    assert seeds is not None
    enough, fewer = statistics_of(designs, seeds), statistics_of(designs, seeds - 1)
    assert enough.half_width(0, 1) <= 1.0 < fewer.half_width(0, 1)
    longer = seeds_for(statistics, 0, 1, 1.0, anytime_level)
    assert longer is not None
    assert longer > seeds
    assert seeds_for(statistics, 0, 1, 0.01) is None
    assert seeds_for(statistics, 0, 1, 1e9) == 2


def test_a_need_is_split_where_the_text_is_the_larger_part() -> None:
    statistics = statistics_of(2, 5, text=0.2)
    text = statistics.text_half_width(0, 1)
    wide = need_for(statistics, 0, 1, 2 * text)
    assert wide is not None
    assert wide.text_factor == 1.0
    assert wide.seeds == seeds_for(statistics, 0, 1, math.sqrt(3) * text)
    narrow = need_for(statistics, 0, 1, text)
    assert narrow is not None
    assert narrow.text_factor == pytest.approx(2.0)
    assert narrow.seeds == seeds_for(statistics, 0, 1, text / math.sqrt(2))
    assert need_for(statistics_of(2, 1, text=0.2), 0, 1, 1.0) is None


def test_round_widths() -> None:
    assert round_widths_below(0.015) == [0.01, 0.005]
    assert round_widths_below(0.02) == [0.01, 0.005]
    assert round_widths_below(0.11) == [0.1, 0.05]
    assert round_widths_below(3.0) == [2.0, 1.0]
    assert round_widths_below(0.0) == []
    assert round_widths_below(math.nan) == []
