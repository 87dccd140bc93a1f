"""Which seeds to buy next, and when to stop: repeated intervals that hold at whatever number of seeds one stops.

A look at n seeds uses the nominal level 0.006 · min(√(n/8), √(8/n)) in place of 5 %. Whatever the number of looks from
2 to 100 seeds, and whichever pairs of equal designs, the probability that any interval at any look misses the truth is
at most 5 % (simulated: docs/compare.md). These are repeated confidence intervals (Jennison and
Turnbull 1989) whose levels are spent as in Lan and DeMets (1983), at the significance level of each t (Jennison and
Turnbull 2000, section 4.4). A mixture martingale (Lai 1976; Wang and Ramdas 2023) also holds without end; its intervals
are wider from 6 seeds on. Seeds that share one text say nothing of other texts: the text's part of an interval keeps
its own level, which looks do not spend.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from heddle.analysis.comparison.formatting import join_names
from heddle.analysis.comparison.power import MAX_SEEDS, seeds_for
from heddle.analysis.comparison.simultaneous import PairStatistics
from heddle.progress import format_duration

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
    """What was tried: seeds of each design, the mean seconds of a run of each, and the seconds of all runs."""

    seeds: Sequence[int]
    run_seconds: Sequence[float]
    seconds: float


@dataclass(frozen=True)
class StoppingRule:
    """Buys seeds until each design is resolved from the leader, or a tie with it within ± half_width.

    A design that is resolved as worse is dropped. Of the open ones those are bought that the remaining budget can
    decide, the nearest to a decision first; if it can decide none, the nearest alone. The rule has no memory and draws
    nothing: the same results give the same decision. budget_seconds: of training; None: up to 100 seeds.
    """

    half_width: float
    budget_seconds: float | None = None

    def decide(self, statistics: PairStatistics, spending: Spending) -> Decision:
        """The next runs. Each design must have been tried before."""
        names, leader = statistics.names, statistics.leader
        if leader is None:
            return Decision((), "No run finished, so no more seeds were bought.", (FAILED,) * len(names))
        standings = tuple(
            # more than half of its runs ended without a number
            FAILED
            if 2 * statistics.seeds[design, design] < spending.seeds[design]
            else self._standing(statistics, design, leader)
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

    def _standing(self, statistics: PairStatistics, design: int, leader: int) -> str:
        if design == leader:
            return LEADER
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
        """The half-width that decides a design, if its difference stays as it is."""
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
        """The designs to buy seeds of; empty where not even the nearest to a decision can have another seed."""
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
                "the choice of held-out text is the larger part of the interval; give more held-out text."
            )
        tie = f"a tie within ± {self.half_width:g}"
        return f"Each design is resolved from {names[leader]} or {tie}, so no more seeds were bought."

    def _unfinished_reason(self, undecided: Sequence[str], leader: str, is_at_limit: bool) -> str:
        open_pairs = f"not decided from {leader}: {join_names(undecided, 8)}"
        if self.budget_seconds is None or is_at_limit:
            return f"All {MAX_SEEDS} seeds are used; {open_pairs}."
        return f"The rest of the budget of {format_duration(self.budget_seconds)} buys no further seed; {open_pairs}."


def _next_runs(group: Sequence[int], seeds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The next seed of each design in the group; those that have fewer than the others catch up first."""
    most, fewest = max(seeds[design] for design in group), min(seeds[design] for design in group)
    target = min(most + (most == fewest), MAX_SEEDS)
    return tuple((design, seed) for seed in range(fewest, target) for design in group if seeds[design] <= seed)
