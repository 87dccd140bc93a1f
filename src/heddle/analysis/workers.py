"""Run tasks in worker processes, several at once.

A task is a request of plain values, and its result is a file. So work that was ended is continued: what has a result is
not repeated. Each task has a process of its own: it reports its own memory, and no other suffers if it is killed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from heddle import progress
from heddle.errors import HeddleError, MachineError
from heddle.signals import Interrupted, catch_stop_signals
from heddle.storage.atomic import write_file
from heddle.storage.json_file import read_json_file

POLL_SECONDS = 0.05
MAX_WORKERS = 4  # by default: more processes need more memory than a small machine has
WORKER_MODULE = "heddle.analysis.comparison.worker"
Result = dict[str, Any]


class _Process(Protocol):
    """A started worker, as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal."""

    def kill(self) -> None:
        """End it at once."""

    def wait(self) -> int:
        """Wait for its end."""


@dataclass(frozen=True)
class Task:
    """Work for one worker.

    label: begins its messages. result_file: of its result, once it is done. request: what it is, in plain values; its
    "task" is a name of `worker.TASKS`. is_optional: whether its refusal ends nothing but itself.
    """

    label: str
    result_file: Path
    request: Mapping[str, Any] = field(hash=False)
    is_optional: bool = False

    @property
    def request_file(self) -> Path:
        """Where the request lies while the worker runs."""
        return self.result_file.with_name(f".{self.result_file.stem}.task.json")

    def saved_result(self) -> Result | None:
        """The result of an earlier call, or None. Raises CheckpointError for an altered file."""
        return read_json_file(self.result_file) if self.result_file.is_file() else None


def default_workers(threads: int, device: str) -> int:
    """How many workers run at once where nobody chose: on a CPU one per thread, at most `MAX_WORKERS`."""
    return min(threads, MAX_WORKERS) if device == "cpu" else 1


def run_tasks(
    tasks: Iterable[Task], workers: int = 1, on_result: Callable[[Task, Result], None] | None = None
) -> list[Result]:
    """The results of tasks, in their order; `workers` of them run at once, started in their order.

    A result's status is done, diverged or failed; a failed one is not saved, so that the next call tries it again.
    on_result: called after each task that was run now. Raises HeddleError for what would stop the other tasks too, and
    Interrupted after a signal; in both cases once every running worker has saved.
    """
    in_order = list(tasks)
    results = {task: task.saved_result() for task in in_order}
    pool = _Pool(workers)
    waiting = deque(task for task in in_order if results[task] is None)
    with catch_stop_signals() as stop_request:
        try:
            while waiting or pool.running:
                while waiting and len(pool.running) < workers and stop_request.signal_number is None:
                    pool.start(waiting.popleft())
                for task, result in pool.finished():
                    results[task] = result
                    if on_result is not None:
                        on_result(task, result)
                if stop_request.signal_number is not None:
                    pool.stop(stop_request.signal_number)
                    break
                if pool.running:
                    time.sleep(POLL_SECONDS)
        except HeddleError:
            pool.stop(signal.SIGTERM)
            raise
        finally:
            pool.kill()
        if stop_request.signal_number is not None:
            raise Interrupted(stop_request.signal_number, "ended between two runs; the same command continues")
    return [result for result in results.values() if result is not None]


class _Pool:
    """The workers that run now."""

    def __init__(self, workers: int) -> None:
        self.alone = workers == 1  # whether a worker has the terminal to itself
        self.running: dict[Task, _Process] = {}

    def start(self, task: Task) -> None:
        """Start a worker."""
        if self.alone and task.request["task"] in ("calibrate", "speed"):  # the others have a progress bar
            progress.print_status(task.label)
        task.result_file.parent.mkdir(parents=True, exist_ok=True)
        terminal = {"quiet": progress.is_quiet(), "alone": self.alone}
        request = {**task.request, "label": task.label, "parent_pid": os.getpid(), **terminal}
        write_file(task.request_file, json.dumps(request))
        try:
            self.running[task] = start_worker(task.request_file, task.result_file)
        except BaseException:
            task.request_file.unlink(missing_ok=True)
            raise

    def finished(self) -> list[tuple[Task, Result]]:
        """The results of the workers that have ended since the last call."""
        ended = [(task, code) for task, process in self.running.items() if (code := process.poll()) is not None]
        for task, _ in ended:
            del self.running[task]
            task.request_file.unlink(missing_ok=True)
        return [(task, _read_result(task, code)) for task, code in ended]

    def stop(self, number: int) -> None:
        """Ask all workers to save and end, and wait for them."""
        for process in self.running.values():
            process.send_signal(number)
        while any(process.poll() is None for process in self.running.values()):
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End all workers at once and remove their requests."""
        for task, process in self.running.items():
            if process.poll() is None:
                process.kill()
                process.wait()
            task.request_file.unlink(missing_ok=True)
        self.running.clear()


def start_worker(request_file: Path, result_file: Path) -> _Process:
    """Start a process that runs the task of a request and writes its result."""
    command = [sys.executable, "-m", WORKER_MODULE, str(request_file), str(result_file)]
    return subprocess.Popen(command, start_new_session=True)


def _read_result(task: Task, exit_code: int) -> Result:
    """The result that a worker wrote, or a failed one where it wrote none. Raises what would stop other tasks too."""
    result = task.saved_result()
    if result is None:
        return {"status": "failed", "message": f"{task.label}: {_describe_end(exit_code)}"}
    if result["status"] == "done":
        return result
    result["message"] = f"{task.label}: {result['message']}"
    if result["status"] == "failed":
        task.result_file.unlink()
        if result["stops_all"] and exit_code == 1:
            raise MachineError(result["message"])
        if result["stops_all"] and not task.is_optional:
            raise HeddleError(result["message"])
    return result


def _describe_end(exit_code: int) -> str:
    number = -exit_code if exit_code < 0 else exit_code - 128
    if number <= 0:
        return f"ended with code {exit_code}"
    guess = ", perhaps because memory ran out" if number == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(number).name}{guess}"
