"""Which runs a comparison does next: every seed of every design, or seeds until it is resolved."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from heddle.analysis.comparison.plan import ComparisonPlan
from heddle.analysis.comparison.sequential import StoppingRule
from heddle.analysis.comparison.statistics import Run
from heddle.analysis.comparison.until_resolved import UntilResolved


class Schedule(Protocol):
    """Chooses runs in batches. The runs of a batch may run at the same time; the next batch waits for all of them."""

    @property
    def reason(self) -> str | None:
        """Return why it stopped, as a sentence for the report; None where every planned run was done."""

    def next_runs(self, runs: Mapping[str, Sequence[Run]]) -> Sequence[tuple[str, int]]:
        """Return the next (design, seed) pairs in the order in which they start; empty: no more.

        runs: all runs so far by design, those that failed too. A pair that is among them must not be returned again.
        """


@dataclass(frozen=True)
class FixedSeeds:
    """Every seed of every design, the designs of one seed after one another."""

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    reason: str | None = None

    def next_runs(self, runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, int]]:
        """Return all pairs that have no run."""
        tried = {(name, run["seed"]) for name, of_design in runs.items() for run in of_design}
        return [(name, seed) for seed in self.seeds for name in self.names if (name, seed) not in tried]


def choose_schedule(plan: ComparisonPlan, workers: int = 1, saved: Collection[tuple[str, int]] = ()) -> Schedule:
    """The schedule of a plan. workers: runs at the same time; saved: (design, seed) of the runs that have a result."""
    names = tuple(entry.name for entry in plan.entries)
    if plan.until_resolved is None:
        return FixedSeeds(names, plan.seeds)
    return UntilResolved(names, plan.seeds, StoppingRule(plan.until_resolved, plan.time_budget), workers, saved)
