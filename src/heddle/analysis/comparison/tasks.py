"""The tasks of a comparison: each runs in a worker process, and its result is saved in a file."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.analysis.comparison.plan import ComparisonPlan, DesignEntry
from heddle.analysis.comparison.speed import Samples, summarize_speeds
from heddle.data.corpus import Corpus
from heddle.errors import ConfigError, HeddleError, MachineError
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import flops_per_token
from heddle.runtime import Runtime
from heddle.signals import Interrupted, catch_stop_signals
from heddle.storage.atomic import write_file
from heddle.storage.json_file import read_json_file
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan
from heddle.training.settings import Settings

CURVE_POINTS = 10
SPEED_ROUNDS = 2
CHECKPOINTS_PER_RUN = 4
NO_EXTRAPOLATION = ExtrapolationPlan(sequence_length=1)
TASK_DESCRIPTIONS = {"calibrate": "timing a step", "speed": "measuring prefill and decode, round", "recall": "recall"}


@dataclass(frozen=True)
class Comparison:
    """A running comparison: the plan, its text, its folder, the machine, and the command for the report.

    extrapolation: the validation text that each trained model reads at several lengths.
    """

    plan: ComparisonPlan
    corpus: Corpus
    out: Path
    runtime: Runtime
    command: str
    extrapolation: ExtrapolationPlan = NO_EXTRAPOLATION

    def config(self, entry: DesignEntry) -> ModelConfig:
        """The design with the shared vocabulary."""
        if entry.config.vocab_size is not None:
            return entry.config
        return entry.config.replace(vocab_size=self.corpus.tokenizer.vocab_size)

    def settings(self, seed: int, steps: int) -> Settings:
        """The training settings of one run."""
        plan = self.plan
        return Settings(
            steps=steps,
            batch_size=plan.batch_size,
            sequence_length=plan.sequence_length,
            learning_rate=plan.learning_rate,
            seed=seed,
            optimizer=plan.optimizer,
            schedule=plan.schedule,
            warmup=plan.warmup,
            lr_scale=plan.lr_scale,
            precision=plan.precision,
            save_every=max(1, steps // CHECKPOINTS_PER_RUN),
            evaluate_every=max(1, steps // CURVE_POINTS),
        )


def training_steps(comparison: Comparison, entry: DesignEntry) -> int:
    """Optimizer steps that the budget allows a design. Raises ConfigError where it allows none."""
    plan = comparison.plan
    tokens_per_step = plan.batch_size * plan.sequence_length
    if plan.budget_kind == "tokens":
        steps = int(plan.budget_value) // tokens_per_step
    elif plan.budget_kind == "flops":
        model = build(comparison.config(entry), device="meta")
        # a backward pass costs twice a forward pass
        steps = int(plan.budget_value / (3 * flops_per_token(model, plan.sequence_length) * tokens_per_step))
    else:
        calibration = run_task(comparison, entry, "calibrate", 0, 1)
        if calibration["status"] != "done":
            raise MachineError(f"{calibration['message']}; a budget in tokens needs no timing")
        steps = int(plan.budget_value / calibration["seconds_per_step"])
    if steps < 1:
        raise ConfigError(
            f"{plan.budget_kind} {plan.budget_value:g}: is less than one step of {tokens_per_step} tokens for "
            f"{entry.name}; give more"
        )
    return steps


def train_design(comparison: Comparison, entry: DesignEntry, seed: int, steps: int) -> dict[str, Any]:
    """One training run for the report; one that diverged or failed has None for its numbers."""
    result = run_task(comparison, entry, "train", seed, steps)
    if result["status"] == "done":
        return result
    progress.print_status(f"warning: {result['message']}")
    speed = ("seconds", "train_tokens_per_second", "train_speed_range", "peak_memory_bytes")
    return {
        "seed": seed,
        "status": result["status"],
        "message": result["message"],
        **dict.fromkeys(("bits_per_byte", "train_tokens", *speed, "skipped_steps", "experts")),
        "curve": [],
        "windows": [],
        "extrapolation": [],
        "sample": "",
    }


def measure_speeds_in_rounds(comparison: Comparison) -> dict[str, dict[str, list[tuple[int, float, float, float]]]]:
    """By design: prefill and decode speeds as in `summarize_speeds`; empty lists where measuring failed."""
    entries = comparison.plan.entries
    samples: dict[str, list[dict[str, Samples]]] = {entry.name: [] for entry in entries}
    for number in range(1, SPEED_ROUNDS + 1):
        for entry in entries:
            result = run_task(comparison, entry, f"speed-{number}", 0, 1)
            if result["status"] != "done":
                progress.print_status(f"warning: {result['message']}")
                result = {"prefill": [], "decode": []}
            samples[entry.name].append(result)
    return {name: summarize_speeds(rounds) for name, rounds in samples.items()}


def measure_recall(comparison: Comparison, entry: DesignEntry) -> dict[str, Any]:
    """The result of each probe of the plan, by its name; one that failed has None for its numbers, and a message."""
    results = {}
    for probe in comparison.plan.recall_probes:
        try:
            result = run_task(comparison, entry, f"recall-{probe}", 0, 1)
        except MachineError:
            raise
        except HeddleError as error:  # only this probe is impossible: its rows are too long for the design, say
            result = {"status": "failed", "message": str(error)}
        if result["status"] != "done":
            progress.print_status(f"warning: {result['message']}")
            result = dict.fromkeys(("accuracy", "scored", "seconds")) | {"curve": []} | result
        results[probe] = result
    return results


def run_task(comparison: Comparison, entry: DesignEntry, task: str, seed: int, steps: int) -> dict[str, Any]:
    """The result of a task, from its file if it was done before, else from a worker.

    task: "train", "calibrate", "speed-ROUND" or "recall-PROBE". The result's status is done, diverged or failed; a
    failed one is not saved, so that it is tried again. Raises HeddleError for what would stop the other workers too,
    and Interrupted after a signal, once the worker has saved.
    """
    runs = comparison.out / "runs"
    stem = f"{entry.name}-seed{seed}" if task == "train" else f"{entry.name}-{task}"
    result_file, request_file = runs / f"{stem}.json", runs / f".{stem}.task.json"
    if result_file.is_file():
        result: dict[str, Any] = read_json_file(result_file)
        return result
    kind, _, probe = task.partition("-")
    description = f"{TASK_DESCRIPTIONS[kind]} {probe}".rstrip() if kind in TASK_DESCRIPTIONS else f"seed {seed}"
    label = f"{entry.name}, {description}"
    if kind in ("calibrate", "speed"):  # the others have a progress bar
        progress.print_status(f"{entry.name}: {description}")
    runs.mkdir(parents=True, exist_ok=True)
    request = _request(comparison, entry, asdict(comparison.settings(seed, steps)))
    request |= {"task": kind, "probe": probe, "label": label, "out": str(runs / stem)}
    write_file(request_file, json.dumps(request))
    try:
        return _read_result(_spawn(request_file, result_file), result_file, label)
    finally:
        request_file.unlink(missing_ok=True)


def _request(comparison: Comparison, entry: DesignEntry, settings: dict[str, Any]) -> dict[str, Any]:
    plan = comparison.plan
    return {
        "parent_pid": os.getpid(),
        "design": comparison.config(entry).dump(),
        "data": plan.data,
        "tokenizer": plan.tokenizer,
        "vocab_size": plan.vocab_size,
        "max_train_tokens": int(plan.budget_value) if plan.budget_kind == "tokens" else None,
        "settings": settings,
        "device": plan.device,
        "threads": plan.threads,
        "part_files": plan.part_files,
        "speed_contexts": plan.speed_contexts,
        "extrapolation": asdict(comparison.extrapolation),
        "command": comparison.command,
        "quiet": progress.is_quiet(),
    }


def _read_result(exit_code: int, result_file: Path, label: str) -> dict[str, Any]:
    """The result that a worker wrote, or a failed one where it wrote none."""
    if not result_file.is_file():
        signal_number = -exit_code if exit_code < 0 else exit_code - 128
        if signal_number > 0:
            guess = ", perhaps because memory ran out" if signal_number == signal.SIGKILL else ""
            cause = f"was ended by {signal.Signals(signal_number).name}{guess}"
        else:
            cause = f"ended with code {exit_code}"
        return {"status": "failed", "message": f"{label}: {cause}"}
    result: dict[str, Any] = read_json_file(result_file)
    if result["status"] == "done":
        return result
    result["message"] = f"{label}: {result['message']}"
    if result["status"] == "failed":
        result_file.unlink()
        if result["stops_all"]:
            raise MachineError(result["message"]) if exit_code == 1 else HeddleError(result["message"])
    return result


def _spawn(request_file: Path, result_file: Path) -> int:
    """Run a worker and return its exit code; the first signal is forwarded to it, so that it saves."""
    command = [sys.executable, "-m", "heddle.analysis.comparison.worker", str(request_file), str(result_file)]
    with catch_stop_signals() as stop_request:
        process = subprocess.Popen(command, start_new_session=True)
        try:
            forwarded = False
            while process.poll() is None:
                time.sleep(0.05)
                if stop_request.signal_number is not None and not forwarded:
                    process.send_signal(stop_request.signal_number)
                    forwarded = True
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if stop_request.signal_number is not None:
            raise Interrupted(stop_request.signal_number, "ended between two runs; the same command continues")
        return process.returncode
