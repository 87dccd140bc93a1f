"""Whether a device can hold what a training keeps of each parameter: asked before anything is allocated."""

import os
import resource
import sys

import torch

from heddle.errors import MachineError
from heddle.model.distinct_layers import build_distinct_layers, parameter_counts
from heddle.progress import format_amount
from heddle.training.job import TrainingJob
from heddle.training.settings import Settings


def check_memory(job: TrainingJob) -> None:
    """Raise MachineError if the weights of a job, with their gradients and moments, exceed the device's memory."""
    with torch.no_grad():
        parameters, _ = parameter_counts(build_distinct_layers(job.config, torch.float32))
    is_frozen = job.lora is not None or any(factor == 0 for _, factor in job.settings.lr_scale)
    needed, memory = parameters * _least_bytes(job.settings, is_frozen), device_memory(job.device)
    if needed > memory:
        raise MachineError(
            f"design: {format_amount(parameters, 'parameters')} take at least {format_amount(needed, 'bytes')} in "
            f"training, and the device has {format_amount(memory, 'bytes')}; choose smaller sizes"
        )


def _least_bytes(settings: Settings, is_frozen: bool) -> int:
    """Return the fewest bytes that a parameter takes: its weight and, where it is trained, gradient and moments."""
    weight = 2 if settings.precision == "bf16-params" else 4
    return weight if is_frozen else 2 * weight + 4  # one moment of Muon's; AdamW has two


def device_memory(device: str) -> int:
    """Return the bytes of memory that a device has in all."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_process_memory() -> int:
    """The most bytes of memory that this process has held so far; Linux counts KiB, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
