"""Read and write plain files: links are not followed, pipes are not waited on, bytes are hashed on the way.

The system calls that tests make fail or die go through `system`.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from heddle.errors import CheckpointError, HeddleError, MachineError, describe_file_type, describe_path

system = os  # tests replace it by a stand-in that counts the calls, or fails or dies at one of them

CHUNK_BYTES = 4 * 2**20  # bytes hashed and copied at a time; small enough to stay in the processor's cache
MIN_PARALLEL_BYTES = 2**18  # for fewer bytes, starting a second thread costs more than it saves
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follow no link, do not wait on a pipe
READ_FLAGS_FOLLOWING_LINKS = READ_FLAGS & ~os.O_NOFOLLOW  # the cache of the Hugging Face hub is made of links
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)


def read_error(path: Path, error: OSError) -> HeddleError:
    """Return the error for a file that could not be read: a CheckpointError if it does not exist or is no file."""
    what = describe_path(path)
    if error.errno == errno.ELOOP and path.is_symlink() and path.exists():
        return CheckpointError(f"{path}: is a symbolic link, which is not followed; put the file itself there")
    if error.errno in MISSING_ERRNOS and what not in ("does not exist", "is a file"):
        return CheckpointError(f"{path}: {what}; restore it or name another folder")
    if error.errno in MISSING_ERRNOS:
        return CheckpointError(f"{path}: is missing; restore it or name another folder")
    return MachineError(f"{path}: cannot be read ({error.strerror}); check the disk and the permissions")


def folder_error(path: Path, error: OSError) -> HeddleError:
    """Return the error for a folder that could not be written."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP):
        what = describe_path(path)
        reason = error.strerror if what in ("does not exist", "is a folder") else f"it {what}"
        return CheckpointError(f"{path}: cannot be made a folder ({reason}); choose another place")
    return write_error(path, error)


def write_error(path: Path, error: OSError, remedy: str | None = None) -> MachineError:
    """Return the error for a file that could not be written; `remedy` says what the user can do."""
    if remedy is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "free some space or choose another disk"
    remedy = remedy or "choose a folder on a disk that can be written"
    return MachineError(f"{path}: cannot be written ({error.strerror or error}); {remedy}")


@contextmanager
def open_regular_file(path: Path, flags: int = READ_FLAGS) -> Iterator[tuple[int, int]]:
    """Open a regular file for reading and yield (descriptor, size in bytes).

    Raises CheckpointError for a pipe, device or folder, and for a link unless `flags` follow links; MachineError for
    a failing disk. Never waits.
    """
    try:
        descriptor = system.open(path, flags)
    except OSError as error:
        raise read_error(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: {describe_file_type(status.st_mode)}; put the file itself there")
        yield descriptor, status.st_size
    except OSError as error:
        raise read_error(path, error) from error
    finally:
        os.close(descriptor)


def read_exactly(
    descriptor: int,
    view: memoryview,
    path: Path,
    digest: "hashlib._Hash | None" = None,
    hash_thread: ThreadPoolExecutor | None = None,
) -> None:
    """Fill `view` from the descriptor and add the bytes to `digest`. Raises CheckpointError if the file ends early.

    hash_thread: an executor with one thread, which hashes a chunk while the next one is read.
    """
    filled = 0
    pending_hashes: list[Future[None]] = []
    while filled < len(view):
        part = view[filled : filled + CHUNK_BYTES]
        count = system.readv(descriptor, [part])
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was read; restore the file")
        if digest is not None and hash_thread is not None and len(view) >= MIN_PARALLEL_BYTES:
            pending_hashes.append(hash_thread.submit(digest.update, part[:count]))
        elif digest is not None:
            digest.update(part[:count])
        filled += count
    for pending in pending_hashes:
        pending.result()


def hash_rest(descriptor: int, digest: "hashlib._Hash") -> None:
    """Add all bytes from where an open file stands to `digest`: a chunk is hashed while the next one is read."""
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
    pending: Future[None] | None = None
    with ThreadPoolExecutor(1) as hash_thread:  # starts its thread at the first large chunk
        while count := system.readv(descriptor, [buffers[0]]):
            if pending is not None:
                pending.result()
                pending = None
            if count < MIN_PARALLEL_BYTES:
                digest.update(buffers[0][:count])
            else:
                pending = hash_thread.submit(digest.update, buffers[0][:count])
            buffers.reverse()
        if pending is not None:
            pending.result()


class NewFile:
    """A new file, hashed while it is written and fsynced at the end. Use it as a context manager."""

    def __init__(self, path: Path):
        self.descriptor = system.open(path, CREATE_FLAGS, 0o666)
        self.digest = hashlib.sha256()
        self.size = 0
        self.hash_thread = ThreadPoolExecutor(1)  # starts its thread at the first large chunk

    def __enter__(self) -> "NewFile":
        return self

    def write(self, data: memoryview | bytes, digest: "hashlib._Hash | None" = None) -> None:
        """Append bytes, and add them to `digest` too."""
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            part = view[start : start + CHUNK_BYTES]
            if digest is None or len(part) < MIN_PARALLEL_BYTES:
                self.digest.update(part)
                self._append(part, digest)
            else:  # hash for the file on one core, for `digest` on another
                file_hash = self.hash_thread.submit(self.digest.update, part)
                self._append(part, digest)
                file_hash.result()
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
            self.hash_thread.shutdown()
            os.close(self.descriptor)
