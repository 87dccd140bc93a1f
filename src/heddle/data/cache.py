"""The folder where tokenizers and token files are kept between runs, never half written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from heddle.errors import MachineError

_TEMPORARY = ".temporary"
_STALE_SECONDS = 24 * 3600


class Cache:
    """Files named by the hash of what they were made from, so that none is ever out of date."""

    def __init__(self, folder: Path | None) -> None:
        """Open or make the folder; None is $HEDDLE_CACHE, else heddle under $XDG_CACHE_HOME or ~/.cache.

        Raises MachineError, naming the folder, where it cannot be written.
        """
        self.folder = default_folder() if folder is None else folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise MachineError(f"the cache folder {self.folder} cannot be written: set HEDDLE_CACHE to one that can.")

    def path(self, kind: str, *made_from: Any) -> Path:
        """Where the file of this kind, made from these plain values, is or would be."""
        return self.folder / f"{digest(made_from)[:32]}.{kind}"

    def _remove_stale(self) -> None:
        # A killed process leaves its temporary file behind, which may be gigabytes.
        for left in self.folder.glob(f"*{_TEMPORARY}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    left.unlink()


def default_folder() -> Path:
    """$HEDDLE_CACHE, else $XDG_CACHE_HOME/heddle, else ~/.cache/heddle."""
    chosen = os.environ.get("HEDDLE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "heddle"


def digest(values: Any) -> str:
    """SHA-256, in hexadecimal, of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, named `path` only once it is whole and on the disk. Raises MachineError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}{_TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all. Raises MachineError."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def _unwritable(path: Path, error: OSError) -> MachineError:
    reason = error.strerror or str(error)
    return MachineError(f"{path} cannot be written ({reason}): free space there or set HEDDLE_CACHE to another folder.")
