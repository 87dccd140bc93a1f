"""Training on labelled rows: a design that sees both ways learns, places decide, and a stop changes no bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import heddle
from heddle.data.labeled import LabeledDataset, LabeledRows
from heddle.data.recall import parse_recall
from heddle.errors import ConfigError
from heddle.storage.run_log import read_log
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from heddle.training.settings import Settings
from tests import small

LENGTH = 4


def data(seed: int = 0, count: int = 200) -> LabeledDataset:
    """The first token is asked what stands right of it in the plane; the order of tokens does not tell."""

    def rows(random: np.random.Generator) -> LabeledRows:
        tokens = random.integers(1, 5, (count, LENGTH))
        tokens[:, 0] = 0
        neighbor = random.integers(1, LENGTH, count)
        coordinates = np.tile(np.array([[0.0, 0.0], [0.0, 2.0], [-2.0, 0.0], [0.0, -2.0]]), (count, 1, 1))
        coordinates[np.arange(count), neighbor] = (2.0, 0.0)
        labels = np.full((count, LENGTH), -1)
        labels[:, 0] = tokens[np.arange(count), neighbor]
        return LabeledRows(tokens, labels, coordinates)

    return LabeledDataset(rows(np.random.default_rng(seed)), rows(np.random.default_rng(seed + 1)))


def job(out: Path, source: Any = None, steps: int = 6, kind: str = "axial_rope", **settings: Any) -> TrainingJob:
    mixer = {"kind": "attention", "heads": 2, "causal": False, "position": {"kind": kind, "base": 4.0}}
    layers = [{"repeat": 2, "mixer": mixer, "feedforward": {"kind": "mlp", "hidden": 32}}]
    arguments: dict[str, Any] = {"batch_size": 32, "sequence_length": LENGTH, "learning_rate": 2e-2} | settings
    config = heddle.load_config(
        {"vocab_size": 5, "width": 16, "initialization": {"std": 0.3}, "head": {"tied": False}, "layers": layers}
    )
    return TrainingJob(config=config, source=source or data(), settings=Settings(steps=steps, **arguments), out=out)


def test_what_a_place_decides_is_learned_with_places_alone(tmp_path: Path) -> None:
    result = train(job(tmp_path / "axial", steps=60, evaluate_every=30))
    assert result.task_accuracy > 0.95
    assert {size for _, size in result.scores} == {1}
    assert len(result.scores) == 200
    log = read_log(tmp_path / "axial")
    assert all(line["scored_fraction"] == 0.25 and "bits_per_byte" not in line for line in log)
    assert sum("validation_accuracy" in line for line in log) == 2
    assert train(job(tmp_path / "rope", kind="rope", steps=60)).task_accuracy < 0.7


def test_an_interrupted_training_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.same_after_a_signal(lambda name: job(tmp_path / name, save_every=2), monkeypatch)


def test_places_are_cut_with_the_batch(tmp_path: Path) -> None:
    unsplit, split = (
        train(job(tmp_path / str(n), steps=2, gradient_accumulation_steps=n, schedule="linear")) for n in (1, 4)
    )
    for a, b in zip(unsplit.model.parameters(), split.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_learned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sequence_length 5:"):
        train(job(tmp_path, sequence_length=5))
    wide = data()
    wide = LabeledDataset(wide.train, LabeledRows(wide.test.tokens + 2, wide.test.labels, wide.test.coordinates))
    with pytest.raises(ConfigError, match=r"^vocab_size: 5"):
        train(job(tmp_path, wide))
    task = parse_recall("recall:parity,length=4")
    with pytest.raises(ConfigError, match=r"^causal:"):
        train(job(tmp_path, task))
    assert not any(tmp_path.iterdir())
