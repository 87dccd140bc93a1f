"""Options of commands that run on several ranks, and how a process becomes one of them."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from heddle.distributed.ranks import Ranks

DEFAULT_RESTARTS = 3
LAUNCHER = "HEDDLE_LAUNCHER"  # for the ranks that --nproc starts: the process that starts them

Processes = Annotated[
    int | None, typer.Option("--nproc", metavar="N", help="Train on N ranks of this machine, one a GPU. [1]")
]
MaxRestarts = Annotated[
    int, typer.Option("--max-restarts", metavar="N", help="With --nproc: start ranks again after one died.")
]
RankTimeout = Annotated[
    float, typer.Option("--rank-timeout", metavar="SECONDS", help="A rank that lets others wait longer is lost.")
]
ReplicateDegree = Annotated[
    int, typer.Option("--data-parallel-replicate-degree", metavar="N", help="Copies of the model's state.")
]
ShardDegree = Annotated[
    int, typer.Option("--data-parallel-shard-degree", metavar="N", help="Shards of each copy. [-1: the rest]")
]
# Reserved: refused in a sentence unless they are 1.
TensorDegree = Annotated[int, typer.Option("--tensor-parallel-degree", hidden=True)]
PipelineDegree = Annotated[int, typer.Option("--pipeline-parallel-degree", hidden=True)]
ContextDegree = Annotated[int, typer.Option("--context-parallel-degree", hidden=True)]
ExpertDegree = Annotated[int, typer.Option("--expert-parallel-degree", hidden=True)]


def is_rank() -> bool:
    """Whether torchrun, or the launcher of --nproc, started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def is_first_rank() -> bool:
    """Whether this process is the only one, or rank 0."""
    return not is_rank() or os.environ.get("RANK", "0") == "0"


def launch_ranks(arguments: Sequence[str], processes: int | None, max_restarts: int) -> None:
    """Where --nproc asks for several ranks and this process is none: run them, and exit as they do.

    arguments: the whole command line, which each rank runs.
    Raises ConfigError for a bad number, or one that is not torchrun's.
    """
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: must be at least 0")
    if processes is None:
        return
    if processes < 1:
        raise ConfigError(f"--nproc {processes}: must be at least 1")
    if is_rank():
        started = os.environ.get("LOCAL_WORLD_SIZE", str(processes))
        if started != str(processes):
            raise ConfigError(f"--nproc {processes}: torchrun started {started} ranks here; leave --nproc out")
        return
    if processes == 1:
        return
    from heddle.distributed.launcher import launch

    cores = os.cpu_count() or 1
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    raise typer.Exit(launch(arguments, processes, max_restarts))


def enter_ranks(stack: ExitStack, device: str, wait_seconds: float) -> tuple["Ranks", str]:
    """Join the ranks that were started with this process; return them, and this rank's device.

    Where this is the only process, the device stays. Raises ConfigError for a device that several ranks cannot have.
    """
    from heddle.distributed.ranks import ONE_PROCESS

    if wait_seconds <= 0:
        raise ConfigError(f"--rank-timeout {wait_seconds:g}: must be above 0 seconds")
    if not is_rank():
        return ONE_PROCESS, device
    from heddle.distributed.process_group import join_ranks
    from heddle.runtime import device_name

    if device == "mps" or ":" in device:
        raise ConfigError(f"--device {device}: ranks have a device each; give cuda or cpu")
    name = device_name(device)
    local_rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    own_device = f"cuda:{local_rank}" if name == "cuda" else "cpu"
    launcher = int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None
    return stack.enter_context(join_ranks(own_device, wait_seconds, launcher)), own_device
