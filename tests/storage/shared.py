"""Small checkpoints, and a stand-in for the system that counts, fails, dies and forgets what was not synced."""

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heddle.storage import file_io
from heddle.storage.folder import read_folder, tensors_sha256, write_folder
from heddle.storage.run_log import read_log
from tools.kill_test import MEASURED as MEASURED

COUNTED = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir", "listdir")

State = tuple[str, tuple[tuple[str, str], ...]]


def content(seed: int) -> dict[str, Any]:
    """The arguments of write_folder for a small checkpoint; another seed, other bytes everywhere."""
    generator = torch.Generator().manual_seed(seed)
    model: dict[str, Tensor] = {
        "embed": torch.randn(6, 4, generator=generator),
        "layers.0.mixer.q": torch.randn(4, 4, generator=generator).bfloat16(),
        "layers.0.feedforward.up": torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "empty": torch.zeros(0, 5),
    }
    training = {"step": torch.tensor(seed), "moments": torch.randn(9, generator=generator)}
    return {
        "tensors": {"model.safetensors": model, "training.safetensors": training},
        "documents": {"config.json": f'{{"seed": {seed}}}'},
        "kind": "training",
    }


def state(folder: Path) -> State | None:
    """All of a folder, verified; None where a loader finds nothing at all."""
    if not file_io.find_folder(folder).exists():
        return None
    documents = read_folder(folder, "training").documents
    return tensors_sha256(folder), tuple(sorted(documents.items()))


def written(folder: Path, seed: int) -> State:
    """Write a checkpoint and give its state."""
    write_folder(folder, **content(seed))
    result = state(folder)
    assert result is not None
    return result


def untimed_log(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log without their times."""
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in read_log(run)]


class Died(BaseException):
    """The process ended here: nothing after this happens."""


class System:
    """Stands in for `os`: counts calls, and at call number `at` (from 1) does what `how` says.

    `how`: 'before' or 'after' the call the process dies; 'half' dies with half of a write done; an error or an
    interrupt is raised in place of the call, and also of later ones (but removals) if `persistent`.
    fsync is only noted: names and bytes not yet synced are known to `lose`.
    """

    def __init__(self, at: int = 0, how: "str | BaseException" = "before", persistent: bool = False):
        self.at, self.how, self.persistent = at, how, persistent
        self.trace: list[str] = []
        self.dead = False
        self.unsynced_files: set[int] = set()
        self.unsynced_names: list[tuple[int, Path, Path | None]] = []  # folder, name, new name if renamed

    def __getattr__(self, name: str) -> Any:
        function = getattr(os, name)
        if name not in COUNTED:
            return function

        def call(*arguments: Any) -> Any:
            if self.dead:
                raise Died
            self.trace.append(name)
            now = len(self.trace) == self.at
            if isinstance(self.how, BaseException):
                later = self.persistent and len(self.trace) > self.at and name not in ("unlink", "rmdir", "listdir")
                if now or later:
                    raise self.how
            elif now:
                self.dead = True
                if self.how == "after":
                    self._run(name, function, arguments)
                elif self.how == "half" and name == "write":
                    self._run(name, function, (arguments[0], arguments[1][: len(arguments[1]) // 2]))
                raise Died
            return self._run(name, function, arguments)

        return call

    def _run(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        if name == "fsync":
            node = os.fstat(arguments[0])
            if stat.S_ISDIR(node.st_mode):
                self.unsynced_names = [entry for entry in self.unsynced_names if entry[0] != node.st_ino]
            else:
                self.unsynced_files.discard(node.st_ino)
            return None
        result = function(*arguments)
        if name == "write":
            self.unsynced_files.add(os.fstat(arguments[0]).st_ino)
        elif name == "mkdir" or (name == "open" and arguments[1] & os.O_CREAT):
            path = Path(arguments[0])
            self.unsynced_names.append((path.parent.stat().st_ino, path, None))
        elif name == "rename":
            path, new = Path(arguments[0]), Path(arguments[1])
            self.unsynced_names.append((path.parent.stat().st_ino, path, new))
        return result

    def lose(self, root: Path, names: int, files: bool) -> None:
        """Take back the last `names` changes of names that were not synced, and cut files that were not."""
        for path in root.rglob("*") if files else ():
            if path.is_file() and path.stat().st_ino in self.unsynced_files:
                os.truncate(path, path.stat().st_size // 2)
        for node, path, new in reversed(self.unsynced_names[len(self.unsynced_names) - names :]):
            folders = {at.stat().st_ino: at for at in (root, *root.rglob("*")) if at.is_dir()}
            if node not in folders:
                continue
            before = folders[node] / path.name  # the folder itself may have another name by now
            if new is not None and (folders[node] / new.name).exists() and not before.exists():
                os.rename(folders[node] / new.name, before)
            elif new is None and before.is_file():
                before.unlink()


@contextmanager
def standing_in(system: System) -> Iterator[System]:
    """Let `heddle.storage` use a stand-in for the system."""
    file_io.system = system  # type: ignore[assignment]
    try:
        yield system
    finally:
        file_io.system = os


Save = Callable[[Path], None]


def calls(path: Path, save: Save) -> list[str]:
    """The system calls of a save."""
    with standing_in(System()) as system:
        save(path)
    return system.trace


def die(path: Path, save: Save, at: int, how: str) -> System:
    """Save until the process dies at a call."""
    with standing_in(System(at, how)) as system:
        try:
            save(path)
        except Died:
            return system
    raise AssertionError(f"the save did not reach call {at}")


def crashes(path: Path, save: Save, reset: Callable[[], None], root: Path) -> Iterator[str]:
    """Every way to die in a save and to lose what was not synced below `root`: in words, after it happened.

    The last calls come first: faults show at the renames.
    """
    reset()
    for at, name in reversed(list(enumerate(calls(path, save), start=1))):
        for how in ("before", "half", "after") if name == "write" else ("before", "after"):
            reset()
            system = die(path, save, at, how)
            pending, unsynced = len(system.unsynced_names), (False, True) if system.unsynced_files else (False,)
            for names, files in itertools.product(range(pending + 1), unsynced):
                reset()
                die(path, save, at, how).lose(root, names, files)
                yield f"{how} call {at} ({name}), {names} names and {files} data lost"


class FullDisk(System):
    """Stands in for `os` on a disk that takes `room` more bytes, and then none. No removal makes room."""

    def __init__(self, room: int):
        super().__init__()
        self.room = room

    def write(self, descriptor: int, data: memoryview | bytes) -> int:
        """Write what fits, as a disk does. Raises OSError when nothing does."""
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = os.write(descriptor, data[: self.room])
        self.room -= count
        return count
