"""Simulated comparisons with known truth: coverage, false claims, and widths.

`python -m tests.analysis.comparison.simulation` prints the tables of docs/compare/.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from heddle.lab.compare import statistics as compared
from heddle.lab.compare.statistics import (
    PairStatistics,
    fixed_level,
    moderated_degrees,
    pair_critical_value,
    seed_statistics,
)
from heddle.lab.compare.verdict import Spending, StoppingRule, anytime_level

TEXT_DEGREES = 20


def draw(
    rng: np.random.Generator, spreads: Sequence[float], seeds: int, text: float = 0.0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Losses of equal designs [designs, seeds] on one text, and the estimated standard errors over the text.

    spreads: the luck of each design, beside a luck that a seed brings to all. text: the standard deviation of what one
    text does to each design.
    """
    designs = len(spreads)
    luck = rng.normal(size=(designs, seeds)) * np.asarray(spreads)[:, None]
    losses = luck + rng.normal(0, 5, seeds) + rng.normal(0, text, designs)[:, None]
    if not text:
        return losses, None
    # the bootstrap's estimate of √2 · text; it has the degrees of freedom of its blocks
    estimate = np.sqrt(2 * text**2 * rng.chisquare(TEXT_DEGREES, (designs, designs)) / TEXT_DEGREES)
    return losses, np.triu(estimate, 1) + np.triu(estimate, 1).T


def statistics_of(losses: np.ndarray, text_error: np.ndarray | None) -> PairStatistics:
    """The statistics of designs named by their numbers."""
    names = tuple(str(design) for design in range(len(losses)))
    return seed_statistics(names, losses, text_error, float(TEXT_DEGREES))


def half_widths(statistics: PairStatistics, level: Callable[[int], float] = fixed_level) -> np.ndarray:
    """`half_width` of every pair at once, [designs, designs]."""
    halves, designs = np.full(statistics.mean.shape, np.nan), len(statistics.names)
    for seeds in np.unique(statistics.seeds[statistics.seeds >= 2]):
        # pairs with the same number of seeds have the same degrees of freedom
        degrees = statistics.degrees[statistics.seeds == seeds][0]
        critical = compared.pair_critical_value(designs, degrees, level(int(seeds)))
        halves = np.where(statistics.seeds == seeds, critical * statistics.seed_error, halves)
    if np.isnan(statistics.text_degrees):
        return halves
    text = compared.pair_critical_value(designs, statistics.text_degrees, compared.ALPHA) * statistics.text_error
    return np.where(np.isnan(halves), text, np.hypot(halves, np.nan_to_num(text)))


def misses(statistics: PairStatistics, level: Callable[[int], float] = fixed_level) -> bool:
    """Whether any pair's interval excludes 0."""
    with np.errstate(invalid="ignore"):
        return bool((np.abs(statistics.mean) > half_widths(statistics, level)).any())


def miss_rate(spreads: Sequence[float], seeds: int, trials: int, text: float = 0.0) -> float:
    """How often a comparison of equal designs at a fixed number of seeds calls any pair resolved."""
    rng = np.random.default_rng(1)
    return float(np.mean([misses(statistics_of(*draw(rng, spreads, seeds, text))) for _ in range(trials)]))


def run_until_resolved(
    losses: np.ndarray, text_error: np.ndarray | None, rule: StoppingRule, first_seeds: int = 3
) -> tuple[np.ndarray, bool, str]:
    """(losses that were bought, whether any look of any pair missed 0, the reason to stop). A run takes a second."""
    designs, most = losses.shape
    seeds = np.full(designs, first_seeds)
    missed = False
    while True:
        bought = np.where(np.arange(most) < seeds[:, None], losses, np.nan)
        bought = bought[:, : seeds.max()]
        statistics = statistics_of(bought, text_error)
        missed = missed or misses(statistics, anytime_level)
        decision = rule.decide(statistics, Spending(list(map(int, seeds)), [1.0] * designs, float(seeds.sum())))
        if not decision.runs:
            return bought, missed, decision.reason or ""
        for design, seed in decision.runs:
            assert seed == seeds[design]
            seeds[design] += 1


def stopped_miss_rate(
    spreads: Sequence[float], half_width: float, budget: float, trials: int, text: float = 0.0
) -> tuple[float, float]:
    """(how often any look at a comparison of equal designs misses, mean number of runs that it buys)."""
    rng = np.random.default_rng(2)
    rule = StoppingRule(half_width, budget)
    outcomes: list[Any] = []
    for _ in range(trials):
        bought, missed, _ = run_until_resolved(*draw(rng, spreads, 100, text), rule)
        outcomes.append((missed, np.isfinite(bought).sum()))
    rate, runs = np.mean(outcomes, axis=0)
    return float(rate), float(runs)


def critical_values(designs: int, seeds: int) -> tuple[float, float]:
    """The critical values of all pairs at a fixed number of seeds, and at any look."""
    degrees = float(moderated_degrees(designs, seeds, (designs - 1) * (seeds - 1)))
    return (
        pair_critical_value(designs, max(1.0, degrees), fixed_level(seeds)),
        pair_critical_value(designs, max(1.0, degrees), anytime_level(seeds)),
    )


def mixture_value(seeds: int, prior_variance: float = 10.0) -> float:
    """The |t| at which a normal mixture over the effect size reaches 20: the t martingale of one pair (Lai 1976)."""
    ratio = 1 / (1 + seeds * prior_variance)
    root = (20 / np.sqrt(ratio)) ** (2 / seeds)
    if root * ratio >= 1:
        return float("inf")
    return float(np.sqrt((root - 1) / (1 - root * ratio) * (seeds - 1)))


def main() -> None:
    """Print the tables."""
    print("designs seeds | covered")
    for designs, seeds in ((2, 3), (2, 8), (4, 3), (4, 8), (8, 3), (8, 8)):
        print(designs, seeds, "|", f"{1 - miss_rate([1.0] * designs, seeds, 20_000):.3f}")
    print("seeds | 2 designs: fixed any mixture | 4: fixed any | 8: fixed any")
    for seeds in (3, 4, 5, 6, 8, 12):
        rows = [" ".join(f"{value:.2f}" for value in critical_values(designs, seeds)) for designs in (2, 4, 8)]
        print(seeds, "|", rows[0], f"{mixture_value(seeds):.2f}", "|", rows[1], "|", rows[2])
    print("designs budget | resolved anything, runs")
    for designs in (2, 4, 8):
        print(designs, 8 * designs, "|", *stopped_miss_rate([1.0] * designs, 0.8, 8.0 * designs, 2000))


if __name__ == "__main__":
    main()
