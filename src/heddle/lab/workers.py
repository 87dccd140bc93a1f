"""Run tasks in worker processes, several at once.

A task is a request of plain values, and its result is a file, so that interrupted work resumes: a task with a result is
not repeated. Each task has its own process, which reports its own memory and can be killed without harm to the others.
On Linux, tasks on a CPU are forked from a process that has imported what they need, and has computed nothing; speeds
are measured in fresh processes.

Several processes, also on several machines, may share the tasks of a folder: each starts with its own share, and then
takes remaining tasks. A lock named after the result marks a task as taken. The worker inherits it, so that the lock is
released when the worker ends, even after its parent.
"""

import atexit
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from heddle import progress
from heddle.errors import HeddleError, MachineError
from heddle.signals import Interrupted, catch_stop_signals, masked_stop_signals
from heddle.storage.file_io import read_json_file, write_file
from heddle.storage.lock import InUseError, lock_output

POLL_SECONDS = 0.05
SHARED_POLL_SECONDS = 0.5  # each look asks the shared folder for every task
MAX_WORKERS = 4  # by default: more processes need more memory than a small machine has
WORKER_MODULE = "heddle.lab.compare.worker"
Result = dict[str, Any]


_Process: TypeAlias = "subprocess.Popen[bytes] | _Fork"  # a started worker


@dataclass(frozen=True)
class Task:
    """Work for one worker.

    label: the start of its messages. result_file: of its result, once it is done. request: the work, in plain values;
    its "task" is a name of `worker.TASKS`. is_optional: whether other tasks continue if it is refused.
    """

    label: str
    result_file: Path
    request: Mapping[str, Any] = field(hash=False)
    is_optional: bool = False

    @property
    def request_file(self) -> Path:
        """The file of the request while the worker runs."""
        return self.result_file.with_name(f".{self.result_file.stem}.task.json")

    def saved_result(self) -> Result | None:
        """The result of an earlier call, or None. Raises CheckpointError for a modified file."""
        return read_json_file(self.result_file) if self.result_file.is_file() else None


@dataclass(frozen=True)
class Workers:
    """Where tasks run.

    devices: their names; each runs one task at a time, or two if it is named twice. threads: of each process on a CPU
    (the last bits of results depend on it); None: torch's default. share: (index, count) of this process among all that
    share the tasks; None: it does all of them. ranks: processes that share each training, on neighboring devices.
    """

    devices: tuple[str, ...]
    threads: int | None = None
    share: tuple[int, int] | None = None
    ranks: int = 1

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The devices of each task that runs here at the same time."""
        starts = range(0, len(self.devices), self.ranks)
        return [self.devices[start : start + self.ranks] for start in starts]

    @property
    def count(self) -> int:
        """Tasks that run here at the same time."""
        return len(self.groups)

    @property
    def total(self) -> int:
        """Tasks that run at the same time in all processes."""
        return self.count * (1 if self.share is None else self.share[1])

    def first(self) -> "Workers":
        """The workers reduced to the devices of one task."""
        return replace(self, devices=self.groups[0])

    def order(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks in the order in which this process takes them: its own share first."""
        if self.share is None:
            return list(tasks)
        index, count = self.share
        return [tasks[n] for n in sorted(range(len(tasks)), key=lambda n: (n % count != index % count, n))]


def default_workers(device: str, threads: int, count: int | None = None) -> Workers:
    """`count` tasks at a time on one device; None: on a CPU one per thread, at most `MAX_WORKERS`, else one.

    threads: of this process, which the tasks divide among them.
    """
    count = count or (min(threads, MAX_WORKERS) if device == "cpu" else 1)
    return Workers((device,) * count, None if count == 1 else max(1, threads // count))


def describe_workers(workers: Workers, threads: int) -> str:
    """What runs at the same time: "2 at a time on 1 thread each". threads: of this process."""
    if workers.devices[0] != "cpu":
        return f"{workers.total} at a time"
    each, cores, limit = workers.threads or threads, os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS")
    idle = (
        f" (OMP_NUM_THREADS={limit}, of {cores} cores)"
        if limit == str(threads) and workers.count * each < cores
        else ""
    )
    return f"{workers.total} at a time on {each} thread{'s' * (each > 1)}{' each' * (workers.total > 1)}{idle}"


def run_tasks(
    tasks: Iterable[Task],
    workers: Workers,
    on_result: Callable[[Task, Result], None] | None = None,
    *,
    until: float = math.inf,
    while_waiting: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run tasks and return their results in order; each runs here, or in another process that shares them.

    until: in time.monotonic() seconds; then the workers save and end, and unfinished tasks have no result.
    while_waiting: called repeatedly while workers run.

    A result's status is done, diverged or failed. A failed one is not saved, so that the next call tries it again, and
    before that each process that shares the tasks. on_result: called after each task that ended during the call. Raises
    HeddleError for errors that would stop the other tasks too, and Interrupted after a signal; in both cases once every
    worker of this process has saved.
    """
    in_order = list(tasks)
    is_shared = workers.share is not None
    # results of other processes are read under their locks
    results = {task: None if is_shared else task.saved_result() for task in in_order}
    pool = _Pool(workers, workers.order([task for task in in_order if results[task] is None]))
    with catch_stop_signals() as stop_request:
        try:
            while pool.is_busy:
                if stop_request.signal_number is None:
                    pool.start_waiting()
                for task, result in pool.finished():
                    results[task] = result
                    if on_result is not None:
                        on_result(task, result)
                if stop_request.signal_number is not None or time.monotonic() >= until:
                    for task, result in pool.stop(stop_request.signal_number or signal.SIGTERM):
                        results[task] = result
                        if on_result is not None:
                            on_result(task, result)
                    break
                if pool.is_busy:
                    while_waiting()
                    time.sleep(SHARED_POLL_SECONDS if is_shared else POLL_SECONDS)
        except HeddleError:
            pool.stop(signal.SIGTERM)
            raise
        finally:
            pool.kill()
        if stop_request.signal_number is not None:
            raise Interrupted(stop_request.signal_number, "ended before all runs were done; the same command continues")
    return [result for result in results.values() if result is not None]


@dataclass(frozen=True)
class _Running:
    """A started worker. lock: releases its task."""

    process: _Process
    devices: tuple[str, ...]
    lock: ExitStack


class _Pool:
    """The tasks that have no result: waiting, running here, or failed here while another process may succeed."""

    def __init__(self, workers: Workers, waiting: list[Task]) -> None:
        self.alone = workers.count == 1  # whether a worker has the terminal to itself
        self.is_shared = workers.share is not None
        self.waiting, self.free = waiting, workers.groups
        self.running: dict[Task, _Running] = {}
        self.failed: dict[Task, Result] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a task has no result yet."""
        return bool(self.waiting or self.running or self.failed)

    def start_waiting(self) -> None:
        """Start a worker on each free group of devices, on the first tasks that no other process has."""
        for task in list(self.waiting):
            if not self.free:
                return
            with ExitStack() as lock:
                try:
                    inherited = (lock.enter_context(lock_output(task.result_file)),) if self.is_shared else ()
                except InUseError:
                    continue
                if self.is_shared and task.result_file.is_file():  # another process has just finished it
                    continue
                process = self._start(task, self.free[0], *inherited)
                self.running[task] = _Running(process, self.free.pop(0), lock.pop_all())
            self.waiting.remove(task)

    def _start(self, task: Task, devices: tuple[str, ...], *inherited: int) -> _Process:
        if self.alone and task.request["task"] in ("calibrate", "speed"):  # the others have a progress bar
            progress.print_status(task.label)
        task.result_file.parent.mkdir(parents=True, exist_ok=True)
        terminal = {"quiet": progress.is_quiet(), "alone": self.alone}
        where = {"device": devices[0], "devices": devices, "parent_pid": os.getpid()}
        request = {**task.request, **where, "label": task.label, **terminal}
        write_file(task.request_file, json.dumps(request))
        try:
            return start_worker(task.request_file, task.result_file, *inherited)
        except BaseException:
            task.request_file.unlink(missing_ok=True)
            raise

    def finished(self) -> list[tuple[Task, Result]]:
        """The results of the tasks that have ended since the last call, here or elsewhere."""
        results = []
        for task, running in list(self.running.items()):
            if (exit_code := running.process.poll()) is None:
                continue
            del self.running[task]
            self.free.append(running.devices)
            task.request_file.unlink(missing_ok=True)
            with running.lock:
                result = _read_result(task, exit_code)
            if self.is_shared and result["status"] == "failed":
                self.failed[task] = result
            else:
                results.append((task, result))
        return [*results, *self._finished_elsewhere()] if self.is_shared else results

    def _finished_elsewhere(self) -> list[tuple[Task, Result]]:
        """Results from other processes; and failures here, once no other process tries the task."""
        results = []
        is_over = not self.waiting and not self.running
        for task in [*self.waiting, *self.failed]:
            if not task.result_file.is_file() and not (task in self.failed and is_over):
                continue
            with suppress(InUseError), lock_output(task.result_file):
                result = task.saved_result() or self.failed.get(task)
                if result is not None:
                    results.append((task, result))
        for task, _ in results:
            self.failed.pop(task, None)
            self.waiting = [waiting for waiting in self.waiting if waiting != task]
        return results

    def stop(self, number: int) -> list[tuple[Task, Result]]:
        """Ask all workers to save and end, and wait for them. Returns the results of those that were done first."""
        for running in self.running.values():
            running.process.send_signal(number)
        while any(running.process.poll() is None for running in self.running.values()):
            time.sleep(POLL_SECONDS)
        saved = [(task, task.saved_result()) for task in self.running]
        return [(task, result) for task, result in saved if result is not None and result["status"] == "done"]

    def kill(self) -> None:
        """End all workers at once, remove their requests and release their tasks."""
        for task, running in self.running.items():
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()
            task.request_file.unlink(missing_ok=True)
            running.lock.close()
        self.running.clear()


def start_worker(request_file: Path, result_file: Path, *inherited: int) -> _Process:
    """Start a process for a request. Signals wait until it handles them. inherited: descriptors that it keeps open."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    if sys.platform == "linux" and request["task"] in FORKED and list(request["devices"]) == ["cpu"]:
        return _fork_server().start(request_file, result_file, inherited)
    command = [sys.executable, "-m", WORKER_MODULE, str(request_file), str(result_file)]
    with masked_stop_signals():
        return subprocess.Popen(command, start_new_session=True, pass_fds=inherited)


def confine(folder: str, seconds: float, memory: float) -> None:
    """Move this process into a folder of its own, with limits of processor time and of memory, in GB, from now on."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limit = int(spent + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    if sys.platform == "linux":  # torch has reserved some already
        reserved = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = reserved + int(memory * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# Forked workers. Importing torch and the trainer takes noticeably long beside a minute's training of a tiny design.


FORKED = ("calibrate", "train", "loss", "recall")


class _Fork:
    """A worker that the fork server has started, as `subprocess.Popen`."""

    def __init__(self, server: "_ForkServer", pid: int) -> None:
        self.server, self.pid = server, pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        self.server.read_ends()
        return self.server.codes.get(self.pid, -signal.SIGKILL if self.server.has_ended else None)

    def send_signal(self, sig: int) -> None:
        """Send a signal if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it ends."""
        while (code := self.poll()) is None:
            time.sleep(POLL_SECONDS)
        return code


class _ForkServer:
    """A process that forks a worker for each request: `worker.fork_workers`. It ends with this one.

    codes: exit codes of ended workers, by process. place: what a worker inherits from this process.
    """

    def __init__(self, place: object) -> None:
        self.place, self.has_ended, self.codes = place, False, dict[int, int]()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, masked_stop_signals():
            command = [sys.executable, "-m", WORKER_MODULE, "--fork", str(theirs.fileno())]
            self._process = subprocess.Popen(command, start_new_session=True, pass_fds=(theirs.fileno(),))

    def start(self, request_file: Path, result_file: Path, inherited: Sequence[int]) -> _Fork:
        """Fork a worker. Raises MachineError if the server has ended."""
        with suppress(OSError):
            socket.send_fds(self._socket, [json.dumps([str(request_file), str(result_file)]).encode()], inherited)
            while not self.has_ended:
                if (pid := self._read(0)) is not None:
                    return _Fork(self, pid)
        raise MachineError(f"{WORKER_MODULE}: was ended before it could start a worker; the same command continues")

    def read_ends(self) -> None:
        """Read which workers have ended since the last call."""
        with suppress(BlockingIOError):
            while not self.has_ended:
                self._read(socket.MSG_DONTWAIT)

    def _read(self, flags: int) -> int | None:
        """Read a message; returns the process id of a started worker."""
        message = self._socket.recv(4096, flags)
        if not message:
            self.has_ended = True
            return None
        pid, code = json.loads(message)
        if code is None:
            self.codes.pop(pid, None)
            return int(pid)
        self.codes[pid] = code
        return None

    def close(self) -> None:
        """End the server, which starts no more workers."""
        self._socket.close()
        self._process.wait()


_servers: list[_ForkServer] = []


@atexit.register
def _close_servers() -> None:
    while _servers:
        _servers.pop().close()


def _fork_server() -> _ForkServer:
    """The server of this process; a new one if the working folder, environment or terminal has changed."""
    terminals = [(status.st_dev, status.st_ino) for status in (os.fstat(1), os.fstat(2))]
    place = (os.getpid(), os.getcwd(), dict(os.environ), terminals)
    if not _servers or _servers[0].place != place or _servers[0].has_ended:
        _close_servers()
        _servers.append(_ForkServer(place))
    return _servers[0]


def _read_result(task: Task, exit_code: int) -> Result:
    """The result that a worker wrote, or a failed one. Raises errors that would stop other tasks too."""
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
