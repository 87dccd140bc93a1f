"""Training on a recall task: it learns, logs what is asked, and resumes with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import heddle
from heddle.data.recall import parse_recall
from heddle.errors import CheckpointError
from heddle.storage.run_log import read_log
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings
from tests import small

SOURCE = "recall:copying,tokens=1,letters=3,length=4"


def job(out: Path, source: str = SOURCE, steps: int = 6, **settings: Any) -> TrainingJob:
    practice = parse_recall(source)
    config = small.config(small.design(vocab_size=practice.vocab_size, initialization={"std": 0.3}))
    arguments: dict[str, Any] = {
        "batch_size": 16,
        "sequence_length": practice.task.length,
        "learning_rate": 1e-2,
    } | settings
    return TrainingJob(config=config, source=practice, settings=Settings(steps=steps, **arguments), out=out)


def test_a_task_is_learned(tmp_path: Path) -> None:
    outcome = train(job(tmp_path, steps=60, evaluate_every=20))
    assert outcome.task_accuracy > 0.9
    assert {size for _, size in outcome.scores} == {1}
    log = read_log(tmp_path)
    assert all(line["scored_fraction"] == 0.25 and "bits_per_byte" not in line for line in log)
    accuracies = [line["validation_accuracy"] for line in log if "validation_accuracy" in line]
    assert len(accuracies) == 3
    model, tokenizer = heddle.load(tmp_path)
    assert tokenizer is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), outcome.model.parameters(), strict=True))


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.same_after_a_signal(lambda name: job(tmp_path / name, save_every=2), monkeypatch)


def test_other_options_are_another_run(tmp_path: Path) -> None:
    train(job(tmp_path, steps=1))
    with pytest.raises(CheckpointError, match=r"data\.options\.tokens.*1.*2"):
        train(job(tmp_path, SOURCE.replace("tokens=1", "tokens=2"), steps=1))
