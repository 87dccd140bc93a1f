"""One process per run: a lock on the file RUN/.lock, which the system frees when its process ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from heddle.errors import CheckpointError
from heddle.storage import atomic, file_io

LOCK_FILE = ".lock"


class RunLock:
    """`with RunLock(folder):` locks a folder for this process; a missing folder is created.

    Raises CheckpointError that names the process that holds the lock, MachineError if the folder cannot be written.
    The lock file is never removed: otherwise two processes could each lock a different file of that name.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        if self.descriptor is not None:
            raise CheckpointError(f"{self.folder}: is locked by this very object already; use a second RunLock")
        try:
            atomic.make_folder(self.folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = file_io.system.open(self.folder / LOCK_FILE, flags, 0o666)
            try:
                self._acquire(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise file_io.folder_error(self.folder, error) from error
        self.descriptor = descriptor
        return self

    def _acquire(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            process = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            owner = f"process {process}" if process.isdigit() else "another process"
            raise CheckpointError(
                f"{self.folder}: is in use by {owner}; wait until it has ended or choose another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        file_io.system.write(descriptor, f"{os.getpid()}\n".encode("ascii"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
