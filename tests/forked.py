"""Starts of heddle's processes within tests: forked from one that has imported torch and heddle, and computed nothing.

Importing torch takes three seconds of processor time. `Popen` takes the place of `subprocess.Popen`: `-m heddle`,
`-m torch.distributed.run` and `python SCRIPT.py` become children of the process that asked, with the same
arguments, environment, folder, descriptors and signals. Everything else is started as ever, and so is what a forked
process could not do as a fresh one: code of `-c` that is no command, flags, `--compile`, another environment of
Python's own. Such a child has a starter of its own, for workers and ranks, forked before anything else runs.

    python -m tests.forked DESCRIPTOR    forks a process for each request on a socket
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

COMMAND = "\nfrom heddle.__main__ import main\nmain()"  # the end of code that does something before
NAME = "heddle-starter"  # of the process, as `ps` shows it
# What is read when Python, torch or a library is imported.
READ_AT_IMPORT = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "CC", "CXX", "CUDA_", "LANG", "LC_", "HF_")
IMPORTED = (
    "heddle.cli.main", "heddle.cli.train", "heddle.cli.compare", "heddle.distributed.launcher",
    "heddle.lab.compare.worker", "heddle.lab.judge.proposal", "torch.distributed.run", "torch._dynamo",
)  # fmt: skip
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PYTHON, LARGEST_MESSAGE, HIGH = sys.executable, 2**20, 500

Environment = Mapping[str, str]


def is_starter(process: int) -> bool:
    """Whether a process only forks others."""
    with suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text(encoding="utf-8").strip() == NAME
    return False


def read_at_import(environment: Environment) -> dict[str, str]:
    """The part of an environment that an imported library does not read again."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name != "PYTHONUNBUFFERED"
    }


def words_of(arguments: Any) -> list[str] | None:
    """What follows `python`, where a forked process can be that; `-u` is left out."""
    if isinstance(arguments, str | bytes | os.PathLike) or "--compile" in arguments:
        return None
    python, *words = map(os.fsdecode, arguments)
    words = words[1:] if words[:1] == ["-u"] else words
    is_module = len(words) > 1 and words[0] == "-m" and words[1].split(".")[0] in ("heddle", "torch")
    is_module = is_module or (len(words) > 1 and words[0] == "-c" and words[1].endswith(COMMAND))
    is_script = bool(words) and words[0].endswith(".py") and not words[0].startswith("-")
    return words if python == PYTHON and (is_module or is_script) else None


class Starter:
    """The other end of a process that forks."""

    def __init__(
        self, connection: socket.socket, environment: Environment, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.connection, self.environment, self.process = connection, read_at_import(environment), process
        self.lock = threading.Lock()

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """The new process, a child of this one; None if the starter has ended."""
        with self.lock, suppress(OSError):
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # an orphan becomes a child of this process
            try:
                socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)
                answer = self.connection.recv(64)
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0)
            return int(answer) if answer else None
        return None


ENVIRONMENT: dict[str, str] = {}  # of the first process, before any test changes it
_starters: list[Starter] = []  # one, once it is needed
_real: list[bool] = []  # not empty: every process is started as ever


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, forked where that is the same."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, *rest: Any,
    ) -> None:  # fmt: skip
        pipes, others, is_session = rest[:6], (*rest[7:11], *rest[12:]), rest[11]
        plain = close_fds and not (executable or preexec_fn or shell) and all(x in (None, -1) for x in others)
        words = words_of(args) if plain and not _real else None
        environment = os.environ if env is None else env
        if words is not None and all(isinstance(each, str) for each in (*environment, *environment.values())):
            starter = _starter()
            if starter is not None and starter.environment == read_at_import(environment):
                request = {
                    "words": words,
                    "environment": dict(environment),
                    "folder": os.path.abspath(os.getcwd() if cwd is None else os.fsdecode(cwd)),
                    "targets": [0, 1, 2, *pass_fds],
                    "masked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
                    "ignored": [int(n) for n in STOP_SIGNALS if signal.getsignal(n) is signal.SIG_IGN],
                    "session": bool(is_session),
                }
                ends = [pipes[0], pipes[3], pipes[5]]
                own = [number if end == -1 else end for number, end in enumerate(ends)]
                pid = starter.start(request, [*own, *pass_fds])
                if pid is not None:
                    self.pid, self._child_created = pid, True
                    self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                    return
        super()._execute_child(  # type: ignore[misc]
            args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell, *rest
        )


def ready() -> None:
    """Start the starter, so that no later start is the slow first one."""
    _starter()


def _starter() -> Starter | None:
    """The one of this process, started at the first call outside of forked processes."""
    if not _starters and sys.platform == "linux":
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, real_starts():
            command = [PYTHON, "-m", "tests.forked", str(theirs.fileno())]
            null, root = subprocess.DEVNULL, Path(__file__).parent.parent
            held, own = (theirs.fileno(),), ENVIRONMENT or os.environ
            process = subprocess.Popen(command, cwd=root, env=own, stdin=null, stdout=null, pass_fds=held)
        _starters.append(Starter(ours, own, process))
        ours.recv(64)  # once it has imported what it needs
    return _starters[0] if _starters else None


def close() -> None:
    """End the starter of this process."""
    while _starters:
        starter = _starters.pop()
        starter.connection.close()
        if starter.process is not None:
            starter.process.wait()


@contextmanager
def real_starts() -> Iterator[None]:
    """Within the block every process is started as ever."""
    _real.append(True)
    try:
        yield
    finally:
        _real.pop()


def prctl(option: int, value: int | bytes) -> None:
    """Linux's call on the calling process."""
    ctypes.CDLL(None).prctl(option, value)


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request; returns in it, with its request and descriptors. Ends with the other end."""
    prctl(PR_SET_NAME, NAME.encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, LARGEST_MESSAGE, 64)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        middle = os.fork()
        if not middle:  # its child becomes an orphan, and so a child of the process that asked
            middle, child = os.getpid(), os.fork()
            if child:
                os.write(write, str(child).encode())
                os._exit(0)
            for other in (read, write, connection.detach()):
                os.close(other)
            while os.getppid() == middle:
                time.sleep(0.0005)
            return json.loads(message), descriptors
        os.waitpid(middle, 0)
        with suppress(OSError):
            connection.send(os.read(read, 64))
        for other in (read, write, *descriptors):
            os.close(other)


def own_starter(environment: Environment, descriptors: Sequence[int]) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a starter for this process. Returns a request in what that starter forks, and None here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        _starters[:] = [Starter(socket.socket(fileno=moved(ours.detach())), environment)]
        return None
    for other in (ours.detach(), *descriptors):
        os.close(other)
    return serve(theirs)


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Take a request's descriptors, folder, environment and signals."""
    prctl(PR_SET_NAME, b"python")
    if request["session"]:
        os.setsid()
    high = [moved(each) for each in descriptors]
    os.closerange(3, HIGH)
    for each, target in zip(high, request["targets"], strict=True):
        os.dup2(each, target, inheritable=True)
        os.close(each)
    os.chdir(request["folder"])
    unbuffered = request["environment"].get("PYTHONUNBUFFERED", "") != ""
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # as Python opens them at its start
        old = getattr(sys, name)
        new = open(old.fileno(), mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        assert isinstance(new, io.TextIOWrapper)
        new.reconfigure(line_buffering=name == "stderr" or new.isatty(), write_through=unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    for number in STOP_SIGNALS:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else default)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["masked"])


def moved(descriptor: int) -> int:
    """The descriptor under a number that no request asks for."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(descriptor)
    return high


def run(words: Sequence[str], folder: str) -> None:
    """What `python WORDS` does."""
    if words[0] == "-m":
        sys.path[0], sys.argv = folder, list(words[1:])
        if words[1] in IMPORTED:
            del sys.modules[words[1]]  # runpy warns of a module that is there before it runs it
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(words[0])), list(words)
        runpy.run_path(words[0], run_name="__main__")


def end(call: Callable[[], None]) -> NoReturn:
    """End this process as Python does after a call, but for taking every module apart, which takes 0.3 seconds."""
    code: Any = 1
    try:
        call()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)


def main(descriptor: int) -> None:
    """Import what the processes need, fork one for each request, and in it do what was asked."""
    subprocess.Popen = Popen  # type: ignore[misc]
    os.fsync = os.fstat  # type: ignore[assignment]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until a process has become what was asked
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=descriptor)
    connection.send(b"ready")
    request, descriptors = serve(connection)
    while (asked := own_starter(os.environ, descriptors)) is not None:
        request, descriptors = asked
    become(request, descriptors)
    end(partial(run, request["words"], request["folder"]))


if __name__ == "__main__":
    from tests import forked  # this module by its name, which the processes that are forked share

    forked.main(int(sys.argv[1]))
