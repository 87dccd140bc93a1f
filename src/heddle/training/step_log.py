"""A step that is queued on a device, and its line of the log once its numbers are read."""

import math
import time
from typing import Any, NamedTuple

import torch

from heddle.data.samples import Batch
from heddle.progress import format_amount
from heddle.training.memory_limit import peak_process_memory
from heddle.training.step_result import StepNumbers, StepResult


class QueuedStep(NamedTuple):
    """number: of the step, from 1. start_time: when the host began to queue it, in time.perf_counter() seconds."""

    number: int
    batch: Batch
    result: StepResult
    learning_rate: float
    start_time: float


def log_line(
    step: QueuedStep, numbers: StepNumbers, tokens: int, metrics: dict[str, float], previous_end: float
) -> dict[str, Any]:
    """Return a step's line of the log. metrics: of its data.

    previous_end: when the numbers of the step before were read. A step that was queued earlier takes its seconds from
    then on.
    """
    return {
        "step": step.number,
        "tokens": tokens,
        "loss": numbers.loss,
        **metrics,
        **numbers.distillation,
        **({"aux_loss": numbers.aux_loss, "experts": numbers.experts} if numbers.experts else {}),
        "gradient_norm": numbers.gradient_norm,
        "learning_rate": step.learning_rate,
        "skipped": numbers.skipped,
        "seconds": round(time.perf_counter() - max(step.start_time, previous_end), 6),
    }


def finite(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line in which numbers that are not finite are None, as JSON has none."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return `peak_memory_bytes` so far: of tensors on a CUDA device, of the whole process on a CPU; else nothing."""
    if device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    return {"peak_memory_bytes": peak_process_memory()} if device.type == "cpu" else {}


def peak_note(line: dict[str, Any]) -> str:
    """Return the text about memory beside the progress bar."""
    peak = line.get("peak_memory_bytes")
    return "" if peak is None else f", {format_amount(peak, 'bytes')} at most"
