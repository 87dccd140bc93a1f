"""Trackers: send a run's log lines to TensorBoard, Weights & Biases, Trackio or MLflow through their own libraries.

Each tracker has a thread with a bounded queue. A tracker that fails, is slow or hangs loses lines, with a warning; it
never stops training, and delays its end by at most 10 seconds per tracker.
"""

import hashlib
import importlib.util
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from heddle.errors import ConfigError, choices_hint, pip_install
from heddle.progress import print_warning
from heddle.training.job import TrainingJob

_PROJECT = "heddle"  # unless the environment names one
MAX_QUEUED_LINES = 1024
CLOSING_SECONDS = 10.0
MAX_FIELD_CHARACTERS = 500  # per value of the design or settings: MLflow refuses longer ones


@dataclass(frozen=True)
class _TrackedRun:
    """What a tracker receives about a run. run_id: 16 hexadecimal digits, the same when the run continues.

    first_step: the first step to be sent, from 1. fields: each value of the design and the settings by path.
    """

    folder: Path
    run_id: str
    first_step: int
    fields: dict[str, str | int | float | bool]


class Tracker(Protocol):
    """A tracker's library, opened for one run."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Record the metrics of a step."""

    def close(self) -> None:
        """Flush what is left, and close."""


class _TensorBoard:
    def __init__(self, run: _TrackedRun) -> None:
        summary_writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = summary_writer(str(run.folder / "tensorboard"), purge_step=run.first_step)
        self._writer.add_text("run", f"```json\n{json.dumps(run.fields, indent=2)}\n```")

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, run: _TrackedRun) -> None:
        wandb = import_module("wandb")
        project = wandb.setup().settings.project or _PROJECT
        settings = wandb.Settings(silent=True, console="off", disable_code=True)
        self._run = wandb.init(
            project=project, dir=str(run.folder), id=run.run_id, name=run.folder.name, resume="allow",
            config=run.fields, settings=settings,
        )  # fmt: skip

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio(_WeightsAndBiases):  # its runs have the same functions
    def __init__(self, run: _TrackedRun) -> None:
        trackio = import_module("trackio")
        vars(trackio)["print"] = partial(print, file=sys.stderr)  # stdout is for the command's result
        name = f"{run.folder.name}-{run.run_id[:6]}"
        self._run = trackio.init(_PROJECT, name=name, config=run.fields, resume="allow", embed=False)


class _MLflow:
    def __init__(self, run: _TrackedRun) -> None:
        mlflow = import_module("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        self._client = client = mlflow.MlflowClient()
        name = import_module("mlflow.environment_variables").MLFLOW_EXPERIMENT_NAME.get() or _PROJECT
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        earlier = client.search_runs([number], f"tags.heddle_run = '{run.run_id}'", max_results=1)
        record = earlier[0] if earlier else client.create_run(
            number, run_name=run.folder.name, tags={"heddle_run": run.run_id}
        )  # fmt: skip
        self._id = record.info.run_id
        for path, value in run.fields.items() if not earlier else ():
            client.log_param(self._id, path, value)

    def log(self, metrics: dict[str, float], step: int) -> None:
        milliseconds = int(time.time() * 1000)
        numbers = [self._metric(name, value, milliseconds, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=numbers)

    def close(self) -> None:
        self._client.set_terminated(self._id)


@dataclass(frozen=True)
class _Library:
    """How a tracker is opened. module: must be installed; heddle's extra has the same name."""

    module: str
    open: Callable[[_TrackedRun], Tracker]


TRACKERS = {
    "tensorboard": _Library("tensorboard", _TensorBoard),
    "wandb": _Library("wandb", _WeightsAndBiases),
    "trackio": _Library("trackio", _Trackio),
    "mlflow": _Library("mlflow", _MLflow),
}


class TrackerThread:
    """Sends lines to one tracker, from a thread. `write` and `close` never raise."""

    def __init__(self, name: str, run: _TrackedRun) -> None:
        self._name, self._run = name, run
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_QUEUED_LINES)
        self._dropped_lines = 0
        self._thread = threading.Thread(target=self._send, name=f"track-{name}", daemon=True)
        self._thread.start()

    def write(self, line: dict[str, Any]) -> None:
        """Queue a log line. It is dropped if the tracker has failed or the queue is full."""
        if not self._thread.is_alive():
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            if not self._dropped_lines:
                print_warning(f"track {self._name}: {MAX_QUEUED_LINES} lines wait to be sent; further ones are dropped")
            self._dropped_lines += 1

    def close(self) -> None:
        """Wait until all lines are sent, at most 10 seconds; warns if some were not."""
        deadline = time.monotonic() + CLOSING_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._lines.put(None, timeout=0.05)
            except queue.Full:
                continue
            self._thread.join(max(0.0, deadline - time.monotonic()))
            break
        if self._thread.is_alive():
            print_warning(
                f"track {self._name}: did not finish within {CLOSING_SECONDS:g} seconds after the last line; "
                "log.jsonl has every line"
            )
        elif self._dropped_lines:
            print_warning(f"track {self._name}: {self._dropped_lines} lines were dropped; log.jsonl has every line")

    def _send(self) -> None:
        try:
            tracker = TRACKERS[self._name].open(self._run)
            while (line := self._lines.get()) is not None:
                tracker.log(metrics_of(line), line["step"])
            tracker.close()
        except BaseException as error:  # whatever a library raises, SystemExit included: training continues
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            print_warning(f"track {self._name}: failed and receives no more lines ({reason}); log.jsonl has every line")


def check_trackers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the trackers' names. Raises ConfigError for an unknown or repeated name, or a missing library."""
    for index, name in enumerate(names):
        if name not in TRACKERS:
            raise ConfigError(f"track {name}: unknown tracker; {choices_hint(name, list(TRACKERS))}")
        if name in names[:index]:
            raise ConfigError(f"track {name}: is given twice; leave one out")
        if importlib.util.find_spec(TRACKERS[name].module) is None:
            raise ConfigError(f"track {name}: its library is not installed; {pip_install(name)}")
    return tuple(names)


@contextmanager
def open_trackers(job: TrainingJob, first_step: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open the trackers of a job on rank 0; yield a function that sends a log line to all of them.

    first_step: the first step to be sent, from 1.
    """
    threads = []
    if job.trackers and job.ranks.is_first:
        folder, identity = job.out.resolve(), job.identity()
        content = json.dumps([str(folder), identity], sort_keys=True, default=str)
        fields = {name: identity[name] for name in ("design", "settings")}
        run_id = hashlib.sha256(content.encode()).hexdigest()[:16]
        run = _TrackedRun(folder, run_id, first_step, dict(_flat_fields(fields)))
        threads = [TrackerThread(name, run) for name in job.trackers]

    def write(line: dict[str, Any]) -> None:
        for thread in threads:
            thread.write(line)

    try:
        yield write
    finally:
        for thread in threads:
            thread.close()


def metrics_of(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log line by path, such as `loss` or `experts/0/load`, without texts, flags and None."""
    numbers = {path.replace(".", "/"): value for path, value in _flat_fields(line) if not isinstance(value, str | bool)}
    numbers.pop("step", None)
    return {path: float(value) for path, value in numbers.items()}


def _flat_fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _flat_fields(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str):
        yield path, value[:MAX_FIELD_CHARACTERS]
    elif value is not None:
        yield path, value
