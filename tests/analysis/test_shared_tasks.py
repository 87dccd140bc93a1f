"""Tasks on several devices, and tasks that several processes share: each runs once, and none is lost."""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from heddle.lab import workers
from heddle.lab.workers import Result, Workers, run_tasks, start_worker
from heddle.storage.file_io import write_json_file
from heddle.storage.lock import InUseError, RunLock, lock_output
from tests.analysis.scripted_workers import Scripted, Scripts, ok, scripts, task

__all__ = ["scripts"]  # a fixture


def test_each_device_has_one_task_at_a_time(tmp_path: Path, scripts: Scripts, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts.scripts = {"a": (9, ok(0), 0), "b": (1, ok(1), 0), "c": (3, ok(2), 0), "d": (1, ok(3), 0)}
    devices: dict[str, str] = {}

    def start(request: Path, target: Path) -> Scripted:
        devices[target.stem] = json.loads(request.read_text())["device"]
        return scripts.start(request, target)

    monkeypatch.setattr(workers, "start_worker", start)
    tasks = [task(tmp_path, name) for name in "abcd"]
    assert run_tasks(tasks, Workers(("cuda:0", "cuda:2"))) == [ok(0), ok(1), ok(2), ok(3)]
    assert devices == {"a": "cuda:0", "b": "cuda:2", "c": "cuda:2", "d": "cuda:2"}
    assert scripts.most_at_once == 2


def test_a_process_begins_with_its_share(tmp_path: Path) -> None:
    tasks = [task(tmp_path, name) for name in "abcde"]
    orders = ["".join(each.label for each in Workers(("cpu",), 1, (k, 3)).order(tasks)) for k in range(3)]
    assert orders == ["adbce", "beacd", "cabde"]
    assert Workers(("cpu", "cpu"), 1, (0, 3)).total == 6


class SharedTasks:
    """Two threads for two processes that share tasks. The first one's attempt at a task in `fails` fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tasks = [task(folder, name) for name in "abcdef"]
        self.fails: dict[str, set[str]] = {}
        self.started: list[tuple[str, str]] = []
        self.results: dict[str, list[Result]] = {}
        monkeypatch.setattr(workers, "SHARED_POLL_SECONDS", 0.001)
        monkeypatch.setattr(workers, "start_worker", self.start)

    def start(self, request: Path, target: Path, *inherited: int) -> Scripted:
        assert len(inherited) == 1
        process = threading.current_thread().name
        self.started.append((process, target.stem))
        is_failing = target.stem in self.fails.get(process, set())
        return Scripted(3, target, None if is_failing else ok(ord(target.stem)), -9 if is_failing else 0)

    def run(self) -> None:
        def run(index: int) -> None:
            self.results[f"process {index}"] = run_tasks(self.tasks, Workers(("cpu", "cpu"), 1, (index, 2)))

        threads = [threading.Thread(target=run, args=(index,), name=f"process {index}") for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_shared_tasks_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedTasks(tmp_path, monkeypatch)
    shared.run()
    assert sorted(name for _, name in shared.started) == list("abcdef")
    assert {process for process, _ in shared.started} == {"process 0", "process 1"}
    expected = [ok(ord(name)) for name in "abcdef"]
    assert shared.results == {"process 0": expected, "process 1": expected}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.json" for name in "abcdef"]


def test_what_fails_in_one_process_is_tried_by_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedTasks(tmp_path, monkeypatch)
    shared.fails = {"process 0": set("acf"), "process 1": {"f"}}
    shared.run()
    failed = {"status": "failed", "message": "f: was ended by SIGKILL, perhaps because memory ran out"}
    # process 0 may end before process 1 begins, and with it what only process 1 can do
    assert shared.results["process 1"] == [*(ok(ord(name)) for name in "abcde"), failed]
    assert shared.results["process 0"][5] == failed
    attempts = [pair for pair in shared.started if pair[1] == "f"]
    assert sorted(attempts) == [("process 0", "f"), ("process 1", "f")]


@pytest.mark.parametrize("kind", ["speed", "train"])
def test_a_worker_holds_its_task_when_the_process_that_started_it_is_gone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a fresh process and in a forked one, which waits here for its request to be written."""
    script, request, result = tmp_path / "python", tmp_path / "request", tmp_path / "a.json"
    request.write_text(json.dumps({"task": kind, "devices": ["cpu"]}))
    if kind == "speed":
        script.write_text("#!/bin/sh\nexec sleep 600\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
    else:
        start = workers._ForkServer.start

        def start_waiting(self: Any, *arguments: Any) -> Any:
            request.unlink()
            os.mkfifo(request)  # nobody writes it
            return start(self, *arguments)

        monkeypatch.setattr(workers._ForkServer, "start", start_waiting)
    with lock_output(result) as descriptor:
        worker = start_worker(request, result, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), descriptor)  # the lock is the worker's alone now
        with pytest.raises(InUseError, match=f"process {os.getpid()}"), lock_output(result):
            pass
        worker.kill()
        worker.wait()
        with lock_output(result):
            pass


def test_a_lock_that_is_removed_while_another_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, lstat = tmp_path / ".a.json.lock", os.lstat
    looks: list[Path] = []
    lock.touch()

    def removed(path: Path) -> os.stat_result:  # between two looks at it
        looks.append(path)
        if len(looks) == 2:
            lock.unlink()
        return lstat(path)

    monkeypatch.setattr(os, "lstat", removed)
    with lock_output(tmp_path / "a.json"):
        assert lock.exists()
    assert not lock.exists()


def test_locks_that_are_shared(tmp_path: Path) -> None:
    alone, first, second = RunLock(tmp_path), RunLock(tmp_path, shared=True), RunLock(tmp_path, shared=True)
    with first, second, pytest.raises(InUseError, match="is in use by process"), alone:
        pass
    with RunLock(tmp_path), pytest.raises(InUseError), RunLock(tmp_path, shared=True):
        pass


def test_a_result_that_appears_elsewhere_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose every task is taken waits for the results of the others."""
    shared = SharedTasks(tmp_path, monkeypatch)
    [first, *_] = shared.tasks
    with lock_output(first.result_file):
        waiter = threading.Thread(
            target=lambda: shared.results.update(a=run_tasks([first], Workers(("cpu",), 1, (0, 2))))
        )
        waiter.start()
        write_json_file(first.result_file, ok(7))
    waiter.join()
    assert shared.results == {"a": [ok(7)]}
    assert shared.started == []
