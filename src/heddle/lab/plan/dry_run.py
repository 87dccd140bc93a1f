"""A training step of one rank among many on fake tensors: its memory, FLOPs and collectives.

The step is the trainer's own: FSDP2, the loss, the backward pass, clipping and AdamW, in a fake process group. Long
stacks of equal layers are folded, and the numbers of all layers follow from three and four repeats.
Micro-batches between the first and the last one are equal, so three are run.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import flop_registry

from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks, as_sharded, local_part
from heddle.distributed.sharding import Sharding, shard_model
from heddle.errors import ConfigError
from heddle.lab.plan.costs import AttentionShapes, Collective, RankLayout, check_decoder
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.numerics.attention.flex import by_sdpa
from heddle.numerics.dispatch import record_choices
from heddle.parts.positions import Rotation
from heddle.torch_private import (
    LightDispatchMode,
    fake_store,
    fake_tensors,
    operator_name,
    resolve_group,
    storage_key,
    tree_leaves,
)
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch

# Watches a training step of one rank: memory by component at its peaks, FLOPs of products, bytes of collectives.
#
# It sees every operation that torch dispatches, on real tensors or on fake ones, and the storages that these allocate
# and free. The purpose of a storage follows from the operations of FSDP2 that read or write it; all else is
# activations, or belongs to the loss if it was allocated between the last layer's forward and backward pass.


_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}
_GATHERS = {"all_gather_copy_in", "_allgather_base_", "split_with_sizes_copy"}  # operations on gathered weights
_REDUCTIONS = {"chunk_cat", "_reduce_scatter_base_"}
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather_": "all_gather of sums",
}

Label = tuple[Any, ...]  # a phase of the step: its name, and the layer


class StepTrace(LightDispatchMode):
    """Within the block, records what operations allocate, compute and send.

    peaks: bytes by component at the highest total, by the phase of the step. flops, collectives: by
    micro-batch; collectives also by (name, ranks), in bytes of the whole gathered or reduced tensor.
    """

    def __init__(self, fake_mode: Any = None) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.peaks: dict[Label, dict[str, int]] = {}
        self.flops: Counter[int] = Counter()
        self.collectives: defaultdict[int, Counter[tuple[str, int]]] = defaultdict(Counter)
        self.micro_batch = 0
        self._label: Label = ("start",)
        self._born_as = "activations"
        self._components: Counter[str] = Counter()
        self._storages: dict[int, tuple[str, int, Any]] = {}  # by address: component, bytes, storage
        self._resized: dict[int, None] = {}  # gathered weights: FSDP2 empties and fills their storages
        self._learning: list[nn.Parameter] = []  # gathered weights that get gradients now
        self._highest = 0
        self._weights: dict[int, list[nn.Parameter]] = {}  # gathered ones, by layer; −1: the root group
        self._backward_layer: int | None = None
        self._attention = AttentionShapes(self._add_attention)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and record what it did."""
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it dispatches operations on its shards, which come here
        result = function(*args, **kwargs)
        namespace, _, name = operator_name(function).partition("::")
        if namespace == "prim":
            return result
        born_as = self._born_as
        if namespace in ("c10d", "fsdp", "_c10d_functional"):
            born_as = self._note_sharding(name, args, kwargs)
        elif name in _PRODUCTS:
            *_, left, right = (x for x in args if isinstance(x, Tensor))
            self.flops[self.micro_batch] += 2 * left.numel() * right.shape[-1]
        elif function.overloadpacket in flop_registry:
            self.flops[self.micro_batch] += flop_registry[function.overloadpacket](*args, **kwargs, out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._born(tensor, born_as)
        self._note_peak()
        return result

    def label(self, tensors: Iterable[Tensor], name: str) -> None:
        """Record what tensors are for."""
        for tensor in tensors:
            self._born(local_part(tensor.detach()), name, again=True)

    def begin(self, *label: Any, name: str = "activations") -> None:
        """Begin another phase of the step; with the label None its peak is not recorded."""
        self._label, self._born_as, self._highest = label, name, 0
        if label in self.peaks:
            self._highest = sum(self.peaks[label].values())
        self._note_peak()

    def record_layers(self, model: nn.Module, layers: Sequence[nn.Module], labels: Sequence[Any]) -> None:
        """Begin a phase with each layer of a sharded model, in the forward and in the backward pass.

        labels: by layer. None: peaks within this layer are not recorded.
        """
        model.register_forward_pre_hook(lambda *_: self._count_micro_batch(), prepend=True)
        model.register_forward_pre_hook(lambda *_: self._enter_model(model))  # the root group is gathered
        for index, (layer, label) in enumerate(zip(layers, labels, strict=True)):
            layer.register_forward_pre_hook(partial(self._enter, index, label))
            layer.register_forward_hook(partial(self._leave, index, label), always_call=True)

    def _count_micro_batch(self) -> None:
        self.micro_batch, self._backward_layer, self._learning = self.micro_batch + 1, None, []

    def _enter_model(self, model: nn.Module) -> None:
        self._weights[-1] = _gathered(model)
        if self.micro_batch > 1:  # what is left of an earlier micro-batch
            for key, (component, size, storage) in self._storages.items():
                if component in ("activations", "loss"):
                    self._storages[key] = "gradients in reduction", size, storage
                    self._components[component] -= size
                    self._components["gradients in reduction"] += size
        self.begin("forward", "root")

    def _enter(self, index: int, label: Any, layer: nn.Module, *_: Any) -> None:
        if self.fake_mode is not None:  # for each call of a layer: torch disables function modes in a backward pass
            self._attention.__enter__()
        if self._backward_layer is None:  # not recomputed
            self._weights[index] = _gathered(layer)
            self.begin("forward", label)

    def _leave(self, index: int, label: Any, _: nn.Module, __: Any, output: Any) -> None:
        if self.fake_mode is not None:
            self._attention.__exit__(None, None, None)
        if self._backward_layer is None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(partial(self._enter_backward, index, label))
            self.begin("loss", "root", name="loss")

    def _enter_backward(self, index: int, label: Any, _: Tensor) -> None:
        if self._backward_layer is None or index < self._backward_layer:
            self._backward_layer, self._learning = index, [*self._weights[-1], *self._weights[index]]
            self.begin("backward", label)

    def _note_sharding(self, name: str, args: Any, kwargs: Any) -> str:
        """Record a collective, or an operation around one. Returns what its results are for."""
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in _GATHERS:
            for tensor in tensors:
                self._born(tensor, "gathered weights", again=True)
        elif name in _REDUCTIONS:
            for tensor in tensors:
                self._born(tensor, "gradients in reduction", again=True)
            if name == "_reduce_scatter_base_":
                self._born(tensors[0], "gradients", again=True)
        if name in _COLLECTIVES:
            size = max(x.nbytes for x in tensors) if name != "allgather_" else sum(x.nbytes for x in tensors[:-1])
            self.collectives[self.micro_batch][_COLLECTIVES[name], _ranks(args)] += size
        return "gathered weights" if name in _GATHERS else self._born_as

    def _add_attention(self, _: Tensor | None, flops: float) -> None:
        self.flops[self.micro_batch] += int(flops)

    def _born(self, tensor: Tensor, component: str, again: bool = False) -> None:
        """Record a new storage; with `again`, an old one that changes its purpose. Parameters stay parameters."""
        if getattr(tensor, "fake_mode", None) is not self.fake_mode:
            return  # torch computes shapes only
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key in self._storages:
            previous, size, _ = self._storages[key]
            if not again or previous in (component, "parameters"):
                return
            self._components[previous] -= size
            self._storages[key] = component, size, self._storages[key][2]
        else:
            size = storage.nbytes()
            self._storages[key] = component, size, weakref.ref(storage)
            weakref.finalize(storage, self._freed, key)
        self._components[component] += size
        if component == "gathered weights":
            self._resized[key] = None

    def _freed(self, key: int) -> None:
        component, size, _ = self._storages.pop(key)
        self._components[component] -= size
        self._resized.pop(key, None)

    def _note_peak(self) -> None:
        """Keep the components if their total is a new peak of this phase."""
        for key in self._resized:
            component, size, reference = self._storages[key]
            now = reference().nbytes()
            if now != size:
                self._components[component] += now - size
                self._storages[key] = component, now, reference
        total = sum(self._components.values())
        if total > self._highest and self._label[-1] is not None:
            self._highest = total
            self.label((p.grad for p in self._learning if p.grad is not None), "gradients in reduction")
            self.peaks[self._label] = {name: size for name, size in self._components.items() if size}


def _gathered(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters of a module that are gathered now."""
    return [p for p in module.parameters() if p.requires_grad and as_sharded(p) is None]


def _ranks(arguments: Sequence[Any]) -> int:
    """The ranks of a collective's group, which is one of its arguments, or named by the last."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return ProcessGroup.unbox(argument).size()
    return resolve_group(arguments[-1]).size()


# Fold a long stack of layers: three repeats of each repeated block are enough to know all of them.
#
# A quantity that each repeat changes by the same amount is that of three repeats, plus for each further one the
# difference that a fourth repeat made. Two would not do: the first layer of a backward pass finds other buffers of
# FSDP2 than the second one, and the last one, at the bottom, holds the most gradients.


_REPEATS = 3  # repeats that stay: the first one, the last one and the one before it
_FEWEST_FOLDED = 8  # fewer repeats take no longer than three plus four


@dataclass(frozen=True)
class Run:
    """A block of layers, each by its kind, and how often it repeats."""

    block: tuple[int, ...]
    count: int

    @property
    def is_long(self) -> bool:
        """Whether a few repeats are run in place of all."""
        return self.count >= _FEWEST_FOLDED


def runs_of(kinds: Sequence[int]) -> list[Run]:
    """Cut a stack of layers into repeated blocks: at each place the block with the longest run of repeats."""
    runs, start = [], 0
    while start < len(kinds):
        best = Run(tuple(kinds[start : start + 1]), 1)
        for length in range(1, (len(kinds) - start) // _FEWEST_FOLDED + 1):
            block, count = tuple(kinds[start : start + length]), 1
            while tuple(kinds[start + count * length : start + (count + 1) * length]) == block:
                count += 1
            if count >= _FEWEST_FOLDED and count * length > best.count * len(best.block):
                best = Run(block, count)
        runs.append(best)
        start += best.count * len(best.block)
    return runs


@dataclass(frozen=True)
class FoldedLayer:
    """A layer of a folded stack. label: its run, its repeat ("first", "inner" or "last"), and its position there.

    Layers of other repeats have no label.
    """

    kind: int
    label: tuple[int, str, int] | None


def folded(runs: Sequence[Run], extra: int | None = None) -> list[FoldedLayer]:
    """The layers with folded runs repeated three times, or four times for the run of index `extra`."""
    layers = []
    for number, run in enumerate(runs):
        repeats = (_REPEATS + int(number == extra)) if run.is_long else run.count
        for repeat in range(repeats):
            for position, kind in enumerate(run.block):
                names = {0: "first", repeats - 2: "inner", repeats - 1: "last"}
                name = names.get(repeat) if run.is_long else str(repeat)
                layers.append(FoldedLayer(kind, None if name is None else (number, name, position)))
    return layers


def extrapolate(runs: Sequence[Run], base: float, with_extra: Callable[[int], float]) -> float:
    """A quantity of all layers, from its values for the folded ones and for the ones with one run longer."""
    further = ((index, run.count - _REPEATS) for index, run in enumerate(runs) if run.is_long)
    return base + sum(count * (with_extra(index) - base) for index, count in further)


# A fake process group and fake tensors: one process acts as a rank among many, and computes only shapes.


@contextmanager
def fake_ranks(layout: RankLayout) -> Iterator[DeviceMesh]:
    """The mesh of a layout, in a fake process group of as many ranks, with this process as rank 0.

    Raises ConfigError within a process group.
    """
    if distributed.is_initialized():
        raise ConfigError("dry run: cannot run within a process group; leave torchrun out")
    distributed.init_process_group("fake", store=fake_store(), rank=0, world_size=layout.gpus)
    try:
        shape: tuple[int, ...] = (layout.shard,)
        names: tuple[str, ...] = ("shard",)
        if layout.replicate > 1:
            shape, names = (layout.replicate, *shape), ("replicate", *names)
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        distributed.destroy_process_group()


_MICRO_BATCHES = 3  # the first, one like all between, and the last


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step.

    memory: bytes by component at the highest total. phase: when that is, such as "backward". flops: of
    products and attention, backward pass and recomputed layers included. collectives: as in a plan. layers: how many
    were run.
    """

    memory: Mapping[str, int]
    phase: str
    flops: int
    collectives: tuple[Collective, ...]
    layers: int


def dry_run(config: ModelConfig, layout: RankLayout, sequence_length: int, fold: bool = True) -> DryRun:
    """Run a step of the trainer on fake tensors. fold: whether three and four of many equal layers are run.

    All layers are run if the stream grows from layer to layer, or layers share weights. Raises ConfigError for a
    layout that the trainer does not offer, and within a process group.
    """
    _check(config, layout)
    fold = fold and not config.residual.stream_grows and not config.is_looped
    runs = runs_of(config.layer_order) if fold else [Run((kind,), 1) for kind in config.layer_order]
    longer = {index: folded(runs, index) for index, run in enumerate(runs) if run.is_long}
    with fake_ranks(layout) as mesh:

        def traced(layers: Sequence[FoldedLayer]) -> StepTrace:
            return _traced(_with_layers(config, layers), mesh, layout, sequence_length, [x.label for x in layers])

        base = traced(folded(runs))
        traces = {index: traced(layers) for index, layers in longer.items()}

    def of_all(number: Callable[[StepTrace], float]) -> int:
        return round(extrapolate(runs, number(base), lambda index: number(traces[index])))

    repeats = _repeats(layout.accumulation)
    peaks = {
        label: {name: of_all(partial(_bytes_at, label, name)) for name in peak} for label, peak in base.peaks.items()
    }
    highest = max(peaks, key=lambda label: sum(peaks[label].values()))
    names = dict.fromkeys(name for counter in base.collectives.values() for name in counter)
    return DryRun(
        memory=peaks[highest],
        phase=str(highest[0]),
        flops=of_all(partial(_flops, repeats)),
        collectives=tuple(Collective(name[0], of_all(partial(_sent, repeats, name)), name[1]) for name in names),
        layers=sum(map(len, (folded(runs), *longer.values()))),
    )


def _bytes_at(label: Label, component: str, trace: StepTrace) -> int:
    return trace.peaks[label].get(component, 0)


def _flops(repeats: Mapping[int, int], trace: StepTrace) -> int:
    return sum(count * trace.flops[index] for index, count in repeats.items())


def _sent(repeats: Mapping[int, int], collective: tuple[str, int], trace: StepTrace) -> int:
    return sum(count * trace.collectives[index][collective] for index, count in repeats.items())


def _check(config: ModelConfig, layout: RankLayout) -> None:
    check_decoder(config, "a dry run")
    if config.multi_token is not None:
        raise ConfigError("multi_token: a dry run covers designs without modules; leave multi_token out of it")
    if layout.recompute == "selective" or layout.whole_logits or (layout.accumulation > 1 and not layout.reduce_once):
        raise ConfigError(f"{layout}: the trainer recomputes whole layers, chunks the loss and reduces once")


def _repeats(accumulation: int) -> dict[int, int]:
    """How many micro-batches each one that is run represents, by its number from 1."""
    last = min(accumulation, _MICRO_BATCHES)
    return {index: accumulation - 2 if (index, last) == (2, 3) else 1 for index in range(1, last + 1)}


def _with_layers(config: ModelConfig, layers: Sequence[FoldedLayer]) -> ModelConfig:
    if config.is_looped:  # none is folded
        return config
    kinds = [distinct.config for distinct in config.distinct_layers]
    entries = (LayerConfig(mixer=kinds[x.kind].mixer, feedforward=kinds[x.kind].feedforward) for x in layers)
    return config.replace(layers=tuple(entries))


def _traced(
    config: ModelConfig, mesh: Any, layout: RankLayout, sequence_length: int, labels: Sequence[object]
) -> StepTrace:
    """A step after one that has allocated the moments."""
    model = build(config, device="meta")
    for module in model.modules():
        if isinstance(module, Rotation):
            module.prepare_length(sequence_length)
    sharding = Sharding(torch.bfloat16, torch.float32 if layout.reduce_bytes == 4 else None, layout.reshard)
    shard_model(model, mesh, sharding)
    ranks = Ranks(0, layout.gpus)
    fake = fake_tensors()
    with fake, record_choices("cuda"), by_sdpa():
        model.to_empty(device="cpu")
        model.tie()
        model.train()
        model.checkpointing = layout.recompute == "layers"
        optimizer = build_optimizer(model, weight_decay=0.1)
        trace = StepTrace(fake)
        trace.record_layers(model, list(model.layers), labels)
        batch = prepare_batch(_batch(layout, sequence_length), "cpu", min(layout.accumulation, _MICRO_BATCHES))
        with trace:
            trace.begin("start", None)
            trace.label(model.parameters(), "parameters")
            _allocate_moments(optimizer, trace)
            result = accumulate_gradients(model, batch._replace(ranks=ranks), (0, 0))
            trace.begin("optimizer", "root")
            trace.begin("update", None)  # it allocates nothing, but DTensor computes shapes of whole parameters
            apply_gradients(model, optimizer, result, 0.0, 1.0)
    return trace


def _batch(layout: RankLayout, sequence_length: int) -> Batch:
    """One document in each row of this rank."""
    rows = layout.rows * min(layout.accumulation, _MICRO_BATCHES)
    tokens = np.zeros((rows, sequence_length + 1), np.int64)
    return Batch(tokens, ((sequence_length,),) * rows, np.arange(rows))


def _allocate_moments(optimizer: Optimizer, trace: StepTrace) -> None:
    for parameter in optimizer.trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.0)
    trace.label((tensor for state in optimizer.state.values() for tensor in state.values()), "moments")
