"""Which runs a comparison does next: every seed of every design, or seeds until it is resolved."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from heddle.errors import CheckpointError
from heddle.lab.compare.plan import ComparisonPlan
from heddle.lab.compare.power import MAX_SEEDS, Spending, StoppingRule
from heddle.lab.compare.probes import GONE
from heddle.lab.compare.results import ScoredRun
from heddle.lab.compare.statistics import pair_statistics
from heddle.runtime import kind_of_device
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.run_log import first_difference, to_plain_json

# The schedule of a comparison that stops when it is resolved: it buys seeds in batches, as `StoppingRule` decides.


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

    def next_runs(self, runs: Mapping[str, Sequence[ScoredRun]]) -> list[tuple[str, int]]:
        """Return the next (design, seed) pairs that have no run; empty once it stops, and `reason` says why."""
        self.reason = None
        results = {(name, run.seed): run for name, of_design in runs.items() for run in of_design}
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

    def _spending(self, by_design: Mapping[str, Sequence[ScoredRun]]) -> Spending:
        seconds = [[run.seconds_in_all / self.workers for run in runs] for runs in by_design.values()]
        means = [sum(of_design) / len(of_design) for of_design in seconds]
        return Spending([len(runs) for runs in by_design.values()], means, sum(map(sum, seconds)))


class Schedule(Protocol):
    """Chooses runs in batches. The runs of a batch may run at the same time; the next batch waits for all of them."""

    @property
    def reason(self) -> str | None:
        """Return why it stopped, as a sentence for the report; None where every planned run was done."""

    def next_runs(self, runs: Mapping[str, Sequence[ScoredRun]]) -> Sequence[tuple[str, int]]:
        """Return the next (design, seed) pairs in the order in which they start; empty: no more.

        runs: all runs so far by design, those that failed too. A pair that is among them must not be returned again.
        """


@dataclass(frozen=True)
class FixedSeeds:
    """Every seed of every design, the designs of one seed after one another."""

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    reason: str | None = None

    def next_runs(self, runs: Mapping[str, Sequence[ScoredRun]]) -> list[tuple[str, int]]:
        """Return all pairs that have no run."""
        tried = {(name, run.seed) for name, of_design in runs.items() for run in of_design}
        return [(name, seed) for seed in self.seeds for name in self.names if (name, seed) not in tried]


def choose_schedule(plan: ComparisonPlan, workers: int = 1, saved: Collection[tuple[str, int]] = ()) -> Schedule:
    """The schedule of a plan. workers: runs at the same time; saved: (design, seed) of the runs that have a result."""
    names = tuple(entry.name for entry in plan.entries)
    if plan.until_resolved is None:
        return FixedSeeds(names, plan.seeds)
    return UntilResolved(names, plan.seeds, StoppingRule(plan.until_resolved, plan.time_budget), workers, saved)


# A comparison that grows in place: seeds and designs may be added, and it may continue until it is resolved.
#
# Nothing may be changed or removed. Whoever adds seeds after all runs were there may have done so because of what they
# showed; from then on the intervals hold at whatever number of seeds one stops.


REMEDY = "use the same, or another folder"


def result_file(out: Path, name: str, seed: int) -> Path:
    """Where the result of a training run lies."""
    return out / "runs" / f"{name}-seed{seed}.json"


def saved_runs(out: Path, names: Sequence[str]) -> list[tuple[str, int]]:
    """(design, seed) of every training run that has a result."""
    return [(name, seed) for seed in range(MAX_SEEDS) for name in names if result_file(out, name, seed).is_file()]


def check_plan(path: Path, plan: ComparisonPlan, *, may_grow: bool = True) -> bool:
    """Write the plan of a new comparison, or check that of a continued one and add what is new.

    Returns whether the number of seeds follows from results. Raises CheckpointError naming what was changed or removed,
    or for anything new where it may not grow, since other processes work on it.
    """
    identity = to_plain_json(plan.identity())
    saved = dict(identity)
    if path.is_file():
        saved = read_json_file(path)
        saved["device"] = kind_of_device(str(saved.get("device")))  # earlier plans name one GPU
        saved["recall_probes"] = [name for name in saved.get("recall_probes", ()) if name != GONE]
    is_anytime = saved.pop("is_anytime", False)
    until_resolved = saved.pop("until_resolved", None)
    if until_resolved is not None and plan.until_resolved is None:
        raise CheckpointError(
            f"{path.parent}: its seeds were bought until resolved (± {until_resolved:g}), and a fixed number of "
            "seeds would leave some out; continue it in the same way, or choose another folder"
        )
    _check_unchanged(path.parent, saved, identity)
    more_seeds = identity["seeds"] != saved["seeds"]
    if more_seeds and all(result_file(path.parent, name, seed).is_file() for name, seed in _planned(saved)):
        is_anytime = True
    is_anytime = is_anytime or plan.until_resolved is not None
    written = identity | {"is_anytime": is_anytime, "until_resolved": plan.until_resolved}
    if not path.is_file() or read_json_file(path) != written:
        if not may_grow:
            raise CheckpointError(
                f"{path.parent}: other processes work on fewer seeds or designs there; wait until they have ended"
            )
        write_json_file(path, written)
    return is_anytime


def _planned(identity: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, seed) for name in identity["entries"] for seed in identity["seeds"]]


def _check_unchanged(folder: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise CheckpointError for anything but added seeds and designs."""
    same, seeds, entries = dict(identity), saved.get("seeds"), saved.get("entries")
    if isinstance(seeds, list) and set(seeds) <= set(identity["seeds"]):
        same["seeds"] = seeds
    if isinstance(entries, dict):
        removed = [name for name in entries if name not in identity["entries"]]
        if removed:
            raise CheckpointError(f"{folder}: holds another comparison: {removed[0]} is in it too; {REMEDY}")
        same["entries"] = {name: identity["entries"][name] for name in entries}
    difference = first_difference(_name_budget(saved), _name_budget(same))
    if difference:
        raise CheckpointError(f"{folder}: holds another comparison: {difference}; {REMEDY}")
    added = [name for name in identity["entries"] if name not in saved["entries"]]
    if added and identity.get("tuning"):
        raise CheckpointError(
            f"{folder}: holds a comparison without {added[0]}; a tuned comparison cannot gain designs, since they are "
            "tuned together; choose another folder"
        )
    if added and identity["budget_kind"] != "tokens":
        # how much of the longer texts is read depends on the steps of every design
        raise CheckpointError(
            f"{folder}: holds a comparison without {added[0]}; designs can be added only where the budget is in tokens"
        )


def _name_budget(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity with the budget under its kind, `tokens` say, instead of kind and value."""
    others = {name: value for name, value in identity.items() if not name.startswith("budget_")}
    return {str(identity.get("budget_kind")): identity.get("budget_value")} | others
