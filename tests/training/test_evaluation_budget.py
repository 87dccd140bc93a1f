"""A training with a budget of evaluations: what they read, and its early end once a task is solved."""

from pathlib import Path
from typing import Any

import pytest

from heddle.data.recall import parse_recall
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.run_log import read_log
from heddle.training.evaluation.scores import EarlyStop, EvaluationBudget
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings
from tests import small


def job(out: Path, **budget: Any) -> TrainingJob:
    task = parse_recall("recall:mqar")
    config = small.config(small.design(vocab_size=task.vocab_size))
    settings = Settings(steps=6, batch_size=2, sequence_length=task.task.length, evaluate_every=2, save_every=2)
    return TrainingJob(config, task, settings, out, evaluation=EvaluationBudget(100, 200, **budget))


@pytest.mark.parametrize(
    ("values", "reached"),
    [([0.9, 1.0], False), ([0.99, 0.99], True), ([1.0, 0.5, 1.0], False), ([0.1, None, 1.0, 1.0], True), ([], False)],
)
def test_two_evaluations_in_a_row_solve_a_task(values: list[float | None], reached: bool) -> None:
    solved, never = EarlyStop(EvaluationBudget(solved_accuracy=0.99)), EarlyStop(EvaluationBudget())
    for step, value in enumerate(values):
        for each in (solved, never):
            each.add({"step": step, "loss": 1.0})
            each.add({"step": step, "validation_accuracy": value})
    assert solved.is_over is reached
    assert not never.is_over


def test_a_solved_task_ends_and_stays_ended(tmp_path: Path, evaluated: list[int]) -> None:
    result = train(job(tmp_path, solved_accuracy=0.0))
    assert result.progress.step == 4
    assert evaluated == [100, 100, 200]
    assert checkpoint_steps(tmp_path)[-1] == len(read_log(tmp_path)) == 4
    again = train(job(tmp_path, solved_accuracy=0.0))
    assert (again.progress.step, again.scores) == (4, result.scores)
    # without the early end the same run takes its other steps
    assert train(job(tmp_path)).progress.step == 6
