"""Locks on folders and files against a second process. The system frees a lock when its process ends."""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from heddle.errors import CheckpointError, describe_file_type
from heddle.storage import file_io

LOCK_FILE = ".lock"
POLL_SECONDS = 0.2
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
UNSUPPORTED_ERRNOS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


class InUseError(CheckpointError):
    """Another process holds the lock."""


class RunLock:
    """`with RunLock(folder):` locks a folder for this process; a missing folder is created.

    shared: other processes may also hold a shared lock. Raises InUseError, naming the process that holds the lock,
    MachineError if the folder cannot be written. The lock file is never removed: otherwise two processes could each
    lock a different file of that name.
    """

    def __init__(self, folder: Path, shared: bool = False):
        self.folder, self.shared = Path(folder), shared
        self.descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        if self.descriptor is not None:
            raise CheckpointError(f"{self.folder}: is already locked by this object; use a second RunLock")
        try:
            file_io.make_folder(self.folder)
            descriptor = _open(self.folder / LOCK_FILE)
            try:
                _lock(descriptor, f"{self.folder}: is in use by", "folder", self.shared)
                _write_process(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise file_io.folder_error(self.folder, error) from error
        self.descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a folder. Nothing is written; False if it is unknown."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@contextmanager
def lock_output(path: Path) -> Iterator[int]:
    """Lock the name of a file or folder while it is written; missing parents are created.

    Yields the descriptor: a child process that inherits it also holds the lock. The lock file, `.NAME.lock` beside it,
    is removed at the end. Raises InUseError, naming the process that is writing it, MachineError if the folder cannot
    be written. File systems without locks are trusted.
    """
    lock_path = path.with_name(f".{path.name}{LOCK_FILE}")
    try:
        file_io.make_folder(path.parent)
        descriptor = _open_locked(lock_path, f"{path}: is being written by")
    except OSError as error:
        raise file_io.folder_error(path, error) from error
    try:
        with suppress(OSError):
            _write_process(descriptor)
        yield descriptor
    finally:
        try:
            with suppress(OSError):
                file_io.system.unlink(lock_path)
        finally:
            os.close(descriptor)


@contextmanager
def wait_for_lock(path: Path, is_finished: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Enter the block with `lock_output(path)` once it is free, or without it once another process has finished."""
    with ExitStack() as stack:
        while not is_finished():
            try:
                stack.enter_context(lock_output(path))
                break
            except InUseError:
                time.sleep(POLL_SECONDS)
        yield


def _open_locked(lock_path: Path, refusal: str) -> int:
    """Open and lock a file that its holder removes; return its descriptor."""
    while True:
        descriptor = _open(lock_path)
        try:
            try:
                _lock(descriptor, refusal, "name")
            except OSError as error:
                if error.errno not in UNSUPPORTED_ERRNOS:
                    raise
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.lstat(lock_path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has removed it since it was opened


def _open(lock_path: Path) -> int:
    """Open or create a lock file. Raises CheckpointError for a link, a pipe or anything else that is not a file."""
    with suppress(FileNotFoundError):  # its holder may remove it at any time
        mode = os.lstat(lock_path).st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{lock_path}: {describe_file_type(mode)}, not a lock; remove it")
    descriptor: int = file_io.system.open(lock_path, LOCK_FLAGS, 0o666)
    return descriptor


def _lock(descriptor: int, refusal: str, remedy: str, shared: bool = False) -> None:
    """Lock an open file. Raises InUseError, naming the process that has locked it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        process = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        owner = f"process {process}" if process.isdigit() else "another process"
        raise InUseError(f"{refusal} {owner}; wait until it has ended or choose another {remedy}") from error


def _write_process(descriptor: int) -> None:
    """Write this process's id into a locked file, for the error message of a second process."""
    os.ftruncate(descriptor, 0)
    file_io.system.write(descriptor, f"{os.getpid()}\n".encode("ascii"))
