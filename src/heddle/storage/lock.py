"""One process a run: a lock on RUN/.lock that the system frees when its holder ends, however it ends."""

import fcntl
import os
from pathlib import Path
from types import TracebackType

from heddle.errors import CheckpointError
from heddle.storage import atomic as disk

FILE = ".lock"


class RunLock:
    """`with RunLock(folder):` holds a folder, which is created if missing, for this process alone.

    A second holder gets a CheckpointError naming the first; a place that cannot be written is a
    MachineError. The file stays when the lock is freed: were it removed, two processes could each hold a
    lock on a file of that name.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.descriptor: int | None = None

    def __enter__(self) -> "RunLock":
        if self.descriptor is not None:
            raise CheckpointError(f"{self.folder}: is locked by this very object already; use a second RunLock")
        try:
            disk.make_folder(self.folder)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = disk.system.open(self.folder / FILE, flags, 0o666)
            try:
                self._take(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise disk.unwritable(self.folder, error) from error
        self.descriptor = descriptor
        return self

    def _take(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise CheckpointError(
                f"{self.folder}: is in use by {who}; wait until it has ended or choose another folder"
            ) from error
        os.ftruncate(descriptor, 0)
        disk.system.write(descriptor, f"{os.getpid()}\n".encode("ascii"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
