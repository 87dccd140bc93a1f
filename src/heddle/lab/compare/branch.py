"""Branches of a trunk: trainings of several lengths that share all steps before their decay.

With schedule wsd (warmup, stable, decay; Hu et al. 2024) a training of any length is the same up to its decay, so that
several lengths cost one constant part and their decays (Hägele et al. 2024). A branch begins as a copy of the trunk's
newest checkpoint and log, as if it had been interrupted there: from there the loop resumes, bit-equal.
"""

from dataclasses import replace
from pathlib import Path

from heddle.errors import CheckpointError, ConfigError
from heddle.storage.checkpoints import checkpoint_steps, latest_checkpoint, write_checkpoint
from heddle.storage.file_io import read_json_file
from heddle.storage.folder import read_folder
from heddle.storage.lock import RunLock
from heddle.storage.run_log import (
    IDENTITY_KEYS,
    RUN_FILE,
    copy_log,
    first_difference,
    open_run,
    to_plain_json,
    trunk_identity,
)
from heddle.training.job import TrainingJob
from heddle.training.loop import TrainingResult, train


def train_branch(job: TrainingJob, trunk: Path, previous: Path | None = None) -> TrainingResult:
    """Train a job with schedule wsd; the steps before its decay are a separate run in the folder `trunk`.

    The result is bit-equal to `train(job)`. previous: the trunk of a shorter branch with the same settings, which this
    trunk continues; None, or a folder without a checkpoint: start at the first step. The same call resumes
    after an interrupt. Raises ConfigError for several ranks, other schedules, or a warmup that depends on the length or
    outlasts the trunk, and whatever `train` raises.
    """
    settings = job.settings
    if job.ranks.count > 1:
        raise ConfigError(f"ranks: a branch is trained by one process, not {job.ranks.count}; use one rank")
    if settings.schedule != "wsd":
        raise ConfigError(f"schedule {settings.schedule}: branches decay from a constant learning rate; set wsd")
    if settings.warmup is None or settings.warmup > settings.constant_steps:
        raise ConfigError(
            f"warmup {settings.warmup}: branches share their warmup, so it must be a number, and at most the "
            f"{settings.constant_steps} steps before the decay"
        )
    if not checkpoint_steps(job.out):
        budget = replace(job.evaluation, final_tokens=1)  # the loss before the decay is not used
        stable = replace(settings, steps=settings.constant_steps, schedule="constant")
        start = replace(job, settings=stable, out=trunk, evaluation=budget, observer=None)
        if previous is not None and previous != trunk and not checkpoint_steps(trunk):
            _start_from(start, previous)
        train(start)
        _start_from(job, trunk)
    return train(job)


def _start_from(job: TrainingJob, source: Path) -> None:
    """Begin a job's run with the newest checkpoint of another run, if it has one."""
    path = latest_checkpoint(source, "training").path
    if path is None:
        return
    saved, contents = read_json_file(source / RUN_FILE), read_folder(path, "training")
    identity = to_plain_json(job.identity())
    difference = first_difference(trunk_identity(saved), trunk_identity(identity))
    step = int(path.name.removeprefix("step-"))
    if difference or contents.log is None or step > job.settings.steps:
        raise CheckpointError(f"{source}: {job.out} is not a branch of it: {difference or f'it is at step {step}'}")
    environment = {key: value for key, value in saved.items() if key not in IDENTITY_KEYS}
    with RunLock(job.out):
        open_run(job.out, identity, environment)
        copy_log(source, job.out, contents.log)
        tensors = {name: contents.tensors(name) for name in contents.tensor_sets}
        write_checkpoint(job.out, step, tensors=tensors, documents=contents.documents, log=contents.log)
