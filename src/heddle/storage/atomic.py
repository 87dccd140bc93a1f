"""Durable writing and careful reading of plain files; every call that matters goes through `system`."""

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from heddle.errors import CheckpointError, HeddleError, MachineError

system = os  # tests put a stand-in here that counts, fails or dies at any call

CHUNK = 4 * 2**20  # bytes hashed and copied at a time: small enough to stay in the cache between the two
PARALLEL = 2**18  # bytes from which a second thread is worth its start
LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<role>tmp|old)-(?P<process>\d{1,10})-[0-9a-f]{8}", re.DOTALL)
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no links followed, no waiting on a pipe
READ_LINKED = READ & ~os.O_NOFOLLOW  # for folders of others: the cache of a hub is made of links
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)


def unreadable(path: Path, error: OSError) -> HeddleError:
    """The error for a file that could not be read: a CheckpointError if it is not there."""
    if error.errno == errno.ELOOP:
        return CheckpointError(f"{path}: is a symbolic link, which is not followed; put the file itself there")
    if error.errno in NOT_THERE:
        return CheckpointError(f"{path}: is missing; restore it or name another folder")
    return MachineError(f"{path}: cannot be read ({error.strerror}); check the disk and the permissions")


def unwritable(path: Path, error: OSError) -> HeddleError:
    """The error for a folder that could not be written."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG):
        return CheckpointError(f"{path}: cannot be made a folder ({error.strerror}); choose another place")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space or choose another disk"
    else:
        remedy = "choose a folder on a disk that can be written"
    return MachineError(f"{path}: cannot be written ({error.strerror}); {remedy}")


@contextmanager
def opened(path: Path, flags: int = READ) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading and give (descriptor, size in bytes).

    Pipes, devices, folders and, but with READ_LINKED, links are a CheckpointError, and never wait; a failing disk is
    a MachineError.
    """
    try:
        descriptor = system.open(path, flags)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is not a regular file; put the file itself there")
        yield descriptor, status.st_size
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(descriptor)


def read_exactly(
    descriptor: int,
    view: memoryview,
    path: Path,
    digest: "hashlib._Hash | None" = None,
    helper: ThreadPoolExecutor | None = None,
) -> None:
    """Fill `view` from the descriptor, adding the bytes to `digest`; a file that ends early is an error.

    A helper (of one thread) hashes what is there while more is read, which on two cores takes half the time.
    """
    done = 0
    hashed: list[Future[None]] = []
    while done < len(view):
        part = view[done : done + CHUNK]
        count = system.readv(descriptor, [part])
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was read; restore the file")
        if digest is not None and helper is not None and len(view) >= PARALLEL:
            hashed.append(helper.submit(digest.update, part[:count]))
        elif digest is not None:
            digest.update(part[:count])
        done += count
    for one in hashed:
        one.result()


class NewFile:
    """A file written once, as a context: hashed on the way, so nothing is read again; fsynced at the end."""

    def __init__(self, path: Path):
        self.descriptor = system.open(path, CREATE, 0o666)
        self.digest = hashlib.sha256()
        self.size = 0
        self.helper = ThreadPoolExecutor(1)  # starts its thread at the first large piece

    def __enter__(self) -> "NewFile":
        return self

    def write(self, data: memoryview | bytes, digest: "hashlib._Hash | None" = None) -> None:
        """Append bytes; `digest` receives them too."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK):
            part = view[start : start + CHUNK]
            if digest is None or len(part) < PARALLEL:
                self.digest.update(part)
                self._append(part, digest)
            else:  # the hash of the whole file and that of the piece, each on its own core
                whole = self.helper.submit(self.digest.update, part)
                self._append(part, digest)
                whole.result()
        self.size += len(view)

    def _append(self, part: memoryview, digest: "hashlib._Hash | None") -> None:
        if digest is not None:
            digest.update(part)
        while len(part) > 0:
            part = part[system.write(self.descriptor, part) :]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                system.fsync(self.descriptor)
        finally:
            self.helper.shutdown()
            os.close(self.descriptor)


def sync_folder(folder: Path) -> None:
    """Make a folder's list of names durable. File systems that do not know this operation are trusted."""
    descriptor = system.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and the missing ones above it, durably."""
    missing = []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            system.mkdir(path)
        except FileExistsError:
            if not path.is_dir():  # another process may have made it in between
                raise
        sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder of files; failures leave the rest for a later sweep."""
    with suppress(OSError):
        for name in sorted(system.listdir(folder)):
            with suppress(OSError):
                system.unlink(folder / name)
        system.rmdir(folder)


def leftover_name(folder: Path, role: str) -> Path:
    """A name beside `folder` for one in the making ('tmp') or set aside ('old'), with this process in it."""
    return folder.with_name(f".{folder.name}.{role}-{os.getpid()}-{secrets.token_hex(4)}")


def names(folder: Path) -> list[str]:
    """What a folder holds, sorted."""
    try:
        return sorted(system.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error


def leftovers(parent: Path, name: str | None = None) -> Iterator[tuple[Path, str, str, int]]:
    """(path, name it stands for, role, process) of the unfinished folders in `parent`, or of `name`'s."""
    for entry in names(parent):
        match = LEFTOVER.fullmatch(entry)
        if match is not None and name in (None, match["name"]):
            yield parent / entry, match["name"], match["role"], int(match["process"])


def locate(folder: Path) -> Path:
    """Where a folder's content is: its own name, or the name set aside if a save died between two renames."""
    if not os.path.lexists(folder) and folder.parent.is_dir():
        for path, _, role, _ in leftovers(folder.parent, folder.name):
            if role == "old":
                return path
    return folder


def sweep(parent: Path, name: str | None = None) -> None:
    """Clear what dead processes left: a set-aside folder whose place is empty returns, the rest goes."""
    for path, original, role, process in leftovers(parent, name):
        if _alive(process):
            continue
        place = parent / original
        if role == "old" and not os.path.lexists(place):
            system.rename(path, place)
        else:
            remove_folder(path)


def _alive(process: int) -> bool:
    if process == os.getpid():  # one writer a folder: what carries our own number is from a save that failed
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def install(staged: Path, folder: Path) -> None:
    """Put a finished folder in its place, durably; on any failure the earlier content returns to it."""
    aside = leftover_name(folder, "old")
    try:
        if folder.is_dir() and system.listdir(folder):
            system.rename(folder, aside)
        system.rename(staged, folder)
        sync_folder(folder.parent)
    except BaseException:
        if not os.path.lexists(staged):
            system.rename(folder, staged)
        if os.path.lexists(aside) and not os.path.lexists(folder):
            system.rename(aside, folder)
        raise
    if os.path.lexists(aside):
        remove_folder(aside)
