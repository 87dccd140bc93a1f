"""Build the C++ operators of `heddle.numerics.native` by torch's extension tools, keep them in the cache, load them."""

import hashlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Lock, Thread

import torch

from heddle.data.cache import CACHE_REMEDY, DataCache
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.numerics import native
from heddle.progress import print_status, print_warning
from heddle.storage.file_io import read_json_file, write_file, write_json_file
from heddle.storage.lock import wait_for_lock

FOLDER = Path(native.__file__).parent
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
VERSION = 1  # raise it when the way of building changes
STOP_SECONDS = 0.05  # between two looks for compilers that are to be stopped
_loaded: set[str] = set()  # files
_printing = Lock()  # files are built by threads


class OutOfTimeError(MachineError):
    """What is built and measured once per machine did not end in its time."""


def install(operators: Collection[str], end: float = math.inf) -> tuple[str, ...]:
    """Use these operators, and no others; return those in use. Those that cannot be built are named in a warning.

    Raises OutOfTimeError if some are not built before `end`, in time.perf_counter() seconds; those that are stay in the
    cache, and compilers are stopped.
    """
    names = set(operators)
    missing = sorted({native.OPERATORS[name] for name in names} - _loaded)
    if missing:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # compilers are processes of their own
            failures = dict(zip(missing, pool.map(lambda group: _failure(group, end), missing), strict=True))
        for group, error in failures.items():
            if isinstance(error, OutOfTimeError):
                raise error
            if error is not None:
                lost = {name for name in names if native.OPERATORS[name] == group}
                print_warning(f"C++ operators {', '.join(sorted(lost))}: the plain ways are used, because {error}")
                names -= lost
    native.in_use = frozenset(names)
    return tuple(sorted(names))


def unusable() -> str | None:
    """Why no operator can be built here, or None."""
    if sys.platform != "linux":
        return "C++ operators are built on Linux only"
    if _compiler() is None:
        return "no C++ compiler was found; install g++, or set CXX to one"
    return None if shutil.which("ninja", path=_search_path()) else "ninja was not found; install it (pip install ninja)"


@cache
def sources_hash() -> str:
    """A hash of the operators' sources: with others, other operators may be faster."""
    files = sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _search_path() -> str:
    """PATH, and the folder of Python, where `pip install ninja` puts it."""
    path, own = os.environ.get("PATH", ""), str(Path(sys.executable).parent)
    return path if own in path.split(os.pathsep) else os.pathsep.join((path, own))


def _failure(group: str, end: float) -> Exception | None:
    """Load the operators of a file; return why they could not be."""
    try:
        _load(group, end)
    except (CheckpointError, ConfigError, MachineError) as error:
        return error
    return None


def _load(group: str, end: float = math.inf) -> None:
    """Load the operators of a file, which is built if the cache does not hold it.

    end: of the time for building, as in `install`. Raises CheckpointError, ConfigError or MachineError, saying why, if
    it cannot be built here.
    """
    if group in _loaded:
        return
    path = DataCache(None).path("so", "native", VERSION, *_key(group))

    def is_built() -> bool:
        return _is_whole(path)

    # two processes that build at once would take twice as long
    with wait_for_lock(path, lambda: is_built() or time.perf_counter() >= end):
        if not is_built():
            _build(group, path, end)
    if group not in _loaded:  # building loads it
        torch.ops.load_library(path)
        _loaded.add(group)


def _build(group: str, path: Path, end: float) -> None:
    reason = unusable()
    if reason is not None:
        raise MachineError(reason)
    late = OutOfTimeError(f"its C++ operators ({group}) were not built within the time that the budget leaves for it")
    if time.perf_counter() >= end:
        raise late
    from torch.utils.cpp_extension import load  # slow to import

    with _printing:
        print_status(f"building C++ operators, once: {group}, about 15 seconds")
    os.environ["PATH"] = _search_path()  # torch looks for ninja there
    with TemporaryDirectory() as folder, _stopped_at(end, folder):  # torch's own locks outlive a killed process
        try:
            load(
                f"heddle_{group}",
                [str(FOLDER / f"{group}.cpp")],
                extra_cflags=list(FLAGS),
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            if time.perf_counter() >= end:
                raise late from error
            lines = [line.strip() for line in str(error).splitlines() if "error" in line]
            raise MachineError(f"{group}.cpp could not be built: {(lines or [type(error).__name__])[0]}") from error
        _loaded.add(group)
        code = (Path(folder) / f"heddle_{group}.so").read_bytes()
    write_file(path, code, CACHE_REMEDY)
    write_json_file(_record_of(path), {"code": hashlib.sha256(code).hexdigest()}, CACHE_REMEDY)


@contextmanager
def _stopped_at(end: float, folder: str) -> Iterator[None]:
    """Kill the compilers, which work in this folder, from `end` on: torch does not let go of them."""
    done = Event()

    def stop() -> None:
        while not done.wait(STOP_SECONDS):
            for process in Path("/proc").glob("[0-9]*") if time.perf_counter() >= end else ():
                with suppress(OSError):  # it has ended, or is another user's
                    if os.path.samefile(process / "cwd", folder):
                        os.kill(int(process.name), signal.SIGKILL)

    if end == math.inf:
        yield
        return
    thread = Thread(target=stop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_whole(path: Path) -> bool:
    """Whether the cache holds a built file as it was written."""
    try:
        return bool(read_json_file(_record_of(path))["code"] == hashlib.sha256(path.read_bytes()).hexdigest())
    except (CheckpointError, KeyError, OSError):
        return False


def _key(group: str) -> list[str]:
    """What a built file depends on."""
    sources = [FOLDER / f"{group}.cpp", *sorted(FOLDER.glob("*.h"))]
    code = [path.read_text(encoding="utf-8") for path in sources]
    return [*code, torch.__version__, *FLAGS, _cpu_flags(), _compiler_version()]


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


@cache
def _compiler_version() -> str:
    compiler = _compiler()
    if compiler is None:
        return ""
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


@cache
def _cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
