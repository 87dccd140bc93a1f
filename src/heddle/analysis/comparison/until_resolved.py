"""The schedule of a comparison that stops when it is resolved: it buys seeds in batches, as `StoppingRule` decides."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from heddle.analysis.comparison.sequential import Spending, StoppingRule
from heddle.analysis.comparison.simultaneous import pair_statistics
from heddle.analysis.comparison.statistics import Run, run_seconds


@dataclass
class UntilResolved:
    """First the given seeds of every design, then what the rule decides, until it stops.

    The decisions are taken again from the first one in every call, each from the runs of the batches before it alone.
    So a comparison that was ended in the middle of a batch continues as if it had not been. workers: that many runs
    take place at the same time, so that their seconds count only in part. saved: (design, seed) of runs with a result
    from another way here: a smaller budget, say. They are used too, before more are bought than decided.
    """

    names: tuple[str, ...]
    first_seeds: tuple[int, ...]
    rule: StoppingRule
    workers: int = 1
    saved: Collection[tuple[str, int]] = ()
    reason: str | None = field(default=None, init=False)

    def next_runs(self, runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, int]]:
        """Return the next (design, seed) pairs that have no run; empty once it stops, and `reason` says why."""
        self.reason = None
        results = {(name, run["seed"]): run for name, of_design in runs.items() for run in of_design}
        batch = [(name, seed) for seed in self.first_seeds for name in self.names]
        used: list[tuple[str, int]] = []
        while True:
            missing = [pair for pair in batch if pair not in results]
            if missing:
                return missing
            used += batch
            by_design = {name: [results[pair] for pair in used if pair[0] == name] for name in self.names}
            decision = self.rule.decide(pair_statistics(by_design), self._spending(by_design))
            batch = [(self.names[design], seed) for design, seed in decision.runs]
            if not batch:
                batch = self._saved_beyond({name: len(of_design) for name, of_design in by_design.items()})
            if not batch:
                self.reason = decision.reason
                return []

    def _saved_beyond(self, seeds: Mapping[str, int]) -> list[tuple[str, int]]:
        """The saved runs that follow on the seeds used so far."""
        pairs = []
        for name, seed in seeds.items():
            while (name, seed) in self.saved:
                pairs.append((name, seed))
                seed += 1
        return pairs

    def _spending(self, by_design: Mapping[str, Sequence[Run]]) -> Spending:
        seconds = [[run_seconds(run) / self.workers for run in runs] for runs in by_design.values()]
        means = [sum(of_design) / len(of_design) for of_design in seconds]
        return Spending([len(runs) for runs in by_design.values()], means, sum(map(sum, seconds)))
