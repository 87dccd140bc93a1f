"""Read and write plain files: links are not followed, pipes are not waited on, bytes are hashed on the way.

System calls go through `system`, so that tests can make them fail.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from heddle.errors import (
    CheckpointError,
    HeddleError,
    MachineError,
    describe_file_type,
    describe_path,
    parse_error_reason,
)

system = os  # tests replace it by a stand-in that counts calls, or fails or dies at one of them

CHUNK_BYTES = 4 * 2**20  # bytes hashed and copied at a time; small enough to stay in the CPU cache
MIN_PARALLEL_BYTES = 2**18  # for fewer bytes, starting a second thread costs more than it saves
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # do not follow links or wait on a pipe
READ_FLAGS_FOLLOWING_LINKS = READ_FLAGS & ~os.O_NOFOLLOW  # the Hugging Face hub's cache consists of links
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MISSING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)


def read_error(path: Path, error: OSError) -> HeddleError:
    """Return the error for a file that could not be read: a CheckpointError if it does not exist or is not a file."""
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
        return CheckpointError(f"{path}: cannot be created as a folder ({reason}); choose another place")
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


def read_exactly(descriptor: int, view: memoryview, path: Path) -> None:
    """Fill `view` from the descriptor. Raises CheckpointError if the file ends early."""
    filled = 0
    while filled < len(view):
        count = system.readv(descriptor, [view[filled : filled + CHUNK_BYTES]])
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was read; restore the file")
        filled += count


def hash_rest(descriptor: int, digest: "hashlib._Hash") -> None:
    """Add all remaining bytes of an open file to `digest`; a chunk is hashed while the next one is read."""
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
        """Append bytes, and also add them to `digest`."""
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


# Write files and folders whole or not at all.
#
# New content gets a temporary name next to the final one, is flushed to the disk and renamed. Leftovers of a killed
# process have a name that identifies the process (`leftover_path`), and are removed later.


# A file by an unknown process is a leftover once it is this old. A process on another machine that shares the folder
# may still write a younger one.
LEFTOVER_FILE_SECONDS = 3600
LEFTOVER_PATTERN = re.compile(
    r"\.(?P<name>.+)\.(?P<role>tmp|old)-(?P<process>\d{1,10})(-(?P<machine>[0-9a-f]{8}))?(-t(?P<start>\d{1,20}))?"
    r"-[0-9a-f]{8}",
    re.DOTALL,
)


class _Writer(NamedTuple):
    """The process that writes a temporary file or folder.

    machine: a hash of its machine; None: this one. start: its `_start_time`; None: unknown, as in names of earlier
    versions.
    """

    process: int
    machine: str | None
    start: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether the process is, or was, on this machine."""
        return self.machine in (None, _machine_key())

    def is_alive(self, path: Path) -> bool:
        """Whether it may still write `path`; on another machine this is assumed for an hour after the last change."""
        if self.is_here:
            is_reused = self.start is not None and _start_time(self.process) not in (None, self.start)
            return _is_alive(self.process) and not is_reused
        return time.time() - _last_change(path) <= LEFTOVER_FILE_SECONDS


def _machine_key() -> str:
    """Return 8 hexadecimal digits that identify this machine, or container, among those that share a folder."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")  # another container may use the same process id
    except OSError:
        numbering = ""
    return hashlib.sha256(f"{socket.gethostname()}{numbering}".encode()).hexdigest()[:8]


def _start_time(process: int) -> int | None:
    """Return when a process started, in Linux clock ticks; None if unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    return int(fields.rpartition(")")[2].split()[19])  # the process name before it may contain anything


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that its names are on the disk. File systems without this operation are trusted."""
    descriptor = system.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and fsync them."""
    missing = []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            system.mkdir(path)
        except FileExistsError:
            if not path.is_dir():  # another process may have created it in the meantime
                raise
        sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder of files. Anything that cannot be removed is left for `remove_leftovers`."""
    with suppress(OSError):
        for name in sorted(system.listdir(folder)):
            with suppress(OSError):
                system.unlink(folder / name)
        system.rmdir(folder)


def leftover_path(path: Path, role: str) -> Path:
    """Return a new hidden name next to `path`, with this process's id, machine and start time.

    role: 'tmp' for a file or folder that is being written, 'old' for a folder that is being replaced.
    """
    start = _start_time(os.getpid())
    process = f"{os.getpid()}-{_machine_key()}" + ("" if start is None else f"-t{start}")
    return path.with_name(f".{path.name}.{role}-{process}-{secrets.token_hex(4)}")


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    try:
        return sorted(system.listdir(folder))
    except OSError as error:
        raise read_error(folder, error) from error


def leftovers(parent: Path, name: str | None = None) -> Iterator[tuple[Path, str, str, _Writer]]:
    """Yield (path, final name, role, writer) of unfinished files and folders in `parent`, or only of `name`."""
    for entry in list_names(parent):
        match = LEFTOVER_PATTERN.fullmatch(entry)
        if match is not None and name in (None, match["name"]):
            start = None if match["start"] is None else int(match["start"])
            yield parent / entry, match["name"], match["role"], _Writer(int(match["process"]), match["machine"], start)


def find_folder(folder: Path) -> Path:
    """Return where a folder's content is: under its own name, or under its 'old' name after an interrupted save."""
    if not os.path.lexists(folder) and folder.parent.is_dir():
        for path, _, role, _ in leftovers(folder.parent, folder.name):
            if role == "old":
                return path
    return folder


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Remove leftovers of dead processes. An 'old' folder is renamed back if its own name is free."""
    for path, original, role, writer in leftovers(parent, name):
        is_own = writer.is_here and writer.process == os.getpid()
        if not path.is_dir():
            _remove_leftover_file(path, writer)
        elif not is_own and writer.is_alive(path):  # a folder has one writer: ours are from a failed save
            continue
        elif role == "old" and not os.path.lexists(parent / original):
            system.rename(path, parent / original)
        else:
            remove_folder(path)


def _remove_leftover_file(path: Path, writer: _Writer) -> None:
    """Remove a file of a dead process: at once if the process was certainly on this machine, else after an hour."""
    with suppress(OSError):
        is_known = writer.is_here and writer.start is not None
        if not writer.is_alive(path) and (is_known or time.time() - path.lstat().st_mtime > LEFTOVER_FILE_SECONDS):
            system.unlink(path)


def _last_change(path: Path) -> float:
    """Return when a file, or a folder or one of its files, was last written, in seconds since 1970; 0 if it is gone."""
    times = [0.0]
    with suppress(OSError):
        files = [path / name for name in os.listdir(path)] if path.is_dir() else []
        times += [each.lstat().st_mtime for each in (path, *files)]
    return max(times)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def refuse_no_file(path: Path) -> None:
    """Raise CheckpointError for a folder, a pipe, a device or anything else that a file must not replace."""
    what = describe_path(path)
    if what not in ("is a file", "does not exist", "is a symbolic link to nothing", "lies below a file"):
        raise CheckpointError(f"{path}: {what}, not a file; choose another name")


def refuse_unwritable(folder: Path) -> None:
    """Raise, before long work, for a folder that lies below a file, or where this process may not write."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise folder_error(folder, OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise write_error(folder, OSError(errno.EACCES, os.strerror(errno.EACCES)))


def refuse_no_page(path: Path) -> None:
    """As `refuse_no_file`, and for a file with content that is no page of HTML or XML: it may be a run's, or a text."""
    refuse_no_file(path)
    refuse_unwritable(path.parent)
    with suppress(OSError), path.open("rb") as file:
        if file.read(1) not in (b"", b"<"):
            raise CheckpointError(f"{path}: is a file, not a page; choose another name, or remove it")


@contextmanager
def replace_file(path: Path, remedy: str | None = None) -> Iterator[Path]:
    """Yield a temporary path next to `path`. Write the new file there; it then replaces `path`.

    After the block the file is fsynced and renamed, and the folder is fsynced: at every instant `path` is the whole
    old file or the whole new one. If the block raises, the temporary file is removed and `path` is unchanged. Missing
    folders are created, and leftovers of killed processes for `path` are removed. Raises MachineError, which ends with
    `remedy`, if the file cannot be written, CheckpointError if its folder cannot be created or if `path` is a folder, a
    pipe, a device or anything else that a file must not replace.
    """
    refuse_no_file(path)
    try:
        make_folder(path.parent)
    except OSError as error:
        raise folder_error(path.parent, error) from error
    try:
        remove_leftovers(path.parent, path.name)
        temporary = leftover_path(path, "tmp")
        try:
            yield temporary
            _sync_file(temporary)
            system.rename(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                system.unlink(temporary)
            raise
    except OSError as error:
        raise write_error(path, error, remedy) from error


def _sync_file(path: Path) -> None:
    descriptor = system.open(path, READ_FLAGS)
    try:
        system.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes, remedy: str | None = None) -> None:
    """Write a file, text as UTF-8, whole or not at all. Raises as `replace_file` does."""
    with replace_file(path, remedy) as temporary, NewFile(temporary) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def refuse_existing(path: Path, what: str) -> None:
    """Raise CheckpointError if there is anything at `path`, where a command is to write `what`."""
    if os.path.lexists(path):
        found, remedy = describe_path(path), f"choose another name for {what}"
        if found not in ("is a file", "is a folder"):
            raise CheckpointError(f"{path}: {found}; {remedy}")
        kind = " and is a file" if found == "is a file" else ""
        raise CheckpointError(f"{path}: exists already{kind}; {remedy}, or remove it")
    if (found := describe_path(path)) == "lies below a file":
        raise CheckpointError(f"{path}: {found}, so it cannot be written; choose another place for {what}")


def replace_folder(staged: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, durably. On any failure the earlier folder is restored."""
    aside = leftover_path(folder, "old")
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


# JSON files that heddle reads again: each holds the SHA-256 of its own content and is verified on every read.


HASH_KEY = "sha256"
MAX_JSON_BYTES = 256 * 2**20


def write_json_file(path: Path, content: Mapping[str, Any], remedy: str | None = None) -> None:
    """Write plain values as a JSON object with the SHA-256 of its content, whole or not at all. Raises MachineError."""
    plain = json.loads(json.dumps(content))  # as it will be read: lists for tuples, strings for keys
    write_file(path, _text(plain | {HASH_KEY: content_sha256(plain)}), remedy)


def read_json_file(path: Path) -> dict[str, Any]:
    """Read what `write_json_file` wrote, without its SHA-256.

    Raises CheckpointError if the file is missing or was altered.
    """
    with open_regular_file(path) as (descriptor, size):
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_JSON_BYTES} bytes; choose another folder")
        raw = bytearray(size)
        read_exactly(descriptor, memoryview(raw), path)
    try:
        content: dict[str, Any] = json.loads(raw.decode("utf-8"))
        saved_sha256 = content.get(HASH_KEY) if isinstance(content, dict) else None
        if isinstance(content, dict) and saved_sha256 is None:
            raise CheckpointError(
                f"{path}: has no {HASH_KEY}, so heddle did not write it or wrote it in format 1;"
                " choose another folder, or use the release that wrote it"
            )
        if saved_sha256 is None or _text(content).encode("ascii") != raw:
            raise ValueError("its format differs from what heddle writes")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: was altered ({parse_error_reason(error)}); restore the file or choose another folder"
        ) from error
    del content[HASH_KEY]
    if content_sha256(content) != saved_sha256:
        raise CheckpointError(
            f"{path}: was altered (its SHA-256 differs from its content); restore the file or choose another folder"
        )
    return content


def content_sha256(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON object, written as ASCII without spaces and with sorted keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


GGUF_MAGIC = b"GGUF"  # the first bytes of llama.cpp's files


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF: by its first bytes, as caches name files by their hash, or by its suffix."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return path.suffix == ".gguf" or file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    return path.suffix == ".gguf"
