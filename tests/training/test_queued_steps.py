"""Steps that are queued before they are read, and batches that a thread makes ahead: the same run, line for line."""

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from heddle.data.corpus import Corpus
from heddle.data.samples import CorpusLoader
from heddle.errors import DataError
from heddle.signals import Interrupted
from heddle.storage.checkpoints import checkpoint_folder, checkpoint_steps
from heddle.storage.folder import read_folder, tensors_sha256
from heddle.storage.run_log import read_log
from heddle.training import loop
from heddle.training.job import TrainingJob
from heddle.training.loop import Diverged, Prefetcher, train
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch
from tests import small
from tests.storage.shared import untimed_log

EXPERTS = small.design(layers=[{"mixer": {"kind": "attention", "heads": 2}, "feedforward": small.MOE}])


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue steps and make batches ahead, as for an accelerator."""
    monkeypatch.setattr(loop, "UNPINNED", ())


def job(texts: Corpus, out: Path, **settings: Any) -> TrainingJob:
    values = {"steps": 7, "save_every": 3, "evaluate_every": 4, "gradient_accumulation_steps": 2} | settings
    return small.job(texts, out, EXPERTS, **values)


def result(out: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of the log without their seconds, and the hashes of all tensors of each checkpoint."""
    folders = [checkpoint_folder(out, step) for step in checkpoint_steps(out)]
    names = ("model.safetensors", "training.safetensors")
    return untimed_log(out), [tensors_sha256(read_folder(folder), name) for folder in folders for name in names]


@pytest.fixture(scope="module")
def plain(texts: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    out = tmp_path_factory.mktemp("plain")
    train(job(texts, out))
    return result(out)


def test_a_run_whose_steps_are_queued_has_the_same_log_and_weights(
    texts: Corpus, tmp_path: Path, plain: Any, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    queue, read = loop._queue_step, loop._read_step

    def queue_step(job: TrainingJob, state: Any, take: Any) -> Any:
        events.append(f"queue {state.progress.step + 1}")
        assert threading.current_thread() is threading.main_thread()
        return queue(job, state, take)

    def read_step(job: TrainingJob, state: Any, step: Any) -> Any:
        events.append(f"read {step.number}")
        return read(job, state, step)

    monkeypatch.setattr(loop, "_queue_step", queue_step)
    monkeypatch.setattr(loop, "_read_step", read_step)
    trained = train(job(texts, tmp_path))
    assert result(tmp_path) == plain
    assert trained.tokens_per_second > 0
    # Each is read one step late, but for those before a checkpoint (3, 6), an evaluation (4, 7) and the end.
    assert events == [
        "queue 1", "queue 2", "read 1", "queue 3", "read 2", "read 3", "queue 4", "read 4",
        "queue 5", "queue 6", "read 5", "read 6", "queue 7", "read 7",
    ]  # fmt: skip
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("heddle-batches")]


@pytest.mark.parametrize("stop_after", [2, 5])
def test_a_signal_saves_what_is_queued_and_the_run_goes_on_with_the_same_bits(
    texts: Corpus, tmp_path: Path, plain: Any, ahead: None, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    calls = 0

    def apply(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stop_after:
            signal.raise_signal(signal.SIGTERM)
        return apply_gradients(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "apply_gradients", apply)
        with pytest.raises(Interrupted, match=f"step {stop_after}"):
            train(job(texts, tmp_path))
    assert checkpoint_steps(tmp_path)[-1] == stop_after
    assert [line["step"] for line in read_log(tmp_path)] == list(range(1, stop_after + 1))
    train(job(texts, tmp_path))
    lines, _ = result(tmp_path)
    assert lines == plain[0]
    names = ("model.safetensors", "training.safetensors")
    last = read_folder(checkpoint_folder(tmp_path, 7))
    assert [tensors_sha256(last, name) for name in names] == plain[1][-2:]


def test_bad_steps_count_and_end_the_run_as_they_do_unqueued(
    texts: Corpus, tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, calls = accumulate_gradients, 0

    def gradients(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        batch_result = right(*arguments)
        return dataclasses.replace(batch_result, loss=batch_result.loss * (float("nan") if calls > 3 else 1.0))

    monkeypatch.setattr(loop, "accumulate_gradients", gradients)
    with pytest.raises(Diverged, match=r"10 steps.*step 13"):
        train(small.job(texts, tmp_path, steps=30, save_every=3))
    assert checkpoint_steps(tmp_path) == [9, 12]
    assert [line["skipped"] for line in read_log(tmp_path)] == [False] * 3 + [True] * 10


def test_an_error_of_the_data_is_raised_by_its_step(
    texts: Corpus, tmp_path: Path, ahead: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, threads = CorpusLoader.batch_from, set()

    def batch_from(loader: CorpusLoader, first_sample: int) -> Any:
        threads.add(threading.current_thread().name)
        if first_sample == 5 * 4:
            raise DataError("tokens.bin: is too short; restore it")
        return right(loader, first_sample)

    monkeypatch.setattr(CorpusLoader, "batch_from", batch_from)
    with pytest.raises(DataError, match=r"^tokens.bin:.*short"):
        train(job(texts, tmp_path))
    assert checkpoint_steps(tmp_path) == [3]
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2, 3, 4]
    assert threads == {"heddle-batches_0"}


def test_items_are_made_one_step_ahead_and_no_further() -> None:
    built: list[int] = []
    allowed = threading.Semaphore(0)

    def build(step: int) -> int:
        allowed.acquire()
        built.append(step)
        return step * step

    with Prefetcher(build, 6) as prefetcher:
        for _ in range(2):
            allowed.release()
        assert prefetcher.take(2) == 4
        for _ in range(9):
            allowed.release()
        assert [prefetcher.take(step) for step in (3, 5, 0)] == [9, 25, 0]
    assert set(built) <= {2, 3, 4, 5, 0, 1}
    assert built[:2] == [2, 3]


def test_a_prepared_batch_has_the_same_gradients(texts: Corpus, tmp_path: Path) -> None:
    texts_job = job(texts, tmp_path)
    batch = texts_job.training_data.train_batches(texts_job.settings)(0)
    losses = []
    for rows in (batch, prepare_batch(batch, "cpu", 2)):
        model = texts_job.build_model()
        losses.append([accumulate_gradients(model, rows, (0, 0), 2).loss, *(p.grad for p in model.parameters())])
    assert all((a is None and b is None) or bool((a == b).all()) for a, b in zip(*losses, strict=True))
