"""Training on several ranks: process group, sharding and launcher.

Only this package and storage may import `torch.distributed`.
"""

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.distributed.ranks import Ranks


# Whether this process was started as one of several ranks, and how it joins them.

LAUNCHER = "HEDDLE_LAUNCHER"  # id of the process that starts the ranks of --nproc


def is_rank() -> bool:
    """Whether torchrun, or the launcher of --nproc, started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def is_first_rank() -> bool:
    """Whether this process is the only one, or rank 0."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def enter_ranks(stack: ExitStack, device: str, wait_seconds: float) -> tuple["Ranks", str]:
    """Join the ranks that were started with this process; return them, and this rank's device.

    A single process keeps its device. Raises ConfigError for a device that several ranks cannot use.
    """
    from heddle.distributed.ranks import ONE_PROCESS

    if not 0 < wait_seconds < float("inf"):
        raise ConfigError(f"--rank-timeout {wait_seconds:g}: must be above 0 seconds")
    if not is_rank():
        return ONE_PROCESS, device
    from heddle.distributed.process_group import join_ranks
    from heddle.runtime import device_name

    if device == "mps" or ":" in device:
        raise ConfigError(f"--device {device}: each rank has its own device; give cuda or cpu")
    name = device_name(device)
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    own_device = f"cuda:{local_rank}" if name == "cuda" else "cpu"
    launcher = int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None
    return stack.enter_context(join_ranks(own_device, wait_seconds, launcher)), own_device
