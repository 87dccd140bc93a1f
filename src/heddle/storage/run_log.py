"""The files of a run besides its checkpoints.

run.json has settings and environment, log.jsonl one line per step, final.json the final evaluation.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from heddle.errors import CheckpointError, ConfigError, describe_path
from heddle.model.load_config import MAX_YAML_BYTES, parse_yaml
from heddle.progress import print_status, print_warning
from heddle.storage import file_io
from heddle.storage.file_io import read_json_file, refuse_unwritable, remove_leftovers, write_file, write_json_file
from heddle.storage.manifest import EMPTY_CHAIN, LogPosition, parse_json_object

CHECKPOINTS_FOLDER = "checkpoints"
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
FINAL_FILE = "final.json"  # {"step": …, "final_bits_per_byte": …}, or final_accuracy
BRANCH_SETTINGS = ("steps", "schedule")  # a branch may differ from its trunk in these
IDENTITY_KEYS = ("design", "data", "settings", "init_checkpoint", "lora", "distillation")
# Fields of a run's environment that determine the last bits of its numbers: software versions and the machine.
ENVIRONMENT_FIELDS = {
    "versions": ("heddle", "torch"),
    "runtime": ("device", "threads", "matmul", "deterministic", "cpu", "gpu"),
}
REMEDY = "free space on the disk or choose another folder"
LOG_REMEDY = "restore the file, or start another run from the checkpoint in another folder"
CHAIN_DIGITS = len(EMPTY_CHAIN)
LINE_PATTERN = re.compile(rb'(?P<content>\{[^\n]*), "chain": "(?P<chain>[0-9a-f]{16})"\}\n')
APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_run(folder: Path, identity: dict[str, Any], environment: dict[str, Any]) -> bool:
    """Start a run in a folder, or continue its run; return True if it is continued.

    identity: the values of IDENTITY_KEYS, which must equal those of a run to continue. environment: command, versions
    and machine, written when the run starts; if they differ for a continued run, a warning names them. Leftovers of
    dead processes are removed. The caller holds the run's lock. Raises CheckpointError, naming the first difference, or
    if the folder holds something else.
    """
    path = folder / RUN_FILE
    for parent in (folder, folder / CHECKPOINTS_FOLDER):
        if parent.is_dir():
            remove_leftovers(parent)
    if path.is_file():
        saved = read_json_file(path)
        difference = first_difference({key: saved.get(key) for key in IDENTITY_KEYS}, to_plain_json(identity))
        if difference:
            raise CheckpointError(f"{folder}: holds another run: {difference}; use the same, or another folder")
        _print_other_environment(folder, saved, to_plain_json(environment))
        return True
    refuse_other_content(folder)
    write_json_file(path, to_plain_json(environment) | to_plain_json(identity), REMEDY)
    return False


def refuse_other_content(folder: Path, own: str = "") -> None:
    """Raise, naming it, for a folder that cannot be written, or with anything not hidden and no file named `own`."""
    if own and (folder / own).is_file():
        return
    refuse_unwritable(folder)
    entries = folder.iterdir() if folder.exists() else ()
    names = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    if names:
        raise CheckpointError(f"{folder}: holds something else ({names[0]}); choose an empty or new folder")


def run_hash(folder: Path) -> str | None:
    """Return the SHA-256 of a run's identity, which its checkpoints store; None without a run.json.

    All branches of one trunk have the same hash.
    """
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    saved = read_json_file(path)
    if not isinstance(saved.get("settings"), dict):
        raise CheckpointError(f"{path}: has no settings of a run; restore the file or choose another folder")
    return hashlib.sha256(json.dumps(trunk_identity(saved), sort_keys=True).encode()).hexdigest()


def trunk_identity(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's identity, or run.json, that its branches share."""
    settings = {name: value for name, value in saved["settings"].items() if name not in BRANCH_SETTINGS}
    return {key: saved.get(key) for key in IDENTITY_KEYS} | {"settings": settings}


def _print_other_environment(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn if the software or the machine differs from when the run began, and say what stays equal."""
    differences = [
        f"{name} was {json.dumps(before[group][name])}, now it is {json.dumps(now[group][name])}"
        for group, names in ENVIRONMENT_FIELDS.items()
        for name in names
        if name in (before.get(group) or {}) and name in (now.get(group) or {})
        if before[group][name] != now[group][name]
    ]
    if differences:
        print_warning(
            f"{folder}: continues in another environment: {'; '.join(differences)}; data, their order, the schedule"
            " and saved files stay equal, but from here on numbers may differ in their last bits"
        )


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
    """The log file log.jsonl: one JSON object per line. Its last field, `chain`, depends on all lines up to it.

    chain is the first 16 hexadecimal digits of the SHA-256 of the previous chain (for the first line: 16 zeros) and the
    line's text up to `, "chain": `. position: lines and chain so far. `resume` opens the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_FILE
        self.position = LogPosition()
        self._descriptor: int | None = None

    def resume(self, position: LogPosition) -> None:
        """Open the log for writing after the lines that a checkpoint counted.

        Raises CheckpointError if one of these lines is missing or was altered; the file is then unchanged. Later lines
        are dropped, with a notice: their steps are repeated.
        """
        lines = _read_lines(self.path)
        counted = lines[: position.lines]
        _verify_lines(self.path, counted, position)
        if len(lines) > len(counted):
            whole = [line for line in lines[len(counted) :] if line.endswith(b"\n")]
            altered = _follow_chain(whole, position.head)[1]
            damage = "" if altered is None else f", and line {len(counted) + altered} of them was altered"
            print_status(
                f"{self.path}: lines {len(counted) + 1} to {len(lines)} are of steps after the loaded checkpoint"
                f"{damage}; these steps are repeated"
            )
        if len(lines) > len(counted) or not self.path.is_file():
            write_file(self.path, b"".join(counted), REMEDY)
        try:
            self._descriptor = file_io.system.open(self.path, APPEND_FLAGS)
        except OSError as error:
            raise file_io.write_error(self.path, error, REMEDY) from error
        self.position = position

    def resume_at_end(self) -> None:
        """Open the log for writing after its last whole line. Raises CheckpointError for an altered one."""
        lines = _read_lines(self.path)
        whole = _whole_lines(self.path, lines)
        _verify_lines(self.path, whole)
        if len(whole) < len(lines):  # a line that a killed process did not finish
            write_file(self.path, b"".join(whole), REMEDY)
        self.resume(LogPosition(len(whole), _follow_chain(whole, EMPTY_CHAIN)[0]))

    def write(self, line: dict[str, Any]) -> None:
        """Append one line. Raises MachineError."""
        content = json.dumps(line).encode("ascii")[:-1]
        chain = _next_chain(self.position.head, content)
        data = memoryview(content + b', "chain": "' + chain.encode("ascii") + b'"}\n')
        try:
            while data:
                data = data[file_io.system.write(self._open_descriptor, data) :]
        except OSError as error:
            raise file_io.write_error(self.path, error, REMEDY) from error
        self.position = LogPosition(self.position.lines + 1, chain)

    def sync(self) -> None:
        """Fsync all lines. Call it before a checkpoint records their steps as done. Raises MachineError."""
        try:
            file_io.system.fsync(self._open_descriptor)
        except OSError as error:
            raise file_io.write_error(self.path, error, REMEDY) from error

    def close(self) -> None:
        """Close the file. Errors are ignored: `write` and `sync` have reported them."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    @property
    def _open_descriptor(self) -> int:
        assert self._descriptor is not None, "call resume first"
        return self._descriptor


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without their `chain`, and without an incomplete last line after a crash.

    Raises CheckpointError, naming the first altered line.
    """
    path = folder / LOG_FILE
    raw_lines = _whole_lines(path, _read_lines(path))
    _verify_lines(path, raw_lines)
    return _parse_lines(path, raw_lines)


def _parse_lines(path: Path, raw_lines: Sequence[bytes], before: int = 0) -> list[dict[str, Any]]:
    """Return the lines as plain data, without their `chain`. before: how many lines the file has before them."""
    lines = []
    for number, text in enumerate(raw_lines, start=before + 1):
        try:
            line = parse_json_object(text)
        except ValueError as error:
            raise CheckpointError(f"{path}: line {number} is not valid ({error}); {LOG_REMEDY}") from error
        del line["chain"]
        lines.append(line)
    return lines


class LogReader:
    """Follows the log of a run that may be training: `read` adds new lines, and verifies only those.

    lines: the whole log so far, without `chain`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_FILE
        self.lines: list[dict[str, Any]] = []
        self._restart()

    def _restart(self) -> None:
        self.lines.clear()
        self._head, self._offset, self._inode = EMPTY_CHAIN, 0, -1

    def read(self) -> bool:
        """Add the new lines to `lines`; return whether anything changed. A truncated log is read from its beginning.

        An incomplete last line is left for later. Raises CheckpointError if a line was altered.
        """
        if not os.path.lexists(self.path):
            changed = bool(self.lines)
            self._restart()
            return changed
        with file_io.open_regular_file(self.path) as (descriptor, size):
            inode = os.fstat(descriptor).st_ino
            is_other = inode != self._inode or size < self._offset
            if is_other:
                self._restart()
                self._inode = inode
            os.lseek(descriptor, self._offset, os.SEEK_SET)
            raw = bytearray(size - self._offset)
            file_io.read_exactly(descriptor, memoryview(raw), self.path)
        new = _whole_lines(self.path, io.BytesIO(raw).readlines(), len(self.lines))
        head, altered = _follow_chain(new, self._head)
        if altered is not None:
            raise _altered(self.path, len(self.lines) + altered)
        self.lines += _parse_lines(self.path, new, len(self.lines))
        self._head, self._offset = head, self._offset + sum(map(len, new))
        return is_other or bool(new)


def verify_log(folder: Path, position: LogPosition | None = None) -> None:
    """Verify every line of a run's log, except an incomplete last one, and the lines that a checkpoint counted.

    Raises CheckpointError, naming the first altered line, or if lines are missing.
    """
    path = folder / LOG_FILE
    lines = _whole_lines(path, _read_lines(path))
    _verify_lines(path, lines)
    if position is not None:
        _verify_lines(path, lines[: position.lines], position)


def copy_log(source: Path, folder: Path, position: LogPosition) -> None:
    """Copy the lines of a run's log that one of its checkpoints counted into another run's folder.

    Raises CheckpointError if one was altered, and MachineError.
    """
    lines = _read_lines(source / LOG_FILE)[: position.lines]
    _verify_lines(source / LOG_FILE, lines, position)
    write_file(folder / LOG_FILE, b"".join(lines), REMEDY)


def _read_lines(path: Path) -> list[bytes]:
    """Return the lines of a log with their line ends, which the last may lack; no lines if there is no file."""
    if not os.path.lexists(path):
        return []
    with file_io.open_regular_file(path) as (descriptor, size):
        raw = bytearray(size)
        file_io.read_exactly(descriptor, memoryview(raw), path)
    return io.BytesIO(raw).readlines()


def _whole_lines(path: Path, lines: list[bytes], before: int = 0) -> list[bytes]:
    """Return the lines without an incomplete last one. before: how many lines the file has before them.

    Raises CheckpointError if the last whole line is followed by something else than the start of a line, such as zeros.
    """
    if not lines or lines[-1].endswith(b"\n"):
        return lines
    if not lines[-1].startswith(b"{") or b"\0" in lines[-1]:
        raise CheckpointError(f"{path}: line {before + len(lines)} is not the start of a log line; {LOG_REMEDY}")
    return lines[:-1]


def _verify_lines(path: Path, lines: Sequence[bytes], position: LogPosition | None = None) -> None:
    """Follow the chain through all lines. position: how many lines there must be, and the chain of the last."""
    head, altered = _follow_chain(lines, EMPTY_CHAIN)
    if altered is not None:
        raise _altered(path, altered)
    if position is not None and len(lines) < position.lines:
        raise CheckpointError(
            f"{path}: has {len(lines)} lines, but {position.lines} when the checkpoint was saved; {LOG_REMEDY}"
        )
    if position is not None and head != position.head:
        raise CheckpointError(
            f"{path}: its {position.lines} lines do not match the checkpoint (another chain); {LOG_REMEDY}"
        )


def _altered(path: Path, number: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: line {number} was altered (its chain does not follow from the lines before it); {LOG_REMEDY}"
    )


def _follow_chain(lines: Sequence[bytes], head: str) -> tuple[str, int | None]:
    """Return the chain after the lines, and the number, from 1, of the first that does not continue it, or None."""
    for number, line in enumerate(lines, start=1):
        match = LINE_PATTERN.fullmatch(line)
        head = "" if match is None else _next_chain(head, match["content"])
        if match is None or head != match["chain"].decode("ascii"):
            return head, number
    return head, None


def _next_chain(previous: str, content: bytes) -> str:
    """Return the chain of a line. content: the line's text up to its last field, `chain`."""
    return hashlib.sha256(previous.encode("ascii") + content).hexdigest()[:CHAIN_DIGITS]


# The smoothed training loss and the speed, as shown beside the progress bar and wherever a run is shown.

LOSS_DECAY = 0.9  # of the smoothed loss, per step
TEACHER_LOSSES = {"divergence": "KL from the teacher {:.3f} nats per token", "layer_error": "layer error {:.3g}"}
RATE_STEPS = 100  # the speed beside the progress bar is over the last steps


class SmoothedLoss:
    """The training loss, smoothed, since one step's loss depends on its batch."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0
        self.from_teacher: dict[str, SmoothedLoss] = {}  # by the name in TEACHER_LOSSES

    def add(self, loss: float) -> float:
        """Add a loss and return the bias-corrected exponential moving average, over about 10 steps."""
        self.total = LOSS_DECAY * self.total + loss
        self.weight = LOSS_DECAY * self.weight + 1
        return self.total / self.weight

    def note(self, line: dict[str, Any]) -> str:
        """Return the text beside the progress bar for a step's log line."""
        if line["loss"] is None:
            return f"step {line['step']} skipped: its loss is not finite"
        bits = line.get("bits_per_byte")
        smoothed = self.add(line["loss"] if bits is None else bits)
        taught = {name: line[name] for name in TEACHER_LOSSES if line.get(name) is not None}
        parts = [
            TEACHER_LOSSES[name].format(self.from_teacher.setdefault(name, SmoothedLoss()).add(value))
            for name, value in taught.items()
        ]  # what is trained, where a teacher is: the text's loss is a by-product
        name, unit = "text" if taught else "training", "nats per answer" if bits is None else "bits per byte"
        return ", ".join([*parts, f"{name} loss {smoothed:.3f} {unit}"]) + " (last ~10 steps)"


def step_speed(tokens: int, seconds: Sequence[float], last: int | None = None) -> float:
    """Return tokens per second: the tokens of a step over the median seconds of a step.

    seconds: of each step, without evaluations and checkpoints. The first step, which may compile, counts only if it is
    the only one. last: only this many newest steps count.
    """
    counted = seconds[1:] or seconds
    return tokens / statistics.median(counted if last is None else counted[-last:])


# Files of options: YAML, or the record of a run.

OPTIONS = "options"  # of run.json


def read_options(path: Path | str) -> dict[str, Any]:
    """Return options by name, from a YAML file or a run's folder. Raises ConfigError or CheckpointError."""
    path = Path(path)
    if path.is_dir():
        options = read_json_file(path / RUN_FILE).get(OPTIONS)
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: its {RUN_FILE} holds no options; write them to a YAML file")
        return options | {"out": str(path)}  # the run may have been moved
    what = describe_path(path)
    if what != "is a file" or path.stat().st_size > MAX_YAML_BYTES:
        what = f"has more than {MAX_YAML_BYTES:,} bytes" if what == "is a file" else what
        raise ConfigError(f"{path}: {what}; name a YAML file of options")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({reason}); name a YAML file of options") from error
    options = parse_yaml(text, str(path))
    if not isinstance(options, dict):
        raise ConfigError(f"{path}: is not a table of options; write lines such as steps: 200")
    return {str(name).rstrip("_"): value for name, value in options.items()}
