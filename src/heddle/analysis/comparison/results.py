"""What a running comparison has so far, and what is still to come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from heddle.analysis.comparison.abilities import TaskChoice
from heddle.analysis.comparison.speed import Samples
from heddle.analysis.comparison.statistics import Run
from heddle.analysis.comparison.tuning import Tuning


class Stage(NamedTuple):
    """A part of a comparison: how many of its tasks are finished, of how many planned so far."""

    title: str
    finished: int
    planned: int


@dataclass
class Results:
    """The results of each design by its name.

    speed_rounds, probes: how many are planned. facts: what needs no training. steps: of each design's training, as far
    as they are known. pending: (design, seed) of the runs that are planned and have no result. speeds: the samples of
    each round. recall: by probe. task_choices: the recall tasks, once they are chosen. loss_groups: of its profile.
    stop_reason: why no more runs were planned, where that is not the plan itself. tuning: the search for training
    fields. shared_runs: at values that all designs share, as in `tuning_report`.
    is_anytime: whether the number of seeds followed from results, as in a comparison that grew.
    """

    names: Sequence[str]
    speed_rounds: int
    probes: int
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, list[dict[str, Any]]] = field(init=False)
    speeds: dict[str, list[dict[str, Samples]]] = field(init=False)
    recall: dict[str, dict[str, Any]] = field(init=False)
    pending: list[tuple[str, int]] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    task_choices: list[TaskChoice] = field(default_factory=list)
    loss_groups: dict[str, Any] | None = None
    is_complete: bool = False
    stop_reason: str | None = None
    is_anytime: bool = False
    tuning: Tuning | None = None
    shared_runs: dict[str, list[dict[str, Any]]] | None = None

    def __post_init__(self) -> None:
        self.runs = {name: [] for name in self.names}
        self.speeds = {name: [] for name in self.names}
        self.recall = {name: {} for name in self.names}

    def add_run(self, name: str, run: dict[str, Any]) -> None:
        """Add a finished run; the runs of a design are in the order of their seeds."""
        self.runs[name] = sorted([*self.runs[name], run], key=lambda run: run["seed"])
        self.pending = [pair for pair in self.pending if pair != (name, run["seed"])]

    def comparable_runs(self, name: str) -> list[Run]:
        """The runs of a design on seeds for which no design's run is still to come: a mean of other seeds misleads."""
        unfinished = {seed for _, seed in self.pending}
        return [run for run in self.runs[name] if run["seed"] not in unfinished]

    @property
    def finished_runs(self) -> int:
        """How many runs have ended, well or not."""
        return sum(map(len, self.runs.values()))

    def stages(self) -> list[Stage]:
        """The stages in their order, those without tasks left out."""
        designs = len(self.names)
        trials = [] if self.tuning is None else [*self.tuning.results, *self.tuning.state.pending]
        stages = [
            Stage("tuning runs", 0 if self.tuning is None else len(self.tuning.results), len(trials)),
            Stage("training runs", self.finished_runs, self.finished_runs + len(self.pending)),
            Stage("speed measurements", sum(map(len, self.speeds.values())), self.speed_rounds * designs),
            Stage("recall tests", sum(map(len, self.recall.values())), self.probes * designs),
        ]
        return [stage for stage in stages if stage.planned]
