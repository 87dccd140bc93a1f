"""Build the models of a training job, before the first step: in one process, or sharded over ranks.

On ranks the order is: build, adapters, teacher and frozen parameters, compile, activation checkpointing, shard; then
each rank draws or reads its rows. Where the bits depend on the whole model (adapters, a teacher, weights rounded to
bfloat16), each rank builds the whole model and then shards it.
"""

import copy
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from heddle.distributed.ranks import ONE_PROCESS
from heddle.errors import ConfigError, pip_install
from heddle.model.copies import compiled
from heddle.model.decoder import Decoder, build
from heddle.parts.modules.linear import Linear
from heddle.progress import print_status
from heddle.training.distillation import Teacher
from heddle.training.job import TrainingJob, check_memory
from heddle.training.settings import FLOAT8_MULTIPLE

# FP8 training through torchao: products of `Linear` in float8 (Micikevicius et al. 2022).
#
# Inputs, weights and gradients are scaled and rounded to float8 before each product. The parameters keep their dtype;
# stacked matrices of experts, the head and norms do not use float8.


_CAPABILITY = (8, 9)  # the oldest NVIDIA GPUs (Ada, Hopper) that multiply float8


def float8_copy(model: Decoder) -> Decoder:
    """Return a copy over the same parameters whose `Linear`s multiply in float8. The model stays plain.

    A matrix with a size that is not a multiple of 16 is left out. Raises ConfigError if torchao is missing, if the
    device has no float8, or if the design has no matrix of such sizes.
    """
    convert = _converter()
    reason = device_reason(model.embed.weight.device)
    if reason is not None:
        raise ConfigError(f"fp8: {reason}; leave fp8 out")
    float8_model = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    if not any(_converts(module, path) for path, module in model.named_modules()):
        raise ConfigError(
            f"fp8: no projection of this design has sizes that are multiples of {FLOAT8_MULTIPLE}; leave fp8 out"
        )
    convert(float8_model, module_filter_fn=_converts)
    stacked = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 2)
    if stacked:
        print_status(f"fp8: {stacked:,} weights in stacked matrices, such as experts, are multiplied in bfloat16")
    return float8_model


def device_reason(device: torch.device) -> str | None:
    """Say why a device cannot multiply float8; None if it can."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, and the device is {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"needs compute capability 8.9 (Ada, Hopper) or newer, and this GPU has {'.'.join(map(str, capability))}"
    return None


def _converts(module: nn.Module, path: str) -> bool:
    is_projection = type(module) is Linear and path.rpartition(".")[2] != "router"  # a router is in float32
    sizes = (module.in_features, module.out_features) if isinstance(module, Linear) else ()
    return is_projection and all(size % FLOAT8_MULTIPLE == 0 for size in sizes)


def _converter() -> Callable[..., Any]:
    try:
        convert: Callable[..., Any] = importlib.import_module("torchao.float8").convert_to_float8_training
    except ImportError:
        raise ConfigError(f"fp8: needs torchao; {pip_install('gpu')}, or leave fp8 out") from None
    return convert


class BuiltModels(NamedTuple):
    """model: trained, saved and evaluated. forward_model: runs the steps; the model, or a copy over its parameters."""

    model: Decoder
    forward_model: Decoder
    teacher: Teacher | None


class RankRefusal(NamedTuple):
    """A feature that needs one process: its name, the reason, the remedy, and whether a job uses it."""

    name: str
    reason: str
    remedy: str
    is_needed: Callable[[TrainingJob], bool]


def _compares_layers(job: TrainingJob) -> bool:
    return job.distillation is not None and job.distillation.weights.layers > 0


REFUSED_ON_RANKS = (
    RankRefusal(
        "fp8", "it scales whole matrices, and a rank has only some rows", "leave it out", lambda job: job.settings.fp8
    ),
    RankRefusal(
        "qk_clip",
        "it scales the rows of whole heads, and a rank has only some rows",
        "leave it out",
        lambda job: job.settings.qk_clip is not None,
    ),
    RankRefusal("loss layers", "it runs single layers of a whole model", "compare logits", _compares_layers),
)


def build_models(job: TrainingJob) -> BuiltModels:
    """Build the models of a job, in training mode.

    Raises ConfigError for a design that cannot learn from the data, MachineError if it exceeds the device's memory.
    """
    settings = job.settings
    if job.ranks != ONE_PROCESS:
        return _build_on_ranks(job)
    check_memory(job)
    model = job.build_model().train()
    _check(job, model)
    teacher = job.build_teacher(model)
    if teacher is not None:
        teacher.share_frozen(model)
    forward_model = float8_copy(model) if settings.fp8 else model
    if settings.compile:
        forward_model = compiled(forward_model, whole=True) if settings.whole_graph else compiled(forward_model)
    forward_model.checkpointing = settings.checkpoint_activations
    return BuiltModels(model, forward_model, teacher)


def _check(job: TrainingJob, model: Decoder) -> None:
    job.training_data.check(model)
    if model.encoder_width is not None:
        raise ConfigError(
            "encoder_width: the design reads an encoder output, and this data has none; write your own loop with "
            "heddle.training.step"
        )


def _build_on_ranks(job: TrainingJob) -> BuiltModels:
    from heddle.distributed.sharding import Sharding, initialize_shards, shard_model

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
    """Raise ConfigError for a feature that needs one process."""
    for refusal in REFUSED_ON_RANKS:
        if refusal.is_needed(job):
            raise ConfigError(
                f"{refusal.name}: {refusal.reason}, so it does not work on {job.ranks.count} ranks; "
                f"{refusal.remedy}, or train on one process"
            )
