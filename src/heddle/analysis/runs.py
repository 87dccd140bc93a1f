"""What the runs below a folder did, from their run.json and log.jsonl: progress, metric, speed, and what differs."""

import json
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.storage.json_file import read_json_file
from heddle.storage.run_log import LOG_FILE, RUN_FILE, read_log
from heddle.training.smoothed_loss import step_speed

METRICS = ("bits_per_byte", "accuracy")
SMOOTHED_STEPS = 20  # the training metric is the mean of so many steps
MAX_POINTS = 100
_COMPARED = ("design", "data", "settings")  # of run.json; the rest describes the machine


@dataclass(frozen=True)
class RunSummary:
    """One run. name: of its folder, below the folder that was asked for.

    step, steps: done and planned. tokens: read so far. metric: bits_per_byte, or accuracy. training: its mean over the
    last 20 steps, None for a task. validation: its newest value. tokens_per_second: that of all steps. time:
    of the last line, in seconds since 1970. fields: every value of the design, the data and the settings by
    its path. curve: (tokens, metric) of the training, or else of the validation, as the means of at most 100 groups.
    peak_memory_bytes: the most that the run took, None if its log does not say.
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


def find_runs(folder: Path) -> list[Path]:
    """The folders at and below a folder that hold a run, sorted. Links are not followed.

    Raises ConfigError if the folder does not exist.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is no folder; name one that holds runs")
    folders = []
    for path, names, files in os.walk(folder):
        if RUN_FILE in files:
            folders.append(Path(path))
            names.clear()
    return sorted(folders)


def summarize(run: Path, folder: Path) -> RunSummary:
    """Read one run below a folder. Raises CheckpointError if its files were altered or cannot be read."""
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
    )


def _curve(log: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    points = [(line["tokens"], line[name]) for line in log if line.get(name) is not None]
    count = math.ceil(len(points) / MAX_POINTS)
    groups = (points[start : start + count] for start in range(0, len(points), count or 1))
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def log_speed(log: Sequence[dict[str, Any]], last: int | None = None) -> float | None:
    """Tokens per second of a log, as `step_speed` has it; None for a log without steps."""
    seconds = [line["seconds"] for line in log if line.get("seconds")]
    return step_speed(log[-1]["tokens"] // log[-1]["step"], seconds, last) if seconds else None


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{key}")
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{path}.{index}")
    else:
        yield path, value


def at_equal_tokens(runs: Sequence[RunSummary]) -> tuple[int, list[float | None]]:
    """(tokens, values): as many tokens as every run has a curve for, and each run's last mean up to there."""
    tokens = min((run.curve[-1][0] for run in runs if run.curve), default=0)
    reached = ([value for at, value in run.curve if at <= tokens] for run in runs)
    return tokens, [values[-1] if values else None for values in reached]


def varied_fields(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """For each run, its value of every field in which not all runs are equal; None where it lacks the field."""
    paths = dict.fromkeys(path for run in runs for path in run.fields)
    varying = [path for path in paths if len({json.dumps(run.fields.get(path)) for run in runs}) > 1]
    return [{path: run.fields.get(path) for path in varying} for run in runs]
