"""Several workers at once: the same results to the bit, clean ends, and nothing is repeated."""

import json
import os
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from heddle.errors import HeddleError, MachineError
from heddle.lab import workers
from heddle.lab.compare.tasks import NO_EXTRAPOLATION
from heddle.lab.compare.worker import perform_task
from heddle.lab.workers import Result, Task, Workers, run_tasks
from heddle.signals import Interrupted
from heddle.storage.file_io import write_json_file
from heddle.training.settings import Settings
from tests import small
from tests.analysis.scripted_workers import Scripted, Scripts, ok, scripts, task
from tools.kill_test import done

__all__ = ["scripts"]  # a fixture
STEPS = 200


def on_cpu(count: int) -> Workers:
    return Workers(("cpu",) * count, 1)


def training(root: Path, seed: int) -> Task:
    """A training of a few seconds on the text of `root`."""
    settings = Settings(
        steps=STEPS, batch_size=8, sequence_length=32, seed=seed, save_every=5, evaluate_every=30, optimizer="adamw"
    )
    request: dict[str, Any] = {
        "task": "train", "probe": "", "out": str(root / f"run{seed}"), "design": small.design(vocab_size=300),
        "data": [f"{root.parent}/text"], "tokenizer": None, "vocab_size": 300, "max_train_tokens": None,
        "settings": asdict(settings), "device": "cpu", "threads": 1, "part_files": [], "speed_contexts": [16],
        "extrapolation": asdict(NO_EXTRAPOLATION), "text_recall_rows": 0, "command": "test",
    }  # fmt: skip
    return Task(f"seed {seed}", root / f"run{seed}.json", request)


def timeless(result: Result) -> Result:
    clock = ("seconds", "wall_seconds", "train_tokens_per_second", "train_speed_range", "peak_memory_bytes")
    plain: Result = json.loads(json.dumps(result))
    return {name: value for name, value in plain.items() if name not in clock}


def test_two_workers_that_are_interrupted_and_continued_give_what_one_gives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small.folder(tmp_path / "text")
    pooled = [training(tmp_path / "pooled", seed) for seed in (0, 1)]

    def interrupt() -> None:
        while any(done(Path(task.request["out"])) < 2 for task in pooled):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted) as caught:
        run_tasks(pooled, on_cpu(2))
    assert caught.value.exit_code == 143
    assert capfd.readouterr().err.count("the same command continues") == 2
    assert not list((tmp_path / "pooled").glob("*.json"))
    assert not list((tmp_path / "pooled").glob(".*.task.json"))
    seen: list[str] = []
    results = run_tasks(pooled, on_cpu(2), lambda task, result: seen.append(task.label))
    assert sorted(seen) == ["seed 0", "seed 1"]
    alone = [training(tmp_path / "alone", seed) for seed in (0, 1)]
    expected = [perform_task({**task.request, "label": task.label})[0] for task in alone]
    assert [timeless(result) for result in results] == [timeless(result) for result in expected]
    assert timeless(results[0]) != timeless(results[1])  # else the line above could not fail
    assert run_tasks(pooled, on_cpu(2), lambda task, result: pytest.fail("it ran again")) == results


REFUSED: Result = {"status": "failed", "message": "no", "stops_all": True}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(count: int, tmp_path: Path, scripts: Scripts) -> None:
    names = ["slow", "fast", "middle"]
    scripts.scripts = {"slow": (9, ok(0), 0), "fast": (1, ok(1), 0), "middle": (4, ok(2), 0)}
    ended: list[str] = []
    tasks = [task(tmp_path, name) for name in names]
    assert run_tasks(tasks, on_cpu(count), lambda task, result: ended.append(task.label)) == [ok(0), ok(1), ok(2)]
    assert list(scripts.started) == names
    assert scripts.most_at_once == min(count, 3)
    assert ended == (names if count == 1 else ["fast", "middle", "slow"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.json", "middle.json", "slow.json"]


def test_a_killed_worker_fails_alone_and_is_tried_again(tmp_path: Path, scripts: Scripts) -> None:
    scripts.scripts = {"a": (2, None, -9), "b": (3, ok(1), 0)}
    tasks = [task(tmp_path, "a"), task(tmp_path, "b")]
    first, second = run_tasks(tasks, on_cpu(2))
    assert first == {"status": "failed", "message": "a: was ended by SIGKILL, perhaps because memory ran out"}
    assert second == ok(1)
    scripts.scripts = {"a": (1, ok(0), 0)}
    assert run_tasks(tasks, on_cpu(2)) == [ok(0), ok(1)]


@pytest.mark.parametrize(("code", "error"), [(2, HeddleError), (1, MachineError)])
def test_what_stops_all_ends_the_others_politely(
    code: int, error: type[HeddleError], tmp_path: Path, scripts: Scripts
) -> None:
    scripts.scripts = {"a": (10**9, ok(0), 0), "b": (1, REFUSED, code)}
    with pytest.raises(error, match="b: no"):
        run_tasks([task(tmp_path, "a"), task(tmp_path, "b")], on_cpu(2))
    assert scripts.started["a"].signals == [signal.SIGTERM]
    assert list(tmp_path.iterdir()) == []


class Finishing(Scripted):
    """A worker that is done when a signal arrives, and writes its result."""

    def send_signal(self, sig: int) -> None:
        super().send_signal(sig)
        write_json_file(self.target, ok(7))


def test_what_is_done_when_the_others_are_stopped_counts(
    tmp_path: Path, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that leaves it out names one run more as missing than there is."""
    ended: list[tuple[str, Result]] = []
    started = {"a": Finishing, "b": Scripted}
    monkeypatch.setattr(workers, "start_worker", lambda request, target: started[target.stem](10**9, target, None))

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run_tasks(
            [task(tmp_path, "a"), task(tmp_path, "b")],
            on_cpu(2),
            lambda task, result: ended.append((task.label, result)),
            while_waiting=interrupt,
        )
    assert ended == [("a", ok(7))]


def test_an_optional_task_stops_only_itself(tmp_path: Path, scripts: Scripts) -> None:
    scripts.scripts = {"a": (1, REFUSED, 2), "b": (1, ok(1), 0)}
    results = run_tasks([task(tmp_path, "a", is_optional=True), task(tmp_path, "b")], on_cpu(1))
    assert [result["status"] for result in results] == ["failed", "done"]
    scripts.scripts = {"c": (1, REFUSED, 1)}
    with pytest.raises(MachineError):  # the machine fails for all
        run_tasks([task(tmp_path, "c", is_optional=True)], on_cpu(1))
