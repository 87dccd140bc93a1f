"""The models of a training job as they are before the first step: on one process, or sharded over ranks.

On ranks the order is: build, adapters, teacher and what it freezes, compile, recompute, shard; then each rank draws or
reads its rows. Where the bits depend on a whole model (adapters, a teacher, weights rounded to bfloat16), each rank
builds it whole before it is sharded.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from heddle.distributed.ranks import ONE_PROCESS
from heddle.errors import ConfigError
from heddle.model.compiled import compiled
from heddle.model.decoder import Decoder, build
from heddle.training.distillation import Teacher
from heddle.training.float8 import float8_copy
from heddle.training.job import TrainingJob
from heddle.training.memory_limit import check_memory


class BuiltModels(NamedTuple):
    """model: what is trained, saved and evaluated. forward_model: the same or a copy over its parameters, for steps."""

    model: Decoder
    forward_model: Decoder
    teacher: Teacher | None


class RankRefusal(NamedTuple):
    """What only one process can do: its name, the reason, the remedy, and whether a job asks for it."""

    name: str
    reason: str
    remedy: str
    is_needed: Callable[[TrainingJob], bool]


def _compares_layers(job: TrainingJob) -> bool:
    return job.distillation is not None and job.distillation.weights.layers > 0


REFUSED_ON_RANKS = (
    RankRefusal(
        "fp8", "a matrix is scaled as a whole, of which a rank has rows", "leave it out", lambda job: job.settings.fp8
    ),
    RankRefusal("loss layers", "it needs single layers of a whole model", "compare logits", _compares_layers),
)


def build_models(job: TrainingJob) -> BuiltModels:
    """Build the models of a job, in training mode.

    Raises ConfigError for a design that cannot learn from the data, MachineError for one beyond the device's memory.
    """
    settings = job.settings
    if job.ranks != ONE_PROCESS:
        return _build_on_ranks(job)
    check_memory(job)
    model = job.build_model().train()
    _check(job, model)
    teacher = job.build_teacher(model)
    forward_model = float8_copy(model) if settings.fp8 else model
    forward_model = compiled(forward_model) if settings.compile else forward_model
    forward_model.checkpointing = settings.checkpoint_activations
    return BuiltModels(model, forward_model, teacher)


def _check(job: TrainingJob, model: Decoder) -> None:
    job.training_data.check(model)
    if model.encoder_width is not None:
        raise ConfigError(
            "encoder_width: the design reads an encoder output, and this data has none; write a loop of your own with "
            "heddle.training.step"
        )


def _build_on_ranks(job: TrainingJob) -> BuiltModels:
    from heddle.distributed.first_weights import initialize_shards
    from heddle.distributed.sharding import Sharding, shard_model

    settings, is_plain = job.settings, job.lora is None and job.distillation is None
    _refuse_on_ranks(job)
    fills_shards = is_plain and settings.precision != "bf16-params"
    model = build(job.width_transfer.config, device="meta") if fills_shards else job.build_model()
    _check(job, model)
    teacher = job.build_teacher(model)
    model = compiled(model) if settings.compile else model
    model.checkpointing = settings.checkpoint_activations
    reduce_dtype = torch.float32 if settings.precision == "bf16-params" else None
    shard_model(model, job.degrees.mesh(job.ranks, job.device), Sharding(reduce_dtype=reduce_dtype))
    if fills_shards and job.init_checkpoint is not None:
        job.init_checkpoint.load_shards(model, job.device, job.ranks)
    elif fills_shards:
        initialize_shards(model, settings.seed, job.device)
        job.width_transfer.scale_weights(model)
    return BuiltModels(model.train(), model, teacher)


def _refuse_on_ranks(job: TrainingJob) -> None:
    """Raise ConfigError for what only one process can do."""
    for refusal in REFUSED_ON_RANKS:
        if refusal.is_needed(job):
            raise ConfigError(
                f"{refusal.name}: {refusal.reason}, and there are {job.ranks.count} ranks; {refusal.remedy}, or train "
                "on one process"
            )
