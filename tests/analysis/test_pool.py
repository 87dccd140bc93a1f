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

from heddle.analysis import workers
from heddle.analysis.comparison.tasks import NO_EXTRAPOLATION
from heddle.analysis.comparison.worker import perform_task
from heddle.analysis.workers import Result, Task, run_tasks
from heddle.errors import HeddleError, MachineError
from heddle.signals import Interrupted
from heddle.storage.json_file import write_json_file
from heddle.training.settings import Settings
from tests import small
from tools.kill_test import done

STEPS = 60


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
        run_tasks(pooled, workers=2)
    assert caught.value.exit_code == 143
    assert capfd.readouterr().err.count("the same command continues") == 2
    assert not list((tmp_path / "pooled").glob("*.json"))
    assert not list((tmp_path / "pooled").glob(".*.task.json"))
    seen: list[str] = []
    results = run_tasks(pooled, 2, lambda task, result: seen.append(task.label))
    assert sorted(seen) == ["seed 0", "seed 1"]
    alone = [training(tmp_path / "alone", seed) for seed in (0, 1)]
    expected = [perform_task({**task.request, "label": task.label})[0] for task in alone]
    assert [timeless(result) for result in results] == [timeless(result) for result in expected]
    assert timeless(results[0]) != timeless(results[1])  # else the line above could not fail
    assert run_tasks(pooled, 2, lambda task, result: pytest.fail("it ran again")) == results


class Scripted:
    """A worker that writes its result when it is polled for the n-th time, or ends with a code."""

    def __init__(self, polls: int, target: Path, result: Result | None, code: int = 0) -> None:
        self.polls, self.target, self.result, self.code = polls, target, result, code
        self.signals: list[int] = []

    def poll(self) -> int | None:
        self.polls -= 1
        if self.polls > 0 and not self.signals:
            return None
        if self.result is not None and not self.signals:
            write_json_file(self.target, self.result)
        return 143 if self.signals else self.code

    def send_signal(self, sig: int) -> None:
        self.signals.append(sig)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    def wait(self) -> int:
        return -9


class Scripts:
    """Starts scripted workers, by the names of their results."""

    def __init__(self) -> None:
        self.scripts: dict[str, tuple[int, Result | None, int]] = {}
        self.started: dict[str, Scripted] = {}
        self.most_at_once = 0

    def start(self, request: Path, target: Path) -> Scripted:
        assert request.is_file()
        polls, result, code = self.scripts[target.stem]
        self.started[target.stem] = Scripted(polls, target, result, code)
        running = sum(1 for worker in self.started.values() if worker.polls > 0)
        self.most_at_once = max(self.most_at_once, running)
        return self.started[target.stem]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    scripts = Scripts()
    monkeypatch.setattr(workers, "start_worker", scripts.start)
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.0)
    return scripts


def task(folder: Path, name: str, is_optional: bool = False) -> Task:
    return Task(name, folder / f"{name}.json", {"task": "recall"}, is_optional)


def ok(value: int) -> Result:
    return {"status": "done", "value": value}


REFUSED: Result = {"status": "failed", "message": "no", "stops_all": True}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_come_in_the_order_of_the_tasks(count: int, tmp_path: Path, scripts: Scripts) -> None:
    names = ["slow", "fast", "middle"]
    scripts.scripts = {"slow": (9, ok(0), 0), "fast": (1, ok(1), 0), "middle": (4, ok(2), 0)}
    ended: list[str] = []
    tasks = [task(tmp_path, name) for name in names]
    assert run_tasks(tasks, count, lambda task, result: ended.append(task.label)) == [ok(0), ok(1), ok(2)]
    assert list(scripts.started) == names
    assert scripts.most_at_once == min(count, 3)
    assert ended == (names if count == 1 else ["fast", "middle", "slow"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast.json", "middle.json", "slow.json"]


def test_a_killed_worker_fails_alone_and_is_tried_again(tmp_path: Path, scripts: Scripts) -> None:
    scripts.scripts = {"a": (2, None, -9), "b": (3, ok(1), 0)}
    tasks = [task(tmp_path, "a"), task(tmp_path, "b")]
    first, second = run_tasks(tasks, 2)
    assert first == {"status": "failed", "message": "a: was ended by SIGKILL, perhaps because memory ran out"}
    assert second == ok(1)
    scripts.scripts = {"a": (1, ok(0), 0)}
    assert run_tasks(tasks, 2) == [ok(0), ok(1)]


@pytest.mark.parametrize(("code", "error"), [(2, HeddleError), (1, MachineError)])
def test_what_stops_all_ends_the_others_politely(
    code: int, error: type[HeddleError], tmp_path: Path, scripts: Scripts
) -> None:
    scripts.scripts = {"a": (10**9, ok(0), 0), "b": (1, REFUSED, code)}
    with pytest.raises(error, match="b: no"):
        run_tasks([task(tmp_path, "a"), task(tmp_path, "b")], 2)
    assert scripts.started["a"].signals == [signal.SIGTERM]
    assert list(tmp_path.iterdir()) == []


def test_an_optional_task_stops_only_itself(tmp_path: Path, scripts: Scripts) -> None:
    scripts.scripts = {"a": (1, REFUSED, 2), "b": (1, ok(1), 0)}
    results = run_tasks([task(tmp_path, "a", is_optional=True), task(tmp_path, "b")], 1)
    assert [result["status"] for result in results] == ["failed", "done"]
    scripts.scripts = {"c": (1, REFUSED, 1)}
    with pytest.raises(MachineError):  # the machine fails for all
        run_tasks([task(tmp_path, "c", is_optional=True)], 1)
