"""Follow runs while they train: the curves of their logs, thinned for a page, and what their checkpoints write."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heddle.analysis.runs import METRICS, find_runs, log_speed
from heddle.errors import CheckpointError, ConfigError, HeddleError
from heddle.storage.checkpoints import checkpoint_steps
from heddle.storage.json_file import read_json_file
from heddle.storage.lock import is_locked
from heddle.storage.run_log import RUN_FILE, LogReader
from heddle.training.router_metrics import RouterSummary, average_router_summaries
from heddle.training.smoothed_loss import RATE_STEPS, SmoothedLoss

MAX_GROUPS = 300  # of neighboring steps, from each of which a curve has at most two points
EXPERT_STEPS = 100  # the loads of experts are those of so many newest steps
Curve = list[tuple[int, float]]  # of (tokens, value)


@dataclass(frozen=True)
class Sample:
    """What a checkpoint wrote on from a prompt. text: "" with an error, which is a sentence."""

    step: int
    prompt: str
    text: str
    error: str = ""


@dataclass(frozen=True)
class WatchedRun:
    """A run as it is now.

    name: of its folder. metric: bits_per_byte, accuracy or loss. curves: "smoothed", "raw" and "validation" of the
    metric; "rate"; "norm" (of the gradient, smoothed) and "raw_norm"; "speed" (tokens per second); "memory" (bytes).
    speed: of the last 100 steps. is_training: whether a process holds its folder. experts: of the newest steps, or
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
    experts: RouterSummary | None = None
    sample: Sample | None = None
    error: str = ""

    @property
    def seconds_left(self) -> float | None:
        """What the remaining steps take at the present speed; None where it is not known."""
        if not self.steps or not self.speed or not self.step or not self.is_training:
            return None
        return (self.steps - self.step) * (self.tokens / self.step) / self.speed


class RunFollower:
    """Follows one run. write: makes a sample of the run's newest checkpoint; None makes none."""

    def __init__(self, run: Path, name: str, write: Callable[[Path, int], Sample] | None = None) -> None:
        self.run, self.name, self.write = run, name, write
        self._log = LogReader(run)
        self._settings: dict[str, Any] | None = None
        self._latest = WatchedRun(name)
        self._sample: Sample | None = None

    def follow(self) -> WatchedRun:
        """Read what is new, and return the run as it is now: the same object where nothing has changed."""
        try:
            if self._settings is None:
                self._settings = read_json_file(self.run / RUN_FILE).get("settings") or {}
            is_new = self._log.read()
        except CheckpointError as error:
            self._latest = WatchedRun(self.name, error=str(error))
            return self._latest
        sample, is_training = self._newest_sample(), is_locked(self.run)
        before = self._latest
        if is_new or before.error or (before.is_training, before.sample) != (is_training, sample):
            self._latest = self._read(is_training, sample)
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
            experts=average_router_summaries(chosen) if chosen else None,
            sample=sample,
        )


class FolderFollower:
    """Follows every run at and below folders, also those that begin later."""

    def __init__(self, folders: Sequence[Path], write: Callable[[Path, int], Sample] | None = None) -> None:
        """Raises ConfigError if a folder does not exist."""
        self.folders, self.write = folders, write
        self._followers: dict[Path, RunFollower] = {}
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"{folder}: is no folder; name a run, or a folder of runs")

    def follow(self) -> list[WatchedRun]:
        """All runs as they are now, in the order of the folders. A run whose folder has gone is left out."""
        paths = [path for folder in self.folders if folder.is_dir() for path in find_runs(folder)]
        shared = len({path.name for path in paths}) < len(paths)
        for path in paths:
            if path not in self._followers:
                self._followers[path] = RunFollower(path, str(path) if shared else path.resolve().name, self.write)
        return [self._followers[path].follow() for path in dict.fromkeys(paths)]


def write_sample(prompt: str, tokens: int) -> Callable[[Path, int], Sample]:
    """A function that lets the newest checkpoint of a run write on from a prompt, greedily."""

    def write(run: Path, step: int) -> Sample:
        from heddle.generation.generate import generate
        from heddle.storage.model import load

        try:
            model, tokenizer = load(run)
            if tokenizer is None:
                return Sample(step, prompt, "", "the run has no tokenizer")
            return Sample(step, prompt, generate(model, prompt, tokenizer, max_new_tokens=tokens))
        except HeddleError as error:  # such as a checkpoint that was deleted meanwhile
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
    """(tokens, tokens per second), each the speed of the last 100 steps up to there."""
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
