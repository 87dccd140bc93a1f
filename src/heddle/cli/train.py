"""`heddle train`: train a design, from new weights or a checkpoint's; the same command again resumes the run."""

import os
from collections.abc import Sequence

import click

from heddle.distributed import LAUNCHER, is_rank
from heddle.errors import ConfigError
from heddle.training.settings import TrainSettings

MAX_RANKS = 1024  # of one machine


def train(settings: TrainSettings) -> None:
    """Train a design; print its bits per byte on held-out text and a generated sample.

    With --data chat:FILE (.jsonl, .parquet or .arrow) it trains on conversations, with a loss on the assistant's text;
    with --data recall:mqar,pairs=8 on a synthetic recall task, and prints the accuracy.
    """
    launch_ranks(click.get_current_context().find_root().obj, settings.nproc, settings.max_restarts)
    from heddle.training.run import train

    train(settings)


def launch_ranks(arguments: Sequence[str], processes: int | None, max_restarts: int) -> None:
    """If --nproc asks for several ranks and this process is not one of them, run them and exit with their code.

    arguments: the whole command line, which each rank runs.
    Raises ConfigError for an invalid number, or one that differs from torchrun's.
    """
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: must be at least 0")
    if processes is None:
        return
    if not 1 <= processes <= MAX_RANKS:
        raise ConfigError(f"--nproc {processes}: must be from 1 to {MAX_RANKS}, one for each GPU of this machine")
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
    raise click.exceptions.Exit(launch(arguments, processes, max_restarts))
