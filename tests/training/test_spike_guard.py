"""A spike of the loss: the run goes back to its last checkpoint and past the data; a continued run does so, too."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.data.corpus import Corpus
from heddle.errors import ConfigError, MachineError
from heddle.storage.run_log import read_log
from heddle.training import loop
from heddle.training.job import TrainingJob
from heddle.training.loop import MIN_LOSSES, SpikeGuard, train
from heddle.training.settings import Settings
from heddle.training.step import accumulate_gradients
from tests import small
from tests.training.gradients import same_weights


@pytest.fixture(autouse=True)
def few_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MIN_LOSSES", 3)


def job(texts: Corpus, out: Path, **settings: Any) -> TrainingJob:
    return small.job(texts, out, **{"steps": 14, "save_every": 4, "spike_guard": 20.0, **settings})


def spiking(patch: pytest.MonkeyPatch, *batches: int) -> list[int]:
    """Batches of the data's order, from 0, whose loss is 100 times as high; returns the batches that are trained on."""
    right, trained = accumulate_gradients, []

    def gradients(model: Any, batch: Any, *arguments: Any) -> Any:
        index = int(batch.batch.sample_indices[0]) // 4
        trained.append(index)
        result = right(model, batch, *arguments)
        return dataclasses.replace(result, loss=result.loss * (100.0 if index in batches else 1.0))

    patch.setattr(loop, "accumulate_gradients", gradients)
    return trained


def test_a_spike_leads_back_to_the_checkpoint_and_past_the_data(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = spiking(monkeypatch, 9)
    result = train(job(texts, tmp_path))
    assert trained == [*range(10), *range(10, 16)]  # step 10 spikes; steps 9 and 10 are taken again with later batches
    lines = read_log(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [line.get("skipped_batches") for line in lines] == [None] * 8 + [2] * 6
    assert max(line["loss"] for line in lines) < 10
    assert result.progress.skipped_batches == 2
    assert "step 8" in capsys.readouterr().err


def test_a_run_that_was_killed_goes_back_as_an_undisturbed_one(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiking(monkeypatch, 9, 13)
    whole = train(job(texts, tmp_path / "whole"))
    for stop_at in (6, 9, 10, 11, 13):
        out = tmp_path / f"cut{stop_at}"
        with small.signalled(monkeypatch, stop_at, r"step (4|8|12);"):
            train(job(texts, out))
        resumed = train(job(texts, out))
        assert resumed.progress == whole.progress
        assert same_weights(resumed.model, whole.model)
        losses = [[line["loss"] for line in read_log(path)] for path in (out, tmp_path / "whole")]
        assert losses[0] == losses[1]


def test_data_that_spikes_again_and_again_ends_the_run(
    texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiking(monkeypatch, *range(9, 99))
    with pytest.raises(MachineError, match=r"3 returns.*step 8"):
        train(job(texts, tmp_path))


def test_without_the_option_nothing_changes(texts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = spiking(monkeypatch, 9)
    result = train(job(texts, tmp_path, spike_guard=None))
    assert trained == list(range(14))
    assert result.progress.skipped_batches == 0
    assert "spike_guard" not in Settings(steps=1).identity()
    assert "save_every" not in Settings(steps=1).identity()
    assert Settings(steps=1, save_every=3, spike_guard=5.0).identity()["save_every"] == 3


def test_only_losses_far_above_those_before_are_spikes() -> None:
    guard = SpikeGuard(6.0)
    noise = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spikes = [
        guard.is_spike({"step": step, "skipped": False, "loss": 3.0 + 0.1 * float(value)})
        for step, value in enumerate(noise, start=1)
    ]
    assert sum(spikes) == 0
    limit = guard.limit
    assert 3.4 < limit < 3.9  # six standard deviations
    assert guard.is_spike({"step": 4001, "skipped": False, "loss": limit * 1.001})
    assert not guard.is_spike({"step": 4001, "skipped": False, "loss": limit * 0.999})
    assert not guard.is_spike({"step": 4002, "skipped": True, "loss": None})
    assert MIN_LOSSES >= 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"spike_guard": 0.0, "save_every": 4}, r"spike_guard 0.0:"),
        ({"spike_guard": float("nan"), "save_every": 4}, "spike_guard nan:"),
        ({"spike_guard": 10.0}, r"spike_guard:.*save_every"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Settings(steps=5, **fields)
