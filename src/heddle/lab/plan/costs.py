"""Costs of one sequence in each layer: FLOPs, parameters, and tensors saved for the backward pass.

Everything is measured on the meta device with the kernels of a GPU; nothing is allocated. Each distinct layer of the
design runs once and is multiplied by its count.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from heddle.errors import ConfigError, choices_hint
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.size import (
    active_parameter_count,
    around_layers,
    build_distinct_layers,
    layer_flops,
    parameter_count,
    parameter_counts,
    stacked_layers,
)
from heddle.numerics.cross_entropy import CHUNK_ELEMENTS
from heddle.numerics.dispatch import record_choices
from heddle.parts.layout import Layout
from heddle.torch_private import TorchDispatchMode, operator_name, storage_key

# GPUs by their makers' data sheets.

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU in a node of eight. Speeds are peaks of the data sheet.

    tflops: dense products in bfloat16, 10^12 FLOP/s. memory: GiB. bandwidth: of its memory, GB/s. link: to
    other GPUs of its node, network: to other nodes, both GB/s in each direction.
    """

    tflops: float
    memory: float
    bandwidth: float
    link: float
    network: float
    gpus_per_node: int = 8


GPUS = {
    "rtx4090": Gpu(tflops=165, memory=23.5, bandwidth=1008, link=32, network=25),  # PCIe 4.0
    "l40s": Gpu(tflops=362, memory=44.4, bandwidth=864, link=32, network=25),
    "a100-40gb": Gpu(tflops=312, memory=39.4, bandwidth=1555, link=300, network=25),
    "a100": Gpu(tflops=312, memory=79.2, bandwidth=2039, link=300, network=25),
    "h100": Gpu(tflops=989, memory=79.2, bandwidth=3350, link=450, network=50),
    "h800": Gpu(tflops=989, memory=79.2, bandwidth=3350, link=200, network=50),
    "h200": Gpu(tflops=989, memory=139.8, bandwidth=4800, link=450, network=50),
    "b200": Gpu(tflops=2250, memory=178.4, bandwidth=8000, link=900, network=50),
}


def find_gpu(name: str) -> Gpu:
    """Look up a GPU by name. Raises ConfigError for an unknown one."""
    if name not in GPUS:
        raise ConfigError(f"gpu {name}: unknown GPU; {choices_hint(name, GPUS)}")
    return GPUS[name]


# A stand-in for the fused attention of a GPU: it saves what the kernel saves, and computes nothing.


BACKWARD_ATTENTION = 2.5  # FLOPs of the backward over the forward pass: scores are recomputed


class AttentionShapes(TorchFunctionMode):
    """Within the block, `scaled_dot_product_attention` saves queries, keys, values, output and log-sum-exp.

    note(output, FLOPs) is called for each forward pass, note(None, FLOPs) for each backward pass. A causal call counts
    half of its pairs.
    """

    def __init__(self, note: Callable[[Tensor | None, float], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept attention, and leave the rest to torch."""
        if function is not functional.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        q, k, v = args[:3]
        pairs = q.shape[-2] * k.shape[-2] * (0.5 if (kwargs or {}).get("is_causal") else 1.0)
        flops = 2.0 * q.shape[:-2].numel() * pairs * (q.shape[-1] + v.shape[-1])
        return _FusedAttention.apply(q, k, v, flops, self.note)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: float, note: Any) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        ctx.flops, ctx.note = flops, note
        note(out, flops)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.note(None, BACKWARD_ATTENTION * ctx.flops)
        return *(torch.empty_like(x) for x in ctx.saved_tensors[:3]), None, None


BF16_BYTES = 2
PRODUCTS = {"addmm", "baddbmm", "bmm", "mm", "linear"}


@dataclass(frozen=True)
class LayerCost:
    """One of `count` equal layers. FLOPs and bytes are for the forward pass of one sequence.

    weights: how many of them have their own parameters. looped: the others reuse them; the parameters are in the root.
    attention_flops: the part that grows with the square of the length. saved_bytes: what the backward pass needs, in
    bfloat16. product_bytes: the outputs of every second product and of attention, which selective recomputation keeps.
    input_bytes: the layer's input, which full recomputation keeps.
    """

    count: int
    weights: int
    looped: bool
    parameters: int
    active_parameters: int
    flops: float
    attention_flops: float
    saved_bytes: int
    product_bytes: int
    input_bytes: int


@dataclass(frozen=True)
class ModelCost:
    """The layers with multi-token modules, and the `root`: embedding, last norm, head and looped weights."""

    layers: tuple[LayerCost, ...]
    parameters: int
    active_parameters: int
    root_parameters: int
    head_flops: float
    vocab_size: int
    width: int
    sequence_length: int
    multi_token_parameters: int = 0

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass of one sequence in training, causal pairs only, with the head."""
        return self.head_flops + sum(layer.count * layer.flops for layer in self.layers)

    @property
    def attention_flops(self) -> float:
        """The part of `forward_flops` that grows with the square of the length."""
        return sum(layer.count * layer.attention_flops for layer in self.layers)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max((layer.parameters for layer in self.layers if not layer.looped), default=0)


@dataclass
class _LayerTrace:
    saved: dict[int, tuple[int, Any]] = field(default_factory=dict)
    products: list[int] = field(default_factory=list)
    attention_bytes: int = 0
    input_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        return sum(size for size, _ in self.saved.values())

    @property
    def product_bytes(self) -> int:
        return sum(self.products[::2]) + self.attention_bytes + self.input_bytes


def model_cost(config: ModelConfig, sequence_length: int) -> ModelCost:
    """Measure a design for sequences of `sequence_length` tokens. Raises ConfigError for one with an encoder."""
    vocab_size = check_decoder(config, "a plan")
    model = build_distinct_layers(config, torch.bfloat16)
    parameters, active = parameter_counts(model)
    flops, other_flops = layer_flops(model, sequence_length, training=True)
    traces = _traces(model, sequence_length)
    layers = []
    modules = [(layer.count, layer.weights, layer.looped) for layer in config.distinct_layers]
    modules += [(1, 1, False)] * len(model.multi_token)
    stacked = stacked_layers(model, training=True)
    for (layer, _), (count, weights, looped), row_flops, trace in zip(stacked, modules, flops, traces, strict=True):
        active_size = active_parameter_count(layer)
        linear = 2.0 * active_size * sequence_length
        layers.append(
            LayerCost(
                count=count,
                weights=weights,
                looped=looped,
                parameters=parameter_count(layer),
                active_parameters=active_size,
                flops=row_flops,
                attention_flops=max(0.0, row_flops - linear),
                saved_bytes=trace.saved_bytes,
                product_bytes=min(trace.product_bytes, trace.saved_bytes),
                input_bytes=trace.input_bytes,
            )
        )
    in_layers = sum(layer.count * layer.parameters for layer in layers if not layer.looped)
    return ModelCost(
        layers=tuple(layers),
        parameters=parameters,
        active_parameters=active,
        root_parameters=parameters - in_layers,
        head_flops=other_flops,
        vocab_size=vocab_size,
        width=config.width,
        sequence_length=sequence_length,
        multi_token_parameters=parameter_count(model.multi_token),
    )


def check_decoder(config: ModelConfig, what: str) -> int:
    """The vocabulary of a design; raises ConfigError for one with an encoder or without a vocabulary size."""
    if config.encoder is not None or config.vocab_size is None:
        reason = "vocab_size: is missing" if config.vocab_size is None else f"encoder: {what} covers decoders only"
        raise ConfigError(f"{reason}; give a design without an encoder and with a vocab_size")
    return config.vocab_size


def _traces(model: Decoder, sequence_length: int) -> list[_LayerTrace]:
    """What each distinct layer saves for the backward pass of one sequence."""
    modules = [layer for layer, _ in stacked_layers(model, training=True)]
    traces = [_LayerTrace() for _ in modules]
    current: list[_LayerTrace] = []
    weights = {storage_key(parameter.untyped_storage()) for parameter in model.parameters()}
    streams: dict[int, Any] = {}  # storages of all streams so far: a tensor that passes through layers is kept once
    entering: set[int] = set()

    def enter(index: int, inputs: tuple[Any, ...]) -> None:
        current.append(traces[index])
        stream = inputs[0] if isinstance(inputs[0], tuple) else (inputs[0],)
        storages = {storage_key(x.untyped_storage()): x.untyped_storage() for x in stream}
        traces[index].input_bytes = sum(x.nbytes for x in stream if storage_key(x.untyped_storage()) not in streams)
        streams.update(storages)
        entering.clear()
        entering.update(storages)

    def leave(index: int) -> None:
        current.pop()

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if current and (key := storage_key(storage)) not in weights and x.is_meta:
            if key in entering and any(key in trace.saved for trace in traces if trace is not current[-1]):
                return x
            current[-1].saved.setdefault(key, (storage.nbytes(), storage))
        return x

    def note_attention(output: Tensor | None, _: float) -> None:
        if current and output is not None:
            current[-1].attention_bytes += output.nbytes

    model.train()
    with (
        record_choices("cuda"),
        around_layers(modules, enter, leave),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        _Products(current),
        AttentionShapes(note_attention),
    ):
        tokens = torch.zeros(1, sequence_length, dtype=torch.int64, device="meta")
        layout = Layout.causal(1, sequence_length, device="meta")
        model.predict_ahead(model(tokens, layout)[0], tokens, layout)
    return traces


class _Products(TorchDispatchMode):
    """Notes the bytes of each product's result."""

    def __init__(self, current: list[_LayerTrace]) -> None:
        super().__init__()
        self.current = current

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = operator_name(function).removeprefix("aten::")
        if self.current and name in PRODUCTS and isinstance(result, Tensor):
            self.current[-1].products.append(result.nbytes)
        return result


# How training is split over ranks, with torchtitan's names for the degrees.


Recompute = Literal["none", "selective", "layers"]


@dataclass(frozen=True)
class RankLayout:
    """Data parallelism: `replicate` groups of ranks, each with the whole state in `shard` shards.

    rows: sequences of a micro-batch on each rank. accumulation: micro-batches per step. recompute: what the backward
    pass recomputes: nothing, every second product and all between ("selective", as in torchtitan), or whole layers.
    reshard: whether gathered weights are freed after the forward pass. reduce_bytes: per gradient element when reduced.
    whole_logits: whether the logits of a micro-batch exist at once, as in trainers with an unchunked loss.
    reduce_once: whether gradients of earlier micro-batches stay whole on each rank, and are reduced with the last one.
    """

    replicate: int
    shard: int
    rows: int
    accumulation: int = 1
    recompute: Recompute = "none"
    reshard: bool = True
    reduce_bytes: int = 4
    whole_logits: bool = False
    reduce_once: bool = False

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "rows", "accumulation"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)}: must be at least 1")
        if self.recompute not in get_args(Recompute):
            raise ConfigError(f"recompute {self.recompute}: {choices_hint(self.recompute, get_args(Recompute))}")

    @property
    def gpus(self) -> int:
        """Number of ranks, one per GPU."""
        return self.replicate * self.shard


# Bytes that one rank sends and receives in a step, by collective.


class Collective(NamedTuple):
    """A collective. bytes: of the whole gathered or reduced tensor, over all calls of a step. ranks: of its group."""

    name: str
    bytes: int
    ranks: int

    @property
    def traffic(self) -> float:
        """Bytes over one rank's link in a ring algorithm."""
        passes = 2 if self.name == "all_reduce" else 1
        return passes * self.bytes * (self.ranks - 1) / self.ranks


def collectives(cost: ModelCost, layout: RankLayout) -> tuple[Collective, ...]:
    """All collectives of one step.

    In each micro-batch, layers are gathered for the forward and again for the backward pass, the root group once, in
    bfloat16, and gradients are reduce-scattered, with `reduce_once` only in the last one. Replicas sum shards as often.
    """
    in_layers = cost.parameters - cost.root_parameters
    gathers = 2 if layout.reshard else 1
    reductions = 1 if layout.reduce_once else layout.accumulation
    result = []
    if layout.shard > 1:
        gathered = BF16_BYTES * (gathers * in_layers + cost.root_parameters) * layout.accumulation
        result.append(Collective("all_gather", gathered, layout.shard))
        result.append(Collective("reduce_scatter", reductions * layout.reduce_bytes * cost.parameters, layout.shard))
    if layout.replicate > 1:
        shard = -(-cost.parameters // layout.shard)
        result.append(Collective("all_reduce", reductions * layout.reduce_bytes * shard, layout.replicate))
    return tuple(result)


# Memory of one rank at its peak, by component.
#
# Weights and AdamW's moments are float32, products bfloat16 (FSDP2's mixed precision): 16 bytes a parameter over the
# ranks of a shard group. At any time one layer computes, the next one is gathered, and the root group (embedding, last
# norm, head) stays gathered.


FP32_BYTES = 4
GATHERED_LAYERS = 2  # the layer that computes, and the next one
LOGIT_BYTES = 10  # of a logit in a loss without chunks: log-probability and two gradients, one of them in bfloat16
CHUNK_LOGIT_BYTES = 2 * BF16_BYTES  # of a logit in heddle's loss on a GPU: itself and its gradient


def rank_memory(cost: ModelCost, layout: RankLayout) -> dict[str, int]:
    """Bytes of each component on the rank with the most memory."""
    parameters, tokens = cost.parameters, layout.rows * cost.sequence_length
    shard = -(-parameters // layout.shard)
    gathered = cost.root_parameters + GATHERED_LAYERS * cost.largest_layer
    in_reduction = cost.largest_layer * (BF16_BYTES + layout.reduce_bytes) + cost.root_parameters * BF16_BYTES
    if layout.reduce_once and layout.accumulation > 1:
        in_reduction += parameters * layout.reduce_bytes
    return {
        "parameters": shard * FP32_BYTES,
        "gradients": shard * FP32_BYTES,
        "moments": 2 * shard * FP32_BYTES,
        "gathered weights": gathered * BF16_BYTES,
        "gradients in reduction": in_reduction,
        "activations": layout.rows * saved_for_backward(cost, layout),
        "loss": _loss(cost, layout, tokens),
    }


def saved_for_backward(cost: ModelCost, layout: RankLayout) -> int:
    """Bytes of the activations of one sequence when the backward pass begins, at its largest layer."""
    if layout.recompute == "none":
        return sum(layer.count * layer.saved_bytes for layer in cost.layers)
    by_layer = ((x.input_bytes if layout.recompute == "layers" else x.product_bytes) * x.count for x in cost.layers)
    return sum(by_layer) + max((layer.saved_bytes for layer in cost.layers), default=0)


def _loss(cost: ModelCost, layout: RankLayout, tokens: int) -> int:
    hidden = BF16_BYTES * tokens * cost.width
    if layout.whole_logits:
        return tokens * cost.vocab_size * LOGIT_BYTES + hidden
    chunk = min(CHUNK_ELEMENTS.accelerator, tokens * cost.vocab_size)
    return chunk * CHUNK_LOGIT_BYTES + FP32_BYTES * cost.vocab_size * cost.width + hidden


# Expected time of a step: products, attention, communication and the optimizer.
#
#     products = 3 F / (peak · e · w / (w + w₀)),   attention = 3.5 F / (peak · e_a),   both with another forward pass
#     where layers are recomputed;   step = compute + communication − o · min(compute, communication) + optimizer
#
# w is the model's width: narrow layers spend more of their time between the products. The constants are fitted to
# published training runs (docs/plan/accuracy.md), so they describe what good trainers reached, not what this one will.


OPTIMIZER_BYTES = 32  # read and written for each parameter: weight, gradient, two moments, and again all but one
# Selective recomputation recomputes every second product of a layer: k, the output and up of a Llama layer's seven,
# which are 36 % of its FLOPs from 8B to 405B.
_SELECTIVE = 0.35


@dataclass(frozen=True)
class Speeds:
    """Fractions of a GPU's peaks. half_width: the width at which products reach half of `products`.

    network: of the links' speed. overlap: share of communication hidden behind products.
    """

    products: float
    half_width: float
    attention: float
    network: float
    overlap: float


AMPERE = Speeds(products=0.807, half_width=787.0, attention=0.321, network=1.0, overlap=0.877)
HOPPER = Speeds(products=0.705, half_width=1167.0, attention=0.176, network=1.0, overlap=0.877)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on a rank."""

    products: float
    attention: float
    communication: float
    optimizer: float
    overlap: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        compute = self.products + self.attention
        hidden = self.overlap * min(compute, self.communication)
        return compute + self.communication - hidden + self.optimizer


def fitted_speeds(gpu: Gpu) -> Speeds:
    """The fitted fractions for a GPU: for its generation, or for the latest one with published results."""
    return AMPERE if gpu.tflops < 500 else HOPPER


def step_time(cost: ModelCost, layout: RankLayout, gpu: Gpu, speeds: Speeds | None = None) -> StepTime:
    """The expected time of one step."""
    speeds = speeds or fitted_speeds(gpu)
    rows, peak = layout.rows * layout.accumulation, gpu.tflops * 1e12
    again = {"none": 0.0, "selective": _SELECTIVE, "layers": 1.0}[layout.recompute]
    attention = cost.attention_flops
    linear = cost.forward_flops - attention
    recomputed = linear - cost.head_flops
    efficiency = speeds.products * cost.width / (cost.width + speeds.half_width)
    traffic = 0.0
    for collective in collectives(cost, layout):
        link = gpu.link if layout.gpus <= gpu.gpus_per_node else gpu.network
        traffic += collective.traffic / (link * 1e9 * speeds.network)
    return StepTime(
        products=rows * (3 * linear + again * recomputed) / (peak * efficiency),
        attention=rows * attention * (1 + BACKWARD_ATTENTION + float(again == 1.0)) / (peak * speeds.attention),
        communication=traffic,
        optimizer=OPTIMIZER_BYTES * cost.parameters / layout.shard / (gpu.bandwidth * 1e9),
        overlap=speeds.overlap,
    )


# The layouts of ranks for a design and a number of GPUs, fastest first, and layouts that do not fit.

USABLE = 0.92  # of a GPU's memory; the allocator's gaps, NCCL and CUDA take the rest
MAX_ROWS = 64  # of a micro-batch
MAX_GPUS = 2**20
_TRAINER_CHOICES: tuple[Recompute, ...] = ("none", "layers")


@dataclass(frozen=True)
class Candidate:
    """One layout and its costs. memory: bytes by component. time: of one step."""

    layout: RankLayout
    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    time: StepTime
    tokens_per_second: float

    @property
    def bytes(self) -> int:
        """Total memory of the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """candidates: layouts that fit, fastest first. too_large: for each shard degree the layout with the least memory,
    with and without recomputed layers, where it does not fit.
    """

    cost: ModelCost
    gpu: Gpu
    gpus: int
    candidates: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]

    def utilization(self, candidate: Candidate) -> tuple[float, float]:
        """Model FLOPs utilization of a candidate: with causal attention halved, and with full attention counted."""
        forward = self.cost.forward_flops / self.cost.sequence_length
        doubled = forward + self.cost.attention_flops / self.cost.sequence_length
        peak = self.gpu.tflops * 1e12 / candidate.tokens_per_second
        return 3 * forward / peak, 3 * doubled / peak


def plan_training(
    config: ModelConfig, gpu: Gpu, gpus: int, sequence_length: int = 4096, batch_size: int | None = None
) -> Plan:
    """Rank the data-parallel layouts in which heddle trains: whole layers recomputed or none, reduced once a step.

    batch_size: sequences per step on all ranks; None: the fastest in one micro-batch. Raises ConfigError for
    a batch size that is not a multiple of the GPUs.
    """
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length}: must be at least 1")
    _check_counts(gpus, batch_size)
    return rank_layouts(model_cost(config, sequence_length), gpu, gpus, batch_size)


def _check_counts(gpus: int, batch_size: int | None) -> None:
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"gpus {gpus}: must be between 1 and {MAX_GPUS}")
    if batch_size is not None and (batch_size < gpus or batch_size % gpus):
        below, above = batch_size // gpus * gpus, (batch_size // gpus + 1) * gpus
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"batch_size {batch_size}: must be a multiple of the {gpus} GPUs; take {near}")


def rank_layouts(cost: ModelCost, gpu: Gpu, gpus: int, batch_size: int | None = None) -> Plan:
    """`plan_training` for a design whose costs are known."""
    fitting, too_large = [], []
    for shard in _shard_degrees(gpus, gpu.gpus_per_node):
        for recompute in _TRAINER_CHOICES:
            best = leanest = None
            for layout in _layouts(gpus, shard, recompute, batch_size):
                candidate = _candidate(cost, layout, gpu)
                if leanest is None or candidate.bytes < leanest.bytes:
                    leanest = candidate
                if candidate.bytes > USABLE * gpu.memory * GIB:
                    continue
                if best is None or candidate.tokens_per_second > best.tokens_per_second:
                    best = candidate
            if best is not None:
                fitting.append(best)
            if leanest is not None and leanest.bytes > USABLE * gpu.memory * GIB:
                too_large.append(leanest)
    fitting.sort(key=lambda candidate: -candidate.tokens_per_second)
    return Plan(cost, gpu, gpus, tuple(fitting), tuple(too_large))


def _candidate(cost: ModelCost, layout: RankLayout, gpu: Gpu) -> Candidate:
    time = step_time(cost, layout, gpu)
    tokens = layout.rows * layout.accumulation * cost.sequence_length
    return Candidate(
        layout, rank_memory(cost, layout), collectives(cost, layout), time, tokens_per_second=tokens / time.seconds
    )


def _shard_degrees(gpus: int, gpus_per_node: int) -> list[int]:
    """Divisors of the ranks that are whole nodes or parts of one."""
    divisors = [degree for degree in range(1, int(gpus**0.5) + 1) if gpus % degree == 0]
    degrees = sorted({*divisors, *(gpus // degree for degree in divisors)})
    return [
        degree for degree in degrees if degree % gpus_per_node == 0 or gpus_per_node % degree == 0 or degree == gpus
    ]


def _layouts(gpus: int, shard: int, recompute: Recompute, batch_size: int | None) -> Iterator[RankLayout]:
    """Layouts with more and more sequences per micro-batch."""
    rows_of_step = MAX_ROWS if batch_size is None else batch_size // gpus
    rows = 1
    while rows <= min(rows_of_step, MAX_ROWS):
        if batch_size is None or rows_of_step % rows == 0:
            accumulation = 1 if batch_size is None else rows_of_step // rows
            yield RankLayout(gpus // shard, shard, rows, accumulation, recompute, reduce_once=accumulation > 1)
        rows *= 2
