"""Process setup for verbs: device, threads, kernels and the user's own parts."""

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.errors import ConfigError
from heddle.settings import PRECISIONS, SessionSettings

if TYPE_CHECKING:
    from heddle.runtime import Choices, Runtime


# What `heddle.machine` measures, by what needs it.
TRAINING_NEEDS, GENERATION_NEEDS = ("products", "attention", "native"), ("products", "packing", "native")
ALL_NEEDS = ("products", "packing", "attention", "native")


def open_session(
    stack: ExitStack,
    settings: SessionSettings,
    *,
    device: str | None = None,
    kernels: Iterable[str] = (),
    tf32: bool = False,
    deterministic: bool = False,
    choices: "Choices | None" = None,
) -> "Runtime":
    """Set up the process for a verb; closing `stack` undoes it. device: overrides the settings' device.

    choices: for a CPU's kernels, else the defaults (see `heddle.machine.with_measured_choices`).
    """
    from heddle import progress
    from heddle.data.cache import use_own_compile_cache
    from heddle.numerics.kernels import kernels as force_kernels
    from heddle.runtime import DEFAULT_CHOICES, set_up_runtime

    if settings.quiet:
        stack.enter_context(progress.quiet())
    load_parts(settings.part)
    if deterministic:  # cuBLAS reads it when a process first uses the GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # read when the compiler is imported
    use_own_compile_cache()
    name = device or settings.device
    runtime = set_up_runtime(name, settings.threads, tf32, deterministic, choices or DEFAULT_CHOICES)
    if tf32:
        progress.print_status(f"{runtime.device}: float32 matmuls in TF32, with 10 mantissa bits instead of 23")
    stack.enter_context(force_kernels(**parse_kernels(kernels)))
    return runtime


def load_parts(files: Iterable[Path]) -> None:
    """Load the parts that these files define."""
    from heddle.config import load_part

    for file in files:
        load_part(file)


def parse_kernels(kernels: Iterable[str]) -> dict[str, str]:
    """Parse `attention=reference` into a mapping from operation to kernel. Raises ConfigError if there is no `=`."""
    forced = {}
    for text in kernels:
        operation, equals, kernel = text.partition("=")
        if not equals:
            raise ConfigError(f"--kernel {text}: expected operation=kernel, such as attention=reference")
        forced[operation] = kernel
    return forced


def dtype_of(precision: str) -> Any:
    """The torch dtype of a --precision. Raises ConfigError for an unknown precision."""
    import torch

    if precision not in PRECISIONS:
        raise ConfigError(f"--precision {precision}: unknown precision; choices: {', '.join(PRECISIONS)}")
    return torch.float32 if precision == "fp32" else torch.bfloat16
