"""What differences a comparison can resolve, and what a narrower interval needs: seeds, time, or held-out text.

The smallest difference that is resolved with probability 0.8 follows from the noncentral t distribution. Seeds narrow
the part of an interval that is seed variance, and only text narrows the part that is sampling error of the text: with m
times the text it is 1/√m as wide.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heddle.lab.compare.results import NeededRuns
from heddle.lab.compare.statistics import (
    Level,
    PairStatistics,
    fixed_level,
    moderated_degrees,
    pair_critical_value,
    widest,
)
from heddle.lab.compare.tables import join_names
from heddle.progress import format_duration

POWER = 0.8
MAX_SEEDS = 100


def detectable_difference(error: float, degrees_of_freedom: float, critical: float) -> float:
    """The difference whose |t| exceeds a critical value with probability `POWER`, from its standard error."""
    from scipy.special import nctdtr

    def exceeds(noncentrality: float) -> float:
        # t below −critical is as good as impossible where the power is not close to the level
        return float(1 - nctdtr(degrees_of_freedom, noncentrality, critical))

    low, high = 0.0, critical + 1.0
    while exceeds(high) < POWER:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) < POWER else (low, middle)
    return error * high


def smallest_resolvable(statistics: PairStatistics, row: int, column: int, level: Level = fixed_level) -> float | None:
    """The true difference of two designs that these seeds and this text resolve with probability 0.8.

    None where there is no interval. Seed variance and the sampling error of the text add up as in Welch's t.
    """
    half = statistics.half_width(row, column, level)
    if math.isnan(half):
        return None
    parts = []
    if not math.isnan(statistics.seed_half_width(row, column)):
        parts.append((float(statistics.seed_error[row, column]), float(statistics.degrees[row, column])))
    if not math.isnan(statistics.text_half_width(row, column)):
        parts.append((float(statistics.text_error[row, column]), statistics.text_degrees))
    error = math.hypot(*(part for part, _ in parts))
    if error == 0:
        return 0.0
    degrees = error**4 / sum(part**4 / part_degrees for part, part_degrees in parts)
    return detectable_difference(error, degrees, half / error)


def need_for(
    statistics: PairStatistics,
    row: int,
    column: int,
    half_width: float,
    level: Level = fixed_level,
    run_seconds: float = 0.0,
) -> NeededRuns | None:
    """What an interval of ± half_width needs; None with fewer than two seeds, which say nothing about the spread.

    run_seconds: of one run of both designs. Where the text makes up more than half of the wanted square, the need is
    split: more text, so that it is half.
    """
    if statistics.seeds[row, column] < 2:
        return None
    text = statistics.text_half_width(row, column)
    text = 0.0 if math.isnan(text) else text
    text_factor, seed_target = 1.0, math.sqrt(max(0.0, half_width**2 - text**2))
    if 2 * text**2 > half_width**2:
        text_factor, seed_target = 2 * text**2 / half_width**2, half_width / math.sqrt(2)
    seeds = seeds_for(statistics, row, column, seed_target, level)
    seconds = None if seeds is None else max(0, seeds - int(statistics.seeds[row, column])) * run_seconds
    return NeededRuns(half_width=half_width, seeds=seeds, text_factor=text_factor, seconds=seconds)


def seeds_for(
    statistics: PairStatistics, row: int, column: int, seed_half_width: float, level: Level = fixed_level
) -> int | None:
    """The fewest seeds (2 to 100) with which seed variance adds no more than this half-width, or None.

    Assumes that the spread does not change.
    """
    designs, variance = len(statistics.names), float(statistics.variance[row, column])

    def is_enough(seeds: int) -> bool:
        degrees = float(moderated_degrees(designs, seeds, (designs - 1) * (seeds - 1)))
        return pair_critical_value(designs, max(degrees, 1.0), level(seeds)) * math.sqrt(variance / seeds) <= (
            seed_half_width
        )

    choices = range(2, MAX_SEEDS + 1)
    first = bisect_left(choices, True, key=is_enough)
    return choices[first] if first < len(choices) else None


def round_widths_below(half_width: float) -> list[float]:
    """The next two numbers below a half-width in the series 1, 2, 5, 10: 0.015 gives 0.01 and 0.005."""
    if not half_width > 0 or not math.isfinite(half_width):
        return []
    power = math.floor(math.log10(half_width))
    series = [digit * 10.0**exponent for exponent in range(power, power - 3, -1) for digit in (5, 2, 1)]
    return [round(width, 12 - power) for width in series if width < half_width * (1 - 1e-9)][:2]


# Which seeds to buy next, and when to stop: repeated intervals that hold at any number of seeds.
#
# A look at n seeds uses the nominal level 0.006 · min(√(n/8), √(8/n)) in place of 5 %. Whatever the number of looks
# from 2 to 100 seeds, and whichever pairs of equal designs, the probability that any interval at any look misses the
# truth is at most 5 % (simulated: docs/compare/seeds.md). These are repeated confidence intervals (Jennison and
# Turnbull 1989) whose levels are spent as in Lan and DeMets (1983), at the significance level of each t (Jennison and
# Turnbull 2000, section 4.4). A mixture martingale (Lai 1976; Wang and Ramdas 2023) also holds without end; its
# intervals are wider from 6 seeds on. Seeds that share one text say nothing about other texts: the text's part of an
# interval keeps its own level, which looks do not spend.


LOOK_LEVEL, TYPICAL_SEEDS = 0.006, 8
LEADER, BEHIND, TIED, OPEN, TEXT_LIMITED, FAILED = "leader", "behind", "tied", "open", "text-limited", "failed"


def anytime_level(seeds: int) -> float:
    """The nominal level of a look at this number of seeds."""
    return LOOK_LEVEL * min(math.sqrt(seeds / TYPICAL_SEEDS), math.sqrt(TYPICAL_SEEDS / seeds))


class Decision(NamedTuple):
    """The runs to do next, (index of a design, seed), or none and the reason to stop, as a sentence.

    standings: of each design, one of LEADER, BEHIND (resolved), TIED, OPEN, TEXT_LIMITED (seeds do not help), FAILED.
    """

    runs: tuple[tuple[int, int], ...]
    reason: str | None
    standings: tuple[str, ...]


class Spending(NamedTuple):
    """What was run: the seeds of each design, the mean seconds of a run of each, and the seconds of all runs."""

    seeds: Sequence[int]
    run_seconds: Sequence[float]
    seconds: float


@dataclass(frozen=True)
class StoppingRule:
    """Buys seeds until each design is resolved from the leader, or a tie with it within ± half_width.

    A design that is resolved as worse is dropped. Seeds go to the open designs that the remaining budget can decide,
    the nearest to a decision first; if it can decide none, to the nearest alone. The rule keeps no state and is
    deterministic: equal results give equal decisions. budget_seconds: of training; None: up to 100 seeds.
    """

    half_width: float
    budget_seconds: float | None = None

    def decide(
        self, statistics: PairStatistics, spending: Spending, earlier: Sequence[PairStatistics] = ()
    ) -> Decision:
        """Choose the next runs. Each design must have been run before. earlier: as in `grown_statistics`."""
        names, leader = statistics.names, statistics.leader
        if leader is None:
            return Decision((), "No run finished, so no more seeds were bought.", (FAILED,) * len(names))
        standings = tuple(
            # more than half of its runs ended without a number
            FAILED
            if 2 * statistics.seeds[design, design] < spending.seeds[design]
            else self._standing([statistics, *earlier], names[design], names[leader])
            for design in range(len(names))
        )
        undecided = [design for design, standing in enumerate(standings) if standing == OPEN]
        if not undecided:
            return Decision((), self._final_reason(statistics, leader, standings), standings)
        needs = {design: self._seeds_needed(statistics, design, leader) for design in undecided}
        chosen = self._affordable(needs, leader, spending)
        runs = _next_runs([leader, *chosen], spending.seeds) if chosen else ()
        if not runs:
            reason = self._unfinished_reason([names[design] for design in undecided], names[leader], bool(chosen))
            return Decision((), reason, standings)
        return Decision(runs, None, standings)

    def _standing(self, candidates: Sequence[PairStatistics], name: str, leading: str) -> str:
        if name == leading:
            return LEADER
        statistics, design, leader = widest(candidates, name, leading, anytime_level)
        if math.isnan(statistics.mean[design, leader]):
            return FAILED
        difference = abs(float(statistics.mean[design, leader]))
        half = statistics.half_width(design, leader, anytime_level)
        if statistics.seeds[design, leader] >= 2:
            if half < difference:
                return BEHIND
            if difference + half <= self.half_width:
                return TIED
        text = statistics.text_half_width(design, leader)
        return TEXT_LIMITED if text >= self._sufficient(difference) else OPEN

    def _sufficient(self, difference: float) -> float:
        """The half-width that decides a design, if its difference does not change."""
        return max(difference, self.half_width - difference)

    def _seeds_needed(self, statistics: PairStatistics, design: int, leader: int) -> int:
        """Seeds of a design and the leader that decide it; over 100 where 100 are too few."""
        if statistics.seeds[design, leader] < 2:
            return 2
        text = statistics.text_half_width(design, leader)
        sufficient = self._sufficient(abs(float(statistics.mean[design, leader])))
        target = math.sqrt(sufficient**2 - (0.0 if math.isnan(text) else text) ** 2)
        # just below: an interval that touches 0 decides nothing
        return seeds_for(statistics, design, leader, target * (1 - 1e-9), anytime_level) or MAX_SEEDS + 1

    def _affordable(self, needs: dict[int, int], leader: int, spending: Spending) -> list[int]:
        """The designs to buy seeds for; empty if not even the nearest to a decision can afford another seed."""
        nearest_first = sorted(needs, key=lambda design: (needs[design], design))
        within = [design for design in nearest_first if spending.seeds[design] < MAX_SEEDS]
        if self.budget_seconds is None or not within:
            return within
        remaining, affordable, seconds = self.budget_seconds - spending.seconds, list[int](), 0.0
        for design in within:
            seconds += max(1, needs[design] - spending.seeds[design]) * spending.run_seconds[design]
            of_leader = max(1, needs[design] - spending.seeds[leader]) * spending.run_seconds[leader]
            if seconds + of_leader > remaining:
                break
            affordable.append(design)
        if affordable:
            return affordable
        nearest = within[:1]
        runs = _next_runs([leader, *nearest], spending.seeds)
        return nearest if sum(spending.run_seconds[design] for design, _ in runs) <= remaining else []

    def _final_reason(self, statistics: PairStatistics, leader: int, standings: Sequence[str]) -> str:
        names = statistics.names
        limited = [name for name, standing in zip(names, standings, strict=True) if standing == TEXT_LIMITED]
        if limited:
            return (
                f"More seeds cannot decide between {names[leader]} and {join_names(limited, 8)}: "
                "the sampling error of the held-out text is the larger part of the interval; give more held-out text."
            )
        tie = f"a tie within ± {self.half_width:g}"
        return f"Each design is resolved from {names[leader]} or {tie}, so no more seeds were bought."

    def _unfinished_reason(self, undecided: Sequence[str], leader: str, is_at_limit: bool) -> str:
        open_pairs = f"not decided from {leader}: {join_names(undecided, 8)}"
        if self.budget_seconds is None or is_at_limit:
            return f"All {MAX_SEEDS} seeds are used; {open_pairs}."
        return f"The rest of the budget of {format_duration(self.budget_seconds)} buys no further seed; {open_pairs}."


def _next_runs(group: Sequence[int], seeds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The next seed of each design in the group; designs with fewer seeds catch up first."""
    most, fewest = max(seeds[design] for design in group), min(seeds[design] for design in group)
    target = min(most + (most == fewest), MAX_SEEDS)
    return tuple((design, seed) for seed in range(fewest, target) for design in group if seeds[design] <= seed)
