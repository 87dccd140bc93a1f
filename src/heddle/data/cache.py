"""The cache folder: tokenizers and token files for reuse by later runs, each verified when it is read."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError, ConfigError, MachineError, home_folder
from heddle.progress import print_warning
from heddle.storage.file_io import read_json_file, remove_leftovers, write_error, write_json_file

CACHE_REMEDY = "free space there or set HEDDLE_CACHE to another folder"


class DataCache:
    """Files named by the hash of their inputs, so that a file is never outdated."""

    def __init__(self, folder: Path | None) -> None:
        """Open or create the folder; None is $HEDDLE_CACHE, else heddle under $XDG_CACHE_HOME or ~/.cache.

        Raises MachineError, naming the folder, if it cannot be written.
        """
        self.folder = default_cache_folder() if folder is None else folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)  # a killed process may leave gigabytes behind
        except OSError as error:
            raise write_error(self.folder, error, CACHE_REMEDY) from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise MachineError(f"{self.folder}: cannot be written; set HEDDLE_CACHE to a folder that can")

    def path(self, suffix: str, *inputs: Any) -> Path:
        """Return the path of the file with this suffix and these inputs (plain values), whether it exists or not."""
        return self.folder / f"{json_sha256(inputs)[:32]}.{suffix}"

    def read_text(self, path: Path) -> str | None:
        """Return the text that `write_text` wrote, or None if there is no file.

        Also None, with a warning, for a file that was altered: it can be made again.
        """
        if not os.path.lexists(path):
            return None
        try:
            saved = read_json_file(path)
            text = saved.get("text") if saved.get("of") == path.name else None  # not a file of other inputs
        except CheckpointError:
            text = None
        if not isinstance(text, str):
            report_damage(path)
            return None
        return text

    def write_text(self, path: Path, text: str) -> None:
        """Write a text with its SHA-256 and the file's name, whole or not at all. Raises MachineError."""
        write_json_file(path, {"of": path.name, "text": text}, CACHE_REMEDY)


def report_damage(path: Path) -> None:
    """Warn that a file of the cache is made again. Cached files depend only on their inputs, so nothing is lost."""
    print_warning(f"{path}: was altered, or written by an earlier heddle; it is made again")


def default_cache_folder() -> Path:
    """Return $HEDDLE_CACHE, else $XDG_CACHE_HOME/heddle, else ~/.cache/heddle."""
    folder = os.environ.get("HEDDLE_CACHE")
    if folder:
        return Path(folder)
    xdg_cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg_cache_home) if xdg_cache_home else home_folder() / ".cache") / "heddle"


def use_own_compile_cache() -> None:
    """Let torch store compiled kernels in the cache folder, for this process and its children.

    torch's default is a folder of a known name in /tmp, which another user may create first and fill with code; this
    folder belongs to the user alone. $TORCHINDUCTOR_CACHE_DIR takes precedence; without a home, torch's default stays.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    with suppress(OSError, ConfigError):  # the folder cannot be written, or there is no home
        folder = default_cache_folder() / "compiled"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def json_sha256(values: Any) -> str:
    """Return the SHA-256 of plain values as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
