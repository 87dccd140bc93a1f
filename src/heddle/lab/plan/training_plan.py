"""Memory and time of training on many GPUs (computed) or on this CPU (from a timed step): `heddle.plan`."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from heddle.errors import ConfigError, MachineError
from heddle.lab.show import plain_design
from heddle.progress import format_amount, print_status
from heddle.session import load_parts
from heddle.settings import Json, Option, PartFile, VerbSettings, parse_count, parse_length
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.training.settings import Design, Overrides, Settings, TrainSettings

if TYPE_CHECKING:
    from heddle.lab.plan.costs import Candidate, Collective, Plan, RankLayout
    from heddle.model.config import ModelConfig


SEQUENCE_LENGTH = 4096
DEFAULT_GPU, DEFAULT_GPUS = "h100", 8
HALF, FEW_SEQUENCES = 0.5, 8  # from which share, and up to how many sequences of a micro-batch, a limit is named
MORE_GPUS, SHORTEST = 4096, 128  # how many times the GPUs, and how few tokens, are tried where no layout fits
STATE_BYTES = 16  # of a parameter in float32: weight, gradient and two moments


# what the published trainings had, to which the speed is fitted; latent attention's time is products and attention
FITTED_MIXERS = {"attention", "latent_attention"}
FITTED_FEEDFORWARDS = {"gated", "mlp"}
FITTED_GPUS = {"a100", "a100-40gb", "h100", "h800"}
FITTED_PARAMETERS = 125_000_000  # of the smallest


@dataclass(frozen=True, kw_only=True)
class PlanSettings(VerbSettings):
    """Settings of `heddle plan` and `heddle.plan`."""

    design: Design
    overrides: Overrides = ()
    cpu: Annotated[bool, Option("", "Plan for this machine's CPU; times a step.")] = False
    gpus: Annotated[int | None, Option("N", "Number of GPUs. [8]")] = None
    gpu: Annotated[
        str | None,
        Option(
            "NAME",
            "rtx4090 (24 GB), l40s (48), a100-40gb (40), a100, h100 or h800 (80), h200 (141) or b200 (192). [h100]",
        ),
    ] = None
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
    load_parts(settings.part)
    from heddle.lab.plan.costs import find_gpu, plan_training
    from heddle.model.load_config import load_config, read_design, with_vocab_size

    gpu_name, gpus = settings.gpu or DEFAULT_GPU, DEFAULT_GPUS if settings.gpus is None else settings.gpus
    data, gpu = read_design(settings.design, settings.overrides), find_gpu(gpu_name)
    loaded = load_config(data)
    config = with_vocab_size(loaded, DEFAULT_VOCAB_SIZE)
    if settings.batch_size is not None and settings.batch_size < 1:
        raise ConfigError(f"--batch-size {settings.batch_size}: must be at least 1")
    least = (settings.batch_size or (1 if settings.cpu else gpus)) * _length(settings, config)
    if settings.tokens is not None and not least <= settings.tokens < float("inf"):
        raise ConfigError(f"--tokens {settings.tokens:g}: must be a number of at least one step, {least:,} tokens")
    if settings.cpu:
        return PlannedTraining(_cpu_facts(settings, config) | {"vocab_size_assumed": loaded.vocab_size is None})
    result = plan_training(config, gpu, gpus, _length(settings, config), settings.batch_size)
    facts = _facts(result, settings) | {"gpu": gpu_name, "engines": _engine_facts(config, result, settings.design)}
    facts["vocab_size"], facts["vocab_size_assumed"] = config.vocab_size, loaded.vocab_size is None
    facts["nearest"] = [] if result.candidates else _nearest_plans(config, result)
    facts["not_fitted"] = _not_fitted(config, gpu_name, facts["parameters"])
    if settings.dry_run:
        facts["dry_run"] = _dry_run_facts(config, result)
    return PlannedTraining(facts)


def _not_fitted(config: "ModelConfig", gpu: str, parameters: int) -> list[str]:
    """What no published training had whose speed was fitted: kinds, the GPU, a size."""
    mixers = {mixer.kind for mixer, _ in config.equal_layers if mixer is not None}
    feedforwards = {feedforward.kind for _, feedforward in config.equal_layers if feedforward is not None}
    sizes = [f"fewer than {FITTED_PARAMETERS / 1e6:.0f} M parameters"] if parameters < FITTED_PARAMETERS else []
    kinds = [*sorted(mixers - FITTED_MIXERS), *sorted(feedforwards - FITTED_FEEDFORWARDS)]
    return [*kinds, *({gpu} - FITTED_GPUS), *sizes]


def _length(settings: PlanSettings, config: "ModelConfig") -> int:
    usual = config.usual_length(SEQUENCE_LENGTH)
    return usual if settings.sequence_length is None else settings.sequence_length


def _train_command(settings: PlanSettings, **options: Any) -> str | None:
    """The command that trains as planned; None for a design that is in no file."""
    if not isinstance(settings.design, str):
        return None
    tokens = None if settings.tokens is None else int(settings.tokens)
    same = {"design": settings.design, "overrides": settings.overrides, "part": settings.part, "tokens": tokens}
    return TrainSettings(**same | options).command_line("train")


@dataclass(frozen=True)
class CpuChoice:
    """How to train on a CPU. memory: bytes, about: weights, gradients, moments and activations."""

    precision: str
    recompute: bool
    memory: int


def _cpu_facts(settings: PlanSettings, config: "ModelConfig") -> dict[str, Any]:
    """Memory and time of training on this CPU, from timed steps. Bytes, seconds, FLOPs.

    Float32, and bfloat16 if this CPU multiplies it faster, are timed each: without recomputed layers if that fits.
    training_seconds leaves out evaluations and checkpoints. Raises ConfigError for GPU options and invalid
    sizes, MachineError if weights, gradients, moments and activations do not fit.
    """
    for name in ("gpus", "gpu", "dry_run"):
        value = getattr(settings, name)
        if value is not None and value is not False:
            option = name.replace("_", "-") + ("" if value is True else f" {value}")
            raise ConfigError(f"--{option}: is for GPUs, and --cpu asks for this CPU; leave one of them out")
    from heddle.lab.bench.run import measure_limits
    from heddle.lab.compare.probes import RandomText, time_training_steps
    from heddle.machine import TIE, measured_choices
    from heddle.model.decoder import build
    from heddle.model.size import flops_per_token, parameter_count, parameter_counts
    from heddle.runtime import set_up_runtime
    from heddle.training.job import TrainingJob, peak_process_memory

    length, rows = _length(settings, config), settings.batch_size or 1
    timed = Settings(steps=1, batch_size=rows, sequence_length=length)
    model = build(config, device="meta")
    parameters = parameter_counts(model)[0]
    runtime = set_up_runtime("cpu", choices=measured_choices())
    memory, limits = runtime.describe()["memory_bytes"], measure_limits("cpu")
    is_fast = limits["bf16_flops_per_second"] > TIE * limits["fp32_flops_per_second"]
    precisions = ("fp32", "bf16") if is_fast else ("fp32",)
    if STATE_BYTES * parameters > memory:
        raise MachineError(
            f"{settings.design}: weights, gradients and AdamW's moments take "
            f"{format_amount(STATE_BYTES * parameters, 'bytes')}, and this machine has "
            f"{format_amount(memory, 'bytes')}; choose a smaller design: "
            f"{format_amount(memory // STATE_BYTES, 'parameters')} fit"
        )
    choices = _cpu_choices(config, parameters, length, rows, precisions)
    if all(choice.memory > memory for choice in choices):
        least = min(choice.memory for choice in choices)
        raise MachineError(
            f"{settings.design}: a step of {rows} x {length:,} tokens takes about {format_amount(least, 'bytes')}, "
            f"also with recomputed layers, and this machine has {format_amount(memory, 'bytes')}; "
            + _nearest_on_cpu(config, parameters, length, rows, precisions, memory)
        )
    plans: list[dict[str, Any]] = []
    for choice in choices:
        plan: dict[str, Any] = {"precision": choice.precision, "recompute": "layers" if choice.recompute else "none"}
        plan |= {"memory_total": choice.memory, "fits": choice.memory <= memory, "step_seconds": None}
        others = [each for each in plans if each["precision"] == choice.precision and each["fits"]]
        if plan["fits"] and not others:  # recomputing takes longer where all activations fit
            kind = f"{choice.precision}{', recomputed layers' * choice.recompute}"
            print_status(f"timing steps of {rows:,} × {length:,} tokens, {kind}; a busy machine takes minutes")
            how = replace(timed, precision=choice.precision, checkpoint_activations=choice.recompute)
            with TemporaryDirectory(prefix="heddle-") as folder:
                text, out = RandomText(config.vocab_size or 1, length), Path(folder)
                job = TrainingJob(config=config, source=text, settings=how, out=out, device="cpu", label="plan")
                times = time_training_steps(job)
            plan |= {"step_seconds": statistics.median(times), "timed_steps": len(times)}
        plans.append(plan)
    best = min((plan for plan in plans if plan["step_seconds"]), key=lambda plan: plan["step_seconds"])
    rate, flops = rows * length / best["step_seconds"], 3 * flops_per_token(model, length, training=True)
    return {
        "parameters": parameters,
        "multi_token_parameters": parameter_count(model.multi_token),
        "vocab_size": config.vocab_size,
        "flops_per_token": flops,
        "sequence_length": length,
        "batch_size": rows,
        "tokens_per_step": rows * length,
        "cpu": runtime.describe()["cpu"],
        "threads": runtime.threads,
        **{name: best[name] for name in ("precision", "recompute", "step_seconds", "timed_steps")},
        "tokens_per_second": rate,
        "share_of_products": rate * flops / limits[f"{best['precision']}_flops_per_second"],
        "peak_memory": peak_process_memory(),
        "memory": memory,
        "training_seconds": None if settings.tokens is None else settings.tokens / rate,
        "plans": plans,
        "command": _train_command(
            settings,
            batch_size=rows,
            sequence_length=length,
            precision=best["precision"],
            checkpoint_activations=best["recompute"] == "layers",
            device="cpu",
        ),
    }


def _cpu_choices(
    config: "ModelConfig", parameters: int, length: int, rows: int, precisions: Sequence[str]
) -> list[CpuChoice]:
    """Each precision without and with recomputed layers. Under autocast, weights are kept in bfloat16, too.

    Activations are a layer's in its backward pass, without the loss, which is computed in chunks; for a design with an
    encoder they are unknown and left out.
    """
    from heddle.lab.plan.costs import BF16_BYTES, RankLayout, model_cost, saved_for_backward

    cost = None if config.encoder is not None else model_cost(config, length)
    choices = []
    for precision in precisions:
        wide, weights = (2, 0) if precision == "fp32" else (1, BF16_BYTES)  # the activations are counted in bfloat16
        for recompute in (False, True):
            layout = RankLayout(1, 1, 1, recompute="layers" if recompute else "none")
            saved = 0 if cost is None else rows * saved_for_backward(cost, layout) * wide
            choices.append(CpuChoice(precision, recompute, (STATE_BYTES + weights) * parameters + saved))
    return choices


def _nearest_on_cpu(
    config: "ModelConfig", parameters: int, length: int, rows: int, precisions: Sequence[str], memory: int
) -> str:
    """The nearest plan that fits: fewer sequences, then shorter ones, each halved."""
    while rows > 1 or length > 1:
        rows, length = (rows // 2, length) if rows > 1 else (1, length // 2)
        least = min(_cpu_choices(config, parameters, length, rows, precisions), key=lambda choice: choice.memory)
        if least.memory <= memory:
            fits = f"--batch-size {rows} --sequence-length {length} fits, with about"
            return f"{fits} {format_amount(least.memory, 'bytes')} in {least.precision} with recomputed layers"
    return "choose a smaller design"


def _nearest_plans(config: "ModelConfig", plan: "Plan") -> list[str]:
    """Options with which a layout fits: more GPUs, each time twice as many, or shorter sequences, each time half."""
    from heddle.lab.plan.costs import MAX_GPUS, plan_training, rank_layouts

    found: list[str] = []
    gpus, length = 2 * plan.gpus, plan.cost.sequence_length // 2
    while gpus <= min(MAX_GPUS, MORE_GPUS * plan.gpus) and not found:
        if rank_layouts(plan.cost, plan.gpu, gpus).candidates:
            found.append(f"--gpus {gpus}")
        gpus *= 2
    while length >= SHORTEST:
        if plan_training(config, plan.gpu, plan.gpus, length).candidates:
            return [*found, f"--sequence-length {length}"]
        length //= 2
    return found


def _facts(plan: "Plan", settings: PlanSettings) -> dict[str, Any]:
    """Everything the command prints, as plain data. Bytes, seconds, FLOPs."""
    from heddle.lab.plan.costs import GIB, USABLE

    cost, tokens = plan.cost, settings.tokens
    return {
        "parameters": cost.parameters,
        "active_parameters": cost.active_parameters,
        "multi_token_parameters": cost.multi_token_parameters,
        "flops_per_token": 3 * cost.forward_flops / cost.sequence_length,
        "sequence_length": cost.sequence_length,
        "gpus": plan.gpus,
        "usable_memory": USABLE * plan.gpu.memory * GIB,
        "layouts": [_candidate_facts(plan, candidate, tokens) for candidate in plan.candidates],
        "too_large": [_candidate_facts(plan, candidate, tokens) for candidate in plan.too_large],
        "limits": _limits(plan, plan.candidates[0]) if plan.candidates else [],
        "command": _command_of(settings, plan, plan.candidates[0]) if plan.candidates else None,
    }


def _command_of(settings: PlanSettings, plan: "Plan", candidate: "Candidate") -> str | None:
    """The command that trains in a layout; on several nodes, the same on each, started by torchrun."""
    layout, count = candidate.layout, plan.gpus
    per_node = next(each for each in range(plan.gpu.gpus_per_node, 0, -1) if count % each == 0)
    command = _train_command(
        settings,
        sequence_length=plan.cost.sequence_length,
        batch_size=layout.rows * layout.accumulation * count,
        gradient_accumulation_steps=layout.accumulation,
        checkpoint_activations=layout.recompute == "layers",
        precision="bf16",
        nproc=count if 1 < count == per_node else None,
        data_parallel_replicate_degree=layout.replicate,
        data_parallel_shard_degree=layout.shard if layout.replicate > 1 else TrainSettings.data_parallel_shard_degree,
    )
    if command is None or count == per_node:
        return command
    nodes = f"--nnodes {count // per_node} --nproc-per-node {per_node} --node-rank $NODE_RANK"
    return f"torchrun {nodes} --master-addr $MASTER_ADDR --master-port 29500 -m {command}"


def _limits(plan: "Plan", candidate: "Candidate") -> list[str]:
    """Sentences on what takes most of the memory and time, if sequence length is the reason."""
    from heddle.lab.plan.costs import GIB, USABLE

    layout, memory, time, length = candidate.layout, candidate.memory, candidate.time, plan.cost.sequence_length
    result, usable = [], USABLE * plan.gpu.memory * GIB
    one = memory["activations"] / layout.rows
    if usable < FEW_SEQUENCES * one:
        size, kind = format_amount(one, "bytes"), "" if layout.recompute == "none" else ", with recomputed layers"
        result.append(f"activations limit the micro-batch: one sequence of {length:,} tokens takes {size}{kind}")
    if memory["loss"] > HALF * candidate.bytes:
        result.append(
            f"the loss takes {memory['loss'] / candidate.bytes:.0%} of the memory: logits of "
            f"{plan.cost.vocab_size:,} tokens of the vocabulary"
        )
    if time.attention > HALF * time.seconds:
        result.append(
            f"attention takes {time.attention / time.seconds:.0%} of a step: it grows with the square of "
            f"{length:,} tokens, unless mixers have a window"
        )
    return result


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


def _layout_facts(layout: "RankLayout") -> dict[str, int]:
    return {
        "data_parallel_replicate_degree": layout.replicate,
        "data_parallel_shard_degree": layout.shard,
        "micro_batch_size": layout.rows,
        "accumulation": layout.accumulation,
    }


def _collective_facts(collectives: "Sequence[Collective]") -> list[dict[str, Any]]:
    return [{"name": each.name, "ranks": each.ranks, "bytes": each.bytes} for each in collectives]


def _candidate_facts(plan: "Plan", candidate: "Candidate", tokens: float | None) -> dict[str, Any]:
    layout, time = candidate.layout, candidate.time
    causal, full = plan.utilization(candidate)
    return {
        **_layout_facts(layout),
        "batch_size": layout.rows * layout.accumulation * layout.gpus,
        "tokens_per_step": layout.rows * layout.accumulation * layout.gpus * plan.cost.sequence_length,
        "reduce_once": layout.reduce_once,
        "recompute": layout.recompute,
        "memory": candidate.memory,
        "memory_total": candidate.bytes,
        "collectives": _collective_facts(candidate.collectives),
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
    """Memory and collectives of a traced step in the fastest layout, or if none fits in the smallest one."""
    from heddle.lab.plan.dry_run import dry_run

    leanest = sorted(plan.too_large, key=lambda candidate: candidate.bytes)
    candidate = (*plan.candidates, *leanest)[0]
    result = dry_run(config, candidate.layout, plan.cost.sequence_length)
    return {
        **_layout_facts(candidate.layout),
        "recompute": candidate.layout.recompute,
        "planned_memory": candidate.memory,
        "memory": dict(result.memory),
        "memory_total": sum(result.memory.values()),
        "peak": result.phase,
        "flops": result.flops,
        "collectives": _collective_facts(result.collectives),
        "traced_layers": result.layers,
    }
