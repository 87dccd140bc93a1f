"""Checkpoints that a thread writes while training goes on: the same run, and a failed save is loud."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from heddle.data.corpus import Corpus
from heddle.errors import CheckpointError, MachineError
from heddle.storage import checkpoints
from heddle.storage.checkpoints import checkpoint_folder, checkpoint_steps, latest_checkpoint
from heddle.storage.folder import tensors_sha256
from heddle.storage.manifest import LogPosition
from heddle.training import checkpoint, loop
from heddle.training.checkpoint import CheckpointSaver
from heddle.training.job import TrainingJob
from heddle.training.loop import train
from tests import small
from tests.storage.shared import untimed_log
from tests.training.test_resume import check_deaths

STEPS = 7


def job(texts: Corpus, out: Path, async_save: bool = True) -> TrainingJob:
    plain = small.job(texts, out, small.dropping(), STEPS, save_every=2)
    return TrainingJob(plain.config, texts, plain.settings, out, async_save=async_save)


def ending(out: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of the log but their times, and the SHA-256 of all tensors of each checkpoint."""
    return untimed_log(out), [tensors_sha256(checkpoint_folder(out, step)) for step in checkpoint_steps(out)]


@pytest.fixture(scope="module")
def whole(texts: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The ending of a run that waits for each save."""
    out = tmp_path_factory.mktemp("whole")
    train(job(texts, out, async_save=False))
    return ending(out)


class SlowWriter:
    """Stands in for `write_checkpoint`: each save but the last waits until training has taken another step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.changed, self.last_read, self.overlapped, self.threads = threading.Condition(), 0, 0, set[str]()
        write, read_step = checkpoints.write_checkpoint, loop._read_step

        def slow(run: Path, step: int, **arguments: Any) -> Path:
            self.threads.add(threading.current_thread().name.partition("_")[0])
            with self.changed:
                self.overlapped += step < STEPS and self.changed.wait_for(lambda: self.last_read > step, 60)
            return write(run, step, **arguments)

        def read_and_tell(job: TrainingJob, state: Any, step: Any) -> Any:
            line = read_step(job, state, step)
            with self.changed:
                self.last_read = step.number
                self.changed.notify_all()
            return line

        monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
        monkeypatch.setattr(loop, "_read_step", read_and_tell)


def test_training_goes_on_while_a_checkpoint_is_written(
    texts: Corpus, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SlowWriter(monkeypatch)
    train(job(texts, tmp_path))
    assert writer.overlapped == 3
    assert writer.threads == {"heddle-checkpoints"}
    assert ending(tmp_path) == whole


def test_a_save_without_a_copy_is_caught(
    texts: Corpus, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the thread writes the tensors that training changes."""
    SlowWriter(monkeypatch)
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **named: self if named == {"copy": True} else to(self, *a))
    train(job(texts, tmp_path))
    assert ending(tmp_path)[1] != whole[1]


def test_death_at_system_calls_of_a_save(texts: Corpus, tmp_path: Path, whole: Any) -> None:
    check_deaths(tmp_path, lambda out: job(texts, out), ending, 6)
    assert ending(tmp_path / "count") == whole


def test_a_failed_save_is_loud_and_replaces_no_good_checkpoint(
    texts: Corpus, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoints.write_checkpoint

    def fail(run: Path, step: int, **arguments: Any) -> Path:
        if step == 4:
            raise MachineError("disk full")
        return write(run, step, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checkpoint", fail)
        with pytest.raises(MachineError, match="disk full"):
            train(job(texts, tmp_path))
    assert checkpoint_steps(tmp_path) == [2]
    assert latest_checkpoint(tmp_path).step == 2
    train(job(texts, tmp_path))
    assert ending(tmp_path) == whole


def test_a_signal_waits_for_the_save(
    texts: Corpus, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small.signalled(monkeypatch, 3, "step 3"):
        train(job(texts, tmp_path))
    assert checkpoint_steps(tmp_path) == [2, 3]
    train(job(texts, tmp_path))
    assert ending(tmp_path)[0] == whole[0]


def test_an_error_that_ends_the_training_is_not_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = CheckpointSaver(tmp_path / "folder", is_async=True)
    (tmp_path / "folder").write_text("no folder")
    saver.write(1, {}, {"notes.txt": "text"}, LogPosition())
    saver.__exit__(ValueError, ValueError("the first"), None)
    assert "folder" in capsys.readouterr().err
    saver = CheckpointSaver(tmp_path / "folder", is_async=True)
    saver.write(1, {}, {"notes.txt": "text"}, LogPosition())
    with pytest.raises(CheckpointError, match="folder"):
        saver.__exit__(None, None, None)


def test_who_is_save_async(texts: Corpus, tmp_path: Path) -> None:
    plain = small.job(texts, tmp_path)
    assert not plain.is_save_async
    assert TrainingJob(plain.config, texts, plain.settings, tmp_path, device="cuda").is_save_async
    assert job(texts, tmp_path).is_save_async
