"""The files of a run besides its checkpoints: run.json (settings and environment) and log.jsonl (one line a step)."""

import contextlib
import json
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError
from heddle.storage import file_io
from heddle.storage.atomic import write_file

RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
IDENTITY_KEYS = ("design", "data", "settings", "init_checkpoint", "lora")
REMEDY = "free space on the disk or choose another folder"


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object that heddle wrote. Raises CheckpointError if the file is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); choose another folder") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds no JSON object; choose another folder")
    return data


def open_run(folder: Path, identity: dict[str, Any], environment: dict[str, Any]) -> bool:
    """Start a run in a folder, or continue the run that is there; True if it is continued.

    identity: the values of IDENTITY_KEYS, which must equal those of the run that is there. environment: command,
    versions and machine, written when the run starts. Raises CheckpointError that names the first difference, or if
    the folder holds something else.
    """
    path = folder / RUN_FILE
    if path.is_file():
        saved = read_json_file(path)
        difference = first_difference({key: saved.get(key) for key in IDENTITY_KEYS}, to_plain_json(identity))
        if difference:
            raise CheckpointError(f"{folder}: holds another run: {difference}; use the same, or another folder")
        return True
    names = [entry.name for entry in folder.iterdir() if not entry.name.startswith(".")]
    if names:
        raise CheckpointError(f"{folder}: holds something else ({sorted(names)[0]}); choose an empty or new folder")
    write_file(path, json.dumps(to_plain_json(environment) | to_plain_json(identity), indent=2) + "\n", REMEDY)
    return False


def to_plain_json(value: Any) -> Any:
    """Return the value as JSON reads it back: tuples become lists, keys become strings."""
    return json.loads(json.dumps(value))


def first_difference(before: Any, now: Any, path: str = "") -> str | None:
    """Describe the first field that differs: `settings.seed was 0, now it is 1`. None if nothing differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            difference = first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if difference:
                return difference
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, pair in enumerate(zip(before, now, strict=True)):
            difference = first_difference(*pair, f"{path}[{index}]")
            if difference:
                return difference
        return None
    return None if before == now else f"{path} was {json.dumps(before)}, now it is {json.dumps(now)}"


class RunLog:
    """The log file log.jsonl, one line a step. Opening it drops the lines after `step`: they will be written again."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG_FILE
        earlier = [line for line in read_log(folder) if line["step"] <= step]
        write_file(self.path, "".join(json.dumps(line) + "\n" for line in earlier), REMEDY)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append one line and flush it to the file. Raises MachineError."""
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise file_io.write_error(self.path, error, REMEDY) from error

    def sync(self) -> None:
        """Fsync all lines. Call it before a checkpoint records their steps as done. Raises MachineError."""
        try:
            file_io.system.fsync(self._file.fileno())
        except OSError as error:
            raise file_io.write_error(self.path, error, REMEDY) from error

    def close(self) -> None:
        """Close the file. Errors are ignored: `write` and `sync` have reported them."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without a last line that a crash cut short."""
    path = folder / LOG_FILE
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
