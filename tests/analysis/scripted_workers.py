"""Stand-ins of worker processes: each writes its result, or ends without, when it is polled for the n-th time."""

import json
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Self

import pytest

from heddle.lab import workers
from heddle.lab.workers import Result, Task
from heddle.signals import Interrupted
from heddle.storage.file_io import write_json_file


class EndedWorkers(ABC):
    """Workers that end as they start, with results that are made up. tasks: what was asked, by the result's name.

    interrupted_at: the name of the result in place of which the command is interrupted.
    """

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.tasks: dict[str, dict[str, Any]] = {}
        self.interrupted_at = ""

    def start(self, request: Path, target: Path) -> Self:
        name = target.stem
        if name == self.interrupted_at:
            raise Interrupted(15)
        self.ran.append(name)
        self.tasks[name] = json.loads(request.read_text(encoding="utf-8"))
        write_json_file(target, self.result(self.tasks[name], name))
        return self

    @abstractmethod
    def result(self, task: dict[str, Any], name: str) -> Result: ...

    def poll(self) -> int:
        return 0


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
