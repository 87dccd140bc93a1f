"""Write files and folders whole or not at all.

New content gets a temporary name next to the final one, is flushed to the disk and renamed. What a killed process
leaves behind has a name that tells the process (`leftover_path`), and is removed later.
"""

import errno
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from heddle.errors import CheckpointError, describe_path
from heddle.storage import file_io

# A file that an unknown process wrote is a leftover once it is this old. A process on another machine, which shares
# the folder, may still write a younger one.
LEFTOVER_FILE_SECONDS = 3600
LEFTOVER_PATTERN = re.compile(
    r"\.(?P<name>.+)\.(?P<role>tmp|old)-(?P<process>\d{1,10})(-(?P<machine>[0-9a-f]{8}))?(-t(?P<start>\d{1,20}))?"
    r"-[0-9a-f]{8}",
    re.DOTALL,
)


class _Writer(NamedTuple):
    """The process that writes a temporary file or folder.

    machine: a hash that tells its machine; None: this one. start: when it began, as `_start_time`; None: unknown, as in
    names of earlier versions.
    """

    process: int
    machine: str | None
    start: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether the process is, or was, on this machine."""
        return self.machine in (None, _machine_key())

    def is_alive(self, path: Path) -> bool:
        """Whether it may still write `path`: on another machine, for an hour after the last change."""
        if self.is_here:
            is_reused = self.start is not None and _start_time(self.process) not in (None, self.start)
            return _is_alive(self.process) and not is_reused
        return time.time() - _last_change(path) <= LEFTOVER_FILE_SECONDS


def _machine_key() -> str:
    """Return 8 hexadecimal digits that tell this machine, or this container, from others that share a folder."""
    try:
        numbering = os.readlink("/proc/self/ns/pid")  # in another container the same number is another process
    except OSError:
        numbering = ""
    return hashlib.sha256(f"{socket.gethostname()}{numbering}".encode()).hexdigest()[:8]


def _start_time(process: int) -> int | None:
    """Return when a process began, in the clock ticks of Linux; None where that is unknown."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    return int(fields.rpartition(")")[2].split()[19])  # the name before it may hold anything


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of names to the disk. File systems without this operation are trusted."""
    descriptor = file_io.system.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file_io.system.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk."""
    missing = []
    while not folder.is_dir() and folder != folder.parent:
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            file_io.system.mkdir(path)
        except FileExistsError:
            if not path.is_dir():  # another process may have created it in the meantime
                raise
        sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder of files. What cannot be removed is left for `remove_leftovers`."""
    with suppress(OSError):
        for name in sorted(file_io.system.listdir(folder)):
            with suppress(OSError):
                file_io.system.unlink(folder / name)
        file_io.system.rmdir(folder)


def leftover_path(path: Path, role: str) -> Path:
    """Return a new hidden name next to `path`, with this process's id, machine and start.

    role: 'tmp' for a file or folder that is being written, 'old' for a folder that is being replaced.
    """
    start = _start_time(os.getpid())
    process = f"{os.getpid()}-{_machine_key()}" + ("" if start is None else f"-t{start}")
    return path.with_name(f".{path.name}.{role}-{process}-{secrets.token_hex(4)}")


def list_names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    try:
        return sorted(file_io.system.listdir(folder))
    except OSError as error:
        raise file_io.read_error(folder, error) from error


def leftovers(parent: Path, name: str | None = None) -> Iterator[tuple[Path, str, str, _Writer]]:
    """Yield (path, final name, role, writer) of unfinished files and folders in `parent`, or only of `name`."""
    for entry in list_names(parent):
        match = LEFTOVER_PATTERN.fullmatch(entry)
        if match is not None and name in (None, match["name"]):
            start = None if match["start"] is None else int(match["start"])
            yield parent / entry, match["name"], match["role"], _Writer(int(match["process"]), match["machine"], start)


def find_folder(folder: Path) -> Path:
    """Return where a folder's content is: under its own name, or under its 'old' name if a save died in between."""
    if not os.path.lexists(folder) and folder.parent.is_dir():
        for path, _, role, _ in leftovers(folder.parent, folder.name):
            if role == "old":
                return path
    return folder


def remove_leftovers(parent: Path, name: str | None = None) -> None:
    """Remove what dead processes left. An 'old' folder whose own name is free gets it back instead."""
    for path, original, role, writer in leftovers(parent, name):
        is_own = writer.is_here and writer.process == os.getpid()
        if not path.is_dir():
            _remove_leftover_file(path, writer)
        elif not is_own and writer.is_alive(path):  # a folder has one writer: ours are from a failed save
            continue
        elif role == "old" and not os.path.lexists(parent / original):
            file_io.system.rename(path, parent / original)
        else:
            remove_folder(path)


def _remove_leftover_file(path: Path, writer: _Writer) -> None:
    """Remove a file of a dead process: at once if it surely was of this machine, else after an hour."""
    with suppress(OSError):
        is_known = writer.is_here and writer.start is not None
        if not writer.is_alive(path) and (is_known or time.time() - path.lstat().st_mtime > LEFTOVER_FILE_SECONDS):
            file_io.system.unlink(path)


def _last_change(path: Path) -> float:
    """Return when a file, or a folder or one of its files, was last written (seconds since 1970; 0: it is gone)."""
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


@contextmanager
def replace_file(path: Path, remedy: str | None = None) -> Iterator[Path]:
    """Yield a temporary path next to `path`. Write the new file there; it then replaces `path`.

    After the block the file is fsynced and renamed, and the folder is fsynced: at every instant `path` is the whole
    old file or the whole new one. If the block raises, the temporary file is removed and `path` stays as it was.
    Missing folders are created, and files that killed processes left for `path` are removed. Raises MachineError,
    which ends with `remedy`, if the file cannot be written, CheckpointError if its folder cannot be created or if
    `path` is a folder, a pipe, a device or another thing that a file must not replace.
    """
    what = describe_path(path)
    if what not in ("is a file", "does not exist", "is a symbolic link to nothing", "lies below a file"):
        raise CheckpointError(f"{path}: {what}, not a file; choose another name")
    try:
        make_folder(path.parent)
    except OSError as error:
        raise file_io.folder_error(path.parent, error) from error
    try:
        remove_leftovers(path.parent, path.name)
        temporary = leftover_path(path, "tmp")
        try:
            yield temporary
            _sync_file(temporary)
            file_io.system.rename(temporary, path)
            sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                file_io.system.unlink(temporary)
            raise
    except OSError as error:
        raise file_io.write_error(path, error, remedy) from error


def _sync_file(path: Path) -> None:
    descriptor = file_io.system.open(path, file_io.READ_FLAGS)
    try:
        file_io.system.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: str | bytes, remedy: str | None = None) -> None:
    """Write a file, text as UTF-8, whole or not at all. Raises as `replace_file` does."""
    with replace_file(path, remedy) as temporary, file_io.NewFile(temporary) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def replace_folder(staged: Path, folder: Path) -> None:
    """Rename a finished folder to its final name, durably. On any failure the earlier folder gets its name back."""
    aside = leftover_path(folder, "old")
    try:
        if folder.is_dir() and file_io.system.listdir(folder):
            file_io.system.rename(folder, aside)
        file_io.system.rename(staged, folder)
        sync_folder(folder.parent)
    except BaseException:
        if not os.path.lexists(staged):
            file_io.system.rename(folder, staged)
        if os.path.lexists(aside) and not os.path.lexists(folder):
            file_io.system.rename(aside, folder)
        raise
    if os.path.lexists(aside):
        remove_folder(aside)
