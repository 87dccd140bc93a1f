"""What training takes on many GPUs (computed) or on this CPU (from a timed step): `heddle.plan`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from heddle.errors import ConfigError, MachineError
from heddle.lab.plan.gpus import GIB, find_gpu
from heddle.lab.show import plain_design
from heddle.progress import format_amount
from heddle.session import load_parts
from heddle.settings import Json, Option, PartFile, VerbSettings, parse_count, parse_length
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Design, Overrides, Settings

if TYPE_CHECKING:
    from heddle.lab.plan.costs import Candidate, Plan
    from heddle.model.config import ModelConfig


SEQUENCE_LENGTH = 4096
STATE_BYTES = 16  # of a parameter in float32: weight, gradient and two moments


FITTED_MIXERS = {"attention", "latent_attention"}  # whose time is that of products and attention kernels


@dataclass(frozen=True, kw_only=True)
class PlanSettings(VerbSettings):
    """Settings of `heddle plan` and `heddle.plan`."""

    design: Design
    overrides: Overrides = ()
    cpu: Annotated[bool, Option("", "Plan for this machine's CPU; times a step.")] = False
    gpus: Annotated[int, Option("N", "Number of GPUs.")] = 8
    gpu: Annotated[str, Option("NAME", "rtx4090, l40s, a100-40gb, a100, h100, h800, h200 or b200.")] = "h100"
    sequence_length: Annotated[
        int | None, Option("N", "Tokens per sequence. [4096, or fewer learned positions]", parse_length)
    ] = None
    batch_size: Annotated[int | None, Option("N", "Sequences per step on all GPUs. [one micro-batch on each]")] = None
    tokens: Annotated[
        float | None,
        Option("N", "Training tokens, such as 20B, to estimate the time.", partial(parse_count, unit_name="tokens")),
    ] = None
    dry_run: Annotated[bool, Option("", "Also trace a step of the first layout on fake tensors.")] = False
    part: PartFile = ()
    json: Json = False


@dataclass(frozen=True)
class PlannedTraining:
    """Layouts of a training on many GPUs, or its time on this CPU. facts: what `heddle plan --json` prints."""

    facts: dict[str, Any]


def plan(
    design: "PlanSettings | ModelConfig | str | Path | Mapping[str, Any]", overrides: Sequence[str] = (), **options: Any
) -> PlannedTraining:
    """Return what `heddle plan` prints, and print nothing.

    design: a config, plain data, a file, preset:NAME or a folder; or one `PlanSettings`. options: as on the command
    line, such as `gpus=64`. Raises ConfigError for a design that cannot be built, and unknown or invalid options.
    """
    if not isinstance(design, PlanSettings):
        design = PlanSettings.read({"design": plain_design(design), "overrides": list(overrides), **options})
    settings = design
    tokens = settings.tokens
    if tokens is not None and not 0 < tokens < float("inf"):
        raise ConfigError(f"--tokens {tokens}: must be a number above 0, such as 20B")
    load_parts(settings.part)
    from heddle.model.load_config import load_config, read_design, with_vocab_size

    data, gpu = read_design(settings.design, settings.overrides), find_gpu(settings.gpu)
    config = with_vocab_size(load_config(data), DEFAULT_VOCAB_SIZE)
    if settings.cpu:
        return PlannedTraining(_cpu_facts(settings, config))
    from heddle.lab.plan.costs import plan_training

    result = plan_training(config, gpu, settings.gpus, _length(settings, config), settings.batch_size)
    facts = _facts(result, settings.gpu, tokens) | {"engines": _engine_facts(config, result, settings.design)}
    kinds = {mixer.kind for mixer, _ in config.equal_layers if mixer is not None}
    facts["not_fitted"] = sorted(kinds - FITTED_MIXERS)
    if settings.dry_run:
        facts["dry_run"] = _dry_run_facts(config, result)
    return PlannedTraining(facts)


def _length(settings: PlanSettings, config: "ModelConfig") -> int:
    usual = config.usual_length(SEQUENCE_LENGTH)
    return usual if settings.sequence_length is None else settings.sequence_length


def _cpu_facts(settings: PlanSettings, config: "ModelConfig") -> dict[str, Any]:
    """What training in float32 takes on this CPU, from timed steps. Bytes, seconds, FLOPs.

    training_seconds leaves out evaluations and checkpoints. Raises ConfigError for GPU options and invalid
    sizes, MachineError if weights, gradients, moments and activations do not fit.
    """
    for name in ("gpus", "gpu", "dry_run"):
        value = getattr(settings, name)
        if value != getattr(PlanSettings(design=settings.design), name):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {value}: is for GPUs, and --cpu asks for this CPU; leave one of them out")
    from heddle.lab.bench.run import measure_limits
    from heddle.lab.compare.speed import RandomText, time_training_steps
    from heddle.machine import measured_choices
    from heddle.model.decoder import build
    from heddle.model.size import flops_per_token, parameter_count, parameter_counts
    from heddle.runtime import set_up_runtime
    from heddle.training.job import TrainingJob, peak_process_memory

    length, rows = _length(settings, config), settings.batch_size or 1
    timed = Settings(steps=1, batch_size=rows, sequence_length=length)
    model = build(config, device="meta")
    parameters = parameter_counts(model)[0]
    runtime = set_up_runtime("cpu", choices=measured_choices())
    memory, least = runtime.describe()["memory_bytes"], STATE_BYTES * parameters
    activations = rows * _activation_bytes(config, length)
    if least > memory:
        raise MachineError(
            f"{settings.design}: weights, gradients and AdamW's moments take {format_amount(least, 'bytes')}, and this "
            f"machine has {format_amount(memory, 'bytes')}; choose a smaller design"
        )
    if least + activations > memory:
        raise MachineError(
            f"{settings.design}: a step of {rows} x {length:,} tokens takes about "
            f"{format_amount(least + activations, 'bytes')}, mostly for activations, and this machine has "
            f"{format_amount(memory, 'bytes')}; give a smaller --batch-size or "
            "--sequence-length; heddle train --checkpoint-activations keeps less"
        )
    with TemporaryDirectory(prefix="heddle-") as folder:
        text = RandomText(config.vocab_size or 1, length)
        job = TrainingJob(config=config, source=text, settings=timed, out=Path(folder), device="cpu", label="plan")
        times = time_training_steps(job)
    seconds, flops = statistics.median(times), 3 * flops_per_token(model, length, training=True)
    products = measure_limits("cpu")["fp32_flops_per_second"]
    rate = rows * length / seconds
    return {
        "parameters": parameters,
        "multi_token_parameters": parameter_count(model.multi_token),
        "flops_per_token": flops,
        "sequence_length": length,
        "batch_size": rows,
        "cpu": runtime.describe()["cpu"],
        "threads": runtime.threads,
        "step_seconds": seconds,
        "timed_steps": len(times),
        "tokens_per_second": rate,
        "share_of_products": rate * flops / products,
        "peak_memory": peak_process_memory(),
        "memory": memory,
        "training_seconds": None if settings.tokens is None else settings.tokens / rate,
    }


def _activation_bytes(config: "ModelConfig", length: int) -> int:
    """Bytes that the backward pass of one sequence needs, in float32, without the loss, which is computed in chunks."""
    from heddle.lab.plan.costs import RankLayout, model_cost, saved_for_backward

    if config.encoder is not None:
        return 0  # unknown before a step
    return 2 * saved_for_backward(model_cost(config, length), RankLayout(1, 1, 1))  # in bfloat16, hence 2 ×


def _facts(plan: "Plan", gpu: str, tokens: float | None) -> dict[str, Any]:
    """Everything the command prints, as plain data. Bytes, seconds, FLOPs."""
    from heddle.lab.plan.costs import USABLE

    cost = plan.cost
    return {
        "parameters": cost.parameters,
        "active_parameters": cost.active_parameters,
        "multi_token_parameters": cost.multi_token_parameters,
        "flops_per_token": 3 * cost.forward_flops / cost.sequence_length,
        "sequence_length": cost.sequence_length,
        "gpus": plan.gpus,
        "gpu": gpu,
        "usable_memory": USABLE * plan.gpu.memory * GIB,
        "layouts": [_candidate_facts(plan, candidate, tokens) for candidate in plan.candidates],
        "too_large": [_candidate_facts(plan, candidate, tokens) for candidate in plan.too_large],
    }


def _engine_facts(config: "ModelConfig", plan: "Plan", design: Any) -> list[dict[str, Any]]:
    """What engines allocate for the state of one sequence of the training's length, in bfloat16."""
    import torch

    from heddle.exchange.imported_checkpoint import imported_family
    from heddle.lab.engines import engine_states
    from heddle.model.size import build_distinct_layers, measure_size

    model = build_distinct_layers(config, torch.bfloat16)
    size = measure_size(model, plan.cost.sequence_length)
    imported = imported_family(design) if isinstance(design, str) else None
    return [
        vars(engine) | {"state_bytes": list(engine.state_bytes)} for engine in engine_states(model, [size], imported)
    ]


def _candidate_facts(plan: "Plan", candidate: "Candidate", tokens: float | None) -> dict[str, Any]:
    layout, time = candidate.layout, candidate.time
    causal, full = plan.utilization(candidate)
    return {
        "data_parallel_replicate_degree": layout.replicate,
        "data_parallel_shard_degree": layout.shard,
        "micro_batch_size": layout.rows,
        "accumulation": layout.accumulation,
        "batch_size": layout.rows * layout.accumulation * layout.gpus,
        "reduce_once": layout.reduce_once,
        "recompute": layout.recompute,
        "memory": candidate.memory,
        "memory_total": candidate.bytes,
        "collectives": [
            {"name": each.name, "ranks": each.ranks, "bytes": each.bytes} for each in candidate.collectives
        ],
        "seconds": {
            "products": time.products,
            "attention": time.attention,
            "communication": time.communication,
            "optimizer": time.optimizer,
            "step": time.seconds,
        },
        "tokens_per_second_per_gpu": candidate.tokens_per_second,
        "mfu": causal,
        "mfu_full_attention": full,
        "training_seconds": None if tokens is None else tokens / candidate.tokens_per_second / layout.gpus,
    }


def _dry_run_facts(config: "ModelConfig", plan: "Plan") -> dict[str, Any]:
    """What a traced step takes in the fastest layout that the trainer offers, or in the leanest if none fits."""
    from heddle.lab.plan.dry_run import dry_run

    leanest = sorted(plan.too_large, key=lambda candidate: candidate.bytes)
    candidate = next(
        each for each in (*plan.candidates, *leanest) if each.layout.accumulation == 1 or each.layout.reduce_once
    )
    result = dry_run(config, candidate.layout, plan.cost.sequence_length)
    return {
        "data_parallel_replicate_degree": candidate.layout.replicate,
        "data_parallel_shard_degree": candidate.layout.shard,
        "micro_batch_size": candidate.layout.rows,
        "accumulation": candidate.layout.accumulation,
        "recompute": candidate.layout.recompute,
        "planned_memory": candidate.memory,
        "memory": dict(result.memory),
        "memory_total": sum(result.memory.values()),
        "peak": result.phase,
        "flops": result.flops,
        "collectives": [{"name": each.name, "ranks": each.ranks, "bytes": each.bytes} for each in result.collectives],
        "traced_layers": result.layers,
    }
