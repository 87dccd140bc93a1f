"""What a run leaves beside its checkpoints: run.json (what was asked, with what) and log.jsonl (what happened)."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError, MachineError

RUN = "run.json"
LOG = "log.jsonl"
SAME = ("design", "data", "settings", "base", "lora")


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is never seen half-written. Raises MachineError."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another folder"
        ) from error


def read_whole(path: Path) -> dict[str, Any]:
    """Read a small JSON file of ours. Raises CheckpointError where it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); choose another --out") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds no table of values; choose another --out")
    return data


def open_run(folder: Path, identity: dict[str, Any], circumstances: dict[str, Any]) -> bool:
    """Start a run folder or recognise it; True if it is being continued.

    identity: design, data, settings and where it starts, which must be those of the run; circumstances: command,
    versions and machine, written when the run starts. Raises CheckpointError naming the first difference, or for a
    folder that holds something else.
    """
    path = folder / RUN
    if path.is_file():
        before = read_whole(path)
        difference = first_difference({key: before.get(key) for key in SAME}, plain(identity))
        if difference:
            raise CheckpointError(f"{folder}: holds another run: {difference}; use the same, or another --out")
        return True
    others = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    if others:
        raise CheckpointError(f"{folder}: holds something else ({sorted(others)[0]}); choose an empty or new --out")
    write_whole(path, json.dumps(plain(circumstances) | plain(identity), indent=2) + "\n")
    return False


def plain(value: Any) -> Any:
    """Data as JSON gives it back."""
    return json.loads(json.dumps(value))


def first_difference(before: Any, now: Any, path: str = "") -> str | None:
    """The first field that differs, in words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            found = first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            found = first_difference(*pair, f"{path}[{index}]")
            if found:
                return found
        return None
    return None if before == now else f"{path} was {json.dumps(before)}, now it is {json.dumps(now)}"


class Log:
    """log.jsonl, one line a step; opening it drops the lines after `step`, which will be written again."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG
        kept = [line for line in read_log(folder) if line["step"] <= step]
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line; it is in the file when this returns. Raises MachineError."""
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise MachineError(f"{self.path}: cannot be written ({error.strerror}); free space on the disk") from error

    def keep(self) -> None:
        """Put all lines on the disk, before a checkpoint says that their steps are done."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise MachineError(f"{self.path}: cannot be written ({error.strerror}); free space on the disk") from error

    def close(self) -> None:
        """Close the file; what a full disk refused was reported when it was written."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line cut short by a crash is left out."""
    path = folder / LOG
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines
