"""How much the evaluations of a training read, and when a task is solved or hopeless, so that its training may end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.storage.run_log import read_log

SOLVED_EVALUATIONS = 2  # in a row: a single one may be luck


@dataclass(frozen=True)
class EvaluationBudget:
    """Not part of a run's identity, because evaluations change no weights; `solved_accuracy` only ends it early.

    interim_tokens: held-out tokens of each evaluation during training, final_tokens: of the one at the end; None: the
    loop's own numbers. solved_accuracy: of a task; training ends once two evaluations in a row reach it.
    hopeless_accuracy: of a task; training ends at an evaluation after `hopeless_steps` that does not exceed it.
    """

    interim_tokens: int | None = None
    final_tokens: int | None = None
    solved_accuracy: float | None = None
    hopeless_accuracy: float | None = None
    hopeless_steps: int = 0


class EarlyStop:
    """Decides after each evaluation of a task whether its training may end: because it is solved, or hopeless."""

    def __init__(self, budget: EvaluationBudget) -> None:
        self.budget = budget
        self.solved_count = 0  # evaluations in a row
        self.is_hopeless = False

    @classmethod
    def of_run(cls, budget: EvaluationBudget, run: Path) -> "EarlyStop":
        """The state of a run after the steps in its log: a continued run ends where it would have ended."""
        stop = cls(budget)
        for line in read_log(run) if stop._is_active else []:
            stop.add(line)
        return stop

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the evaluation in a line of the log, if it has one."""
        if not self._is_active or self.is_over or "validation_accuracy" not in line:
            return
        accuracy, budget = line["validation_accuracy"] or 0.0, self.budget
        is_solved = budget.solved_accuracy is not None and accuracy >= budget.solved_accuracy
        self.solved_count = self.solved_count + 1 if is_solved else 0
        if budget.hopeless_accuracy is not None and line["step"] >= budget.hopeless_steps:
            self.is_hopeless = accuracy <= budget.hopeless_accuracy

    @property
    def is_over(self) -> bool:
        """Whether the training may end."""
        return self.is_hopeless or self.solved_count >= SOLVED_EVALUATIONS

    @property
    def _is_active(self) -> bool:
        return self.budget.solved_accuracy is not None or self.budget.hopeless_accuracy is not None
