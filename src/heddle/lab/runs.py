"""Summaries of the runs below a folder, from run.json and log.jsonl: progress, metric, speed, and differences."""

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heddle.data.samples import RowProtocol
from heddle.errors import CheckpointError, ConfigError, HeddleError
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.file_io import read_json_file
from heddle.storage.lock import is_locked
from heddle.storage.run_log import (
    FINAL_FILE,
    LOG_FILE,
    RATE_STEPS,
    RUN_FILE,
    LogReader,
    SmoothedLoss,
    read_log,
    step_speed,
)
from heddle.training.step import RouterSummary, average_router_summaries

METRICS = ("bits_per_byte", "accuracy")
SMOOTHED_STEPS = 20  # the training metric is the mean over this many steps
# Why they differ: how much text each reads.
VALIDATION_NOTE = (
    "Validation, during training, reads a part of the held-out text; final, at the end, and a comparison's report "
    "read more of it."
)
BOS_FIELD = "data.bos_ids"
MAX_POINTS = 100
_COMPARED = ("design", "data", "settings")  # of run.json; the rest describes the machine


@dataclass(frozen=True)
class RunSummary:
    """One run. name: its folder's path below the given folder.

    step, steps: done and planned. tokens: read so far. metric: bits_per_byte, or accuracy. training: its mean over the
    last 20 steps, None for a task. validation: its latest value. tokens_per_second: over all steps. time: of the last
    line, in seconds since 1970. fields: every value of the design, the data and the settings by its path. curve:
    (tokens, metric) in training, or else in validation, as the means of at most 100 groups. peak_memory_bytes: the
    peak memory of the run, None if its log does not have it. final: the evaluation after the last step, None for a run
    that is not finished.
    """

    name: str
    step: int
    steps: int | None
    tokens: int
    metric: str
    training: float | None
    validation: float | None
    tokens_per_second: float | None
    time: float
    fields: dict[str, Any]
    curve: list[tuple[int, float]]
    peak_memory_bytes: int | None = None
    final: float | None = None


def find_runs(folder: Path) -> list[Path]:
    """The folders at and below a folder that hold a run, sorted. Links are not followed.

    Raises ConfigError if the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is not a folder; name one that holds runs")
    folders = []
    for path, names, files in os.walk(folder):
        if RUN_FILE in files:
            folders.append(Path(path))
            names.clear()
    return sorted(folders)


def summarize(run: Path, folder: Path) -> RunSummary:
    """Read one run below a folder. Raises CheckpointError if its files were modified or cannot be read."""
    saved, log = read_json_file(run / RUN_FILE), read_log(run)
    settings = saved.get("settings") or {}
    logged = {name.removeprefix("validation_") for line in log for name in line}
    metric = next((name for name in METRICS if name in logged), METRICS[0])
    values = [line[metric] for line in log[-SMOOTHED_STEPS:] if line.get(metric) is not None]
    validation = [line[f"validation_{metric}"] for line in log if line.get(f"validation_{metric}") is not None]
    last = log[-1] if log else {}
    written = run / (LOG_FILE if log else RUN_FILE)
    return RunSummary(
        name=run.relative_to(folder).as_posix() if run != folder else run.name,
        step=last.get("step", 0),
        steps=settings.get("steps"),
        tokens=last.get("tokens", 0),
        metric=metric,
        training=statistics.fmean(values) if values else None,
        validation=validation[-1] if validation else None,
        tokens_per_second=log_speed(log),
        time=written.stat().st_mtime,
        fields=dict(pair for key in _COMPARED for pair in _flat(saved.get(key), key)),
        curve=_curve(log, metric) or _curve(log, f"validation_{metric}"),
        peak_memory_bytes=last.get("peak_memory_bytes"),
        final=_final(run, last.get("step", 0), metric),
    )


def _final(run: Path, step: int, metric: str) -> float | None:
    """The final evaluation of a run; None if it is missing, or of another step than the last logged."""
    path = run / FINAL_FILE
    final = read_json_file(path) if path.is_file() else {}
    return final.get(f"final_{metric}") if final.get("step") == step else None


def _curve(log: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    points = [(line["tokens"], line[name]) for line in log if line.get(name) is not None and "tokens" in line]
    count = math.ceil(len(points) / MAX_POINTS)
    groups = (points[start : start + count] for start in range(0, len(points), count or 1))
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def log_speed(log: Sequence[dict[str, Any]], last: int | None = None) -> float | None:
    """Tokens per second of a log, as `step_speed` has it; None for a log without steps."""
    steps = [line for line in log if line.get("seconds") and line.get("step") and "tokens" in line]
    seconds = [line["seconds"] for line in steps]
    return step_speed(steps[-1]["tokens"] // steps[-1]["step"], seconds, last) if steps else None


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}")
    else:
        yield path, value


def reading_note(runs: Sequence[RunSummary]) -> str:
    """On which text the losses of runs are measured, and which runs begin sequences with BOS, if only some do."""
    named = [run.name for run in runs if run.fields.get(BOS_FIELD)]
    if not named or len(named) == len(runs):
        return VALIDATION_NOTE
    return (
        f"{VALIDATION_NOTE} Sequences of {', '.join(named)} are read {RowProtocol((0,))}; "
        f"the others are read {RowProtocol()}: their losses are not of the same tokens."
    )


def at_equal_tokens(runs: Sequence[RunSummary]) -> tuple[int, list[float | None]]:
    """(tokens, values): the number of tokens that all curves reach, and each run's mean of the last 20 steps there."""
    tokens = min((run.curve[-1][0] for run in runs if run.curve), default=0)
    means = []
    for run in runs:
        reached = [value for at, value in run.curve if at <= tokens]
        points = max(1, round(SMOOTHED_STEPS * len(run.curve) / max(run.step, 1)))
        means.append(statistics.fmean(reached[-points:]) if reached else None)
    return tokens, means


def varied_fields(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """For each run, its values of the fields in which runs differ; None if it lacks the field."""
    paths = dict.fromkeys(path for run in runs for path in run.fields)
    varying = [path for path in paths if len({json.dumps(run.fields.get(path)) for run in runs}) > 1]
    return [{path: run.fields.get(path) for path in varying} for run in runs]


# Follow runs while they train: the curves of their logs, downsampled for a page, and samples from their checkpoints.


MAX_GROUPS = 300  # of neighboring steps, from each of which a curve has at most two points
EXPERT_STEPS = 100  # the loads of experts are averaged over this many latest steps
Curve = list[tuple[int, float]]  # of (tokens, value)


@dataclass(frozen=True)
class Sample:
    """A checkpoint's continuation of a prompt. text: "" if there is an error, a sentence."""

    step: int
    prompt: str
    text: str
    error: str = ""


@dataclass(frozen=True)
class WatchedRun:
    """The current state of a run.

    name: of its folder. metric: bits_per_byte, accuracy or loss. curves: "smoothed", "raw" and "validation" of the
    metric; "rate"; "norm" (of the gradient, smoothed) and "raw_norm"; "speed" (tokens per second); "memory" (bytes).
    speed: of the last 100 steps. is_training: whether a process holds its folder. is_evaluated: whether it was
    evaluated after its last step: a task that is learned early ends before `steps`. experts: of the latest steps, or
    None. error: why its files cannot be read, or "".
    """

    name: str
    step: int = 0
    steps: int | None = None
    tokens: int = 0
    metric: str = METRICS[0]
    curves: dict[str, Curve] = field(default_factory=dict)
    speed: float | None = None
    is_training: bool = False
    is_evaluated: bool = False
    experts: RouterSummary | None = None
    sample: Sample | None = None
    error: str = ""

    @property
    def status(self) -> str:
        """Training, finished (all steps are done, or it was evaluated at its end), stopped, or, if unknown, ended."""
        if self.is_training:
            return "training"
        if self.is_evaluated or (self.steps is not None and self.step >= self.steps):
            return "finished"
        return "ended" if self.steps is None else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """Seconds for the remaining steps at the present speed; None if unknown."""
        if not self.steps or not self.speed or not self.step or not self.is_training:
            return None
        return (self.steps - self.step) * (self.tokens / self.step) / self.speed


class RunFollower:
    """Follows one run. write: samples from the run's latest checkpoint; None: no samples."""

    def __init__(self, run: Path, name: str, write: Callable[[Path, int], Sample] | None = None) -> None:
        self.run, self.name, self.write = run, name, write
        self._log = LogReader(run)
        self._settings: dict[str, Any] | None = None
        self._latest = WatchedRun(name)
        self._sample: Sample | None = None

    def follow(self) -> WatchedRun:
        """Read new log lines, and return the current run: the same object if nothing has changed."""
        try:
            if self._settings is None:
                self._settings = read_json_file(self.run / RUN_FILE).get("settings") or {}
            is_new = self._log.read()
            sample, is_training = self._newest_sample(), is_locked(self.run)
            before = self._latest
            if is_new or before.error or (before.is_training, before.sample) != (is_training, sample):
                self._latest = self._read(is_training, sample)
        except CheckpointError as error:
            self._latest = WatchedRun(self.name, error=str(error))
        return self._latest

    def _newest_sample(self) -> Sample | None:
        if self.write is None:
            return None
        steps = checkpoint_steps(self.run)
        if steps and (self._sample is None or self._sample.step != steps[-1]):
            self._sample = self.write(self.run, steps[-1])
        return self._sample

    def _read(self, is_training: bool, sample: Sample | None) -> WatchedRun:
        lines = self._log.lines
        names = {name.removeprefix("validation_") for line in lines for name in line}
        metric = next((name for name in METRICS if name in names), "loss")
        trained = metric if any(metric in line for line in lines) else "loss"
        chosen = [line["experts"] for line in lines[-EXPERT_STEPS:] if line.get("experts") and not line.get("skipped")]
        last, norms = lines[-1] if lines else {}, curve(lines, "gradient_norm")
        return WatchedRun(
            name=self.name,
            step=last.get("step", 0),
            steps=(self._settings or {}).get("steps"),
            tokens=last.get("tokens", 0),
            metric=metric,
            curves={
                "smoothed": downsampled(smoothed(curve(lines, trained))),
                "raw": downsampled(curve(lines, trained)),
                "validation": curve(lines, f"validation_{metric}"),
                "rate": downsampled(curve(lines, "learning_rate")),
                "norm": downsampled(smoothed(norms)),
                "raw_norm": downsampled(norms),
                "speed": _speeds(lines),
                "memory": downsampled(curve(lines, "peak_memory_bytes")),
            },
            speed=log_speed(lines, RATE_STEPS),
            is_training=is_training,
            is_evaluated=_final(self.run, last.get("step", 0), metric) is not None,
            experts=average_router_summaries(chosen) if chosen else None,
            sample=sample,
        )


class FolderFollower:
    """Follows every run at and below folders, including runs that start later."""

    def __init__(self, folders: Sequence[Path], write: Callable[[Path, int], Sample] | None = None) -> None:
        """Raises ConfigError if a folder does not exist."""
        self.folders, self.write = folders, write
        self._followers: dict[Path, RunFollower] = {}
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"{folder}: is not a folder; name a run, or a folder of runs")

    def follow(self) -> list[WatchedRun]:
        """The current state of all runs, in the order of the folders. A run with a deleted folder is left out."""
        paths = [path for folder in self.folders if folder.is_dir() for path in find_runs(folder)]
        shared = len({path.name for path in paths}) < len(paths)
        for path in paths:
            if path not in self._followers:
                self._followers[path] = RunFollower(path, str(path) if shared else path.resolve().name, self.write)
        return [self._followers[path].follow() for path in dict.fromkeys(paths)]


def write_sample(prompt: str, tokens: int) -> Callable[[Path, int], Sample]:
    """A function that greedily continues a prompt with the latest checkpoint of a run."""

    def write(run: Path, step: int) -> Sample:
        from heddle.generation.generate import generate
        from heddle.storage.model import load

        try:
            model, tokenizer = load(run)
            if tokenizer is None:
                return Sample(step, prompt, "", "the run has no tokenizer")
            return Sample(step, prompt, generate(model, prompt, tokenizer, max_new_tokens=tokens))
        except HeddleError as error:  # such as a checkpoint that was deleted in the meantime
            return Sample(step, prompt, "", str(error))

    return write


def curve(lines: Sequence[dict[str, Any]], name: str) -> Curve:
    """(tokens, value) of each line that has a finite value of this name."""
    points = [(line["tokens"], line.get(name)) for line in lines]
    return [(tokens, float(value)) for tokens, value in points if value is not None and math.isfinite(value)]


def smoothed(points: Curve) -> Curve:
    """The same points, each smoothed as the loss beside the progress bar is."""
    loss = SmoothedLoss()
    return [(tokens, loss.add(value)) for tokens, value in points]


def _speeds(lines: Sequence[dict[str, Any]]) -> Curve:
    """(tokens, tokens per second), each over the last 100 steps up to there."""
    stride = math.ceil(len(lines) / MAX_GROUPS) or 1
    ends = range(len(lines), 1, -stride)
    parts = [lines[max(0, end - RATE_STEPS - 1) : end] for end in reversed(ends)]
    return [(part[-1]["tokens"], speed) for part in parts if (speed := log_speed(part)) is not None]


def downsampled(points: Curve) -> Curve:
    """At most 300 groups of neighbors: the lowest and the highest value of each, in their order."""
    size = math.ceil(len(points) / MAX_GROUPS)
    if size <= 2:
        return points
    groups = (points[start : start + size] for start in range(0, len(points), size))
    return [
        point
        for group in groups
        for point in sorted({min(group, key=lambda point: point[1]), max(group, key=lambda point: point[1])})
    ]
