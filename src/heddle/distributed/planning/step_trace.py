"""Watches a training step of one rank: memory by component at its peaks, FLOPs of products, bytes of collectives.

It sees every operation that torch dispatches, on real tensors or on fake ones, and the storages that these allocate and
free. What a storage is for follows from the operations of FSDP2 that read or write it; all else is activations, or
belongs to the loss if it was allocated between the last layer's forward and backward pass.
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from heddle.distributed.planning.attention_shapes import AttentionShapes
from heddle.distributed.ranks import as_sharded, local_part

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


class StepTrace(TorchDispatchMode):
    """Within the block, notes what operations allocate, compute and send.

    peaks: bytes by component where they are most in total, by the phase of the step. flops, collectives: by
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
        self._resized: dict[int, None] = {}  # gathered weights, whose storages FSDP2 empties and fills
        self._learning: list[nn.Parameter] = []  # gathered weights whose gradients arise now
        self._highest = 0
        self._weights: dict[int, list[nn.Parameter]] = {}  # gathered ones, by layer; −1: those of the root group
        self._backward_layer: int | None = None
        self._attention = AttentionShapes(self._add_attention)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch wraps `__torch_dispatch__` in a function of its compiler, which it then imports."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, and note what it did."""
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it answers with operations on its shards, which come here
        result = function(*args, **kwargs)
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "prim":
            return result
        born_as = self._born_as
        if namespace in ("c10d", "fsdp", "_c10d_functional"):
            born_as = self._note_sharding(name, args, kwargs)
        elif name in _PRODUCTS:
            *_, left, right = (x for x in args if isinstance(x, Tensor))
            self.flops[self.micro_batch] += 2 * left.numel() * right.shape[-1]
        elif function._overloadpacket in flop_registry:
            self.flops[self.micro_batch] += flop_registry[function._overloadpacket](*args, **kwargs, out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._born(tensor, born_as)
        self._note_peak()
        return result

    def label(self, tensors: Iterable[Tensor], name: str) -> None:
        """Say what tensors are for."""
        for tensor in tensors:
            self._born(local_part(tensor.detach()), name, again=True)

    def begin(self, *label: Any, name: str = "activations") -> None:
        """Begin another phase of the step. A label of None: its peak is not noted."""
        self._label, self._born_as, self._highest = label, name, 0
        if label in self.peaks:
            self._highest = sum(self.peaks[label].values())
        self._note_peak()

    def record_layers(self, model: nn.Module, layers: Sequence[nn.Module], labels: Sequence[Any]) -> None:
        """Begin a phase with each layer of a sharded model, in the forward and in the backward pass.

        labels: of the layers. None: peaks within this layer are not noted.
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
        if self.micro_batch > 1:  # what still exists of an earlier micro-batch
            for key, (component, size, storage) in self._storages.items():
                if component in ("activations", "loss"):
                    self._storages[key] = "gradients in reduction", size, storage
                    self._components[component] -= size
                    self._components["gradients in reduction"] += size
        self.begin("forward", "root")

    def _enter(self, index: int, label: Any, layer: nn.Module, *_: Any) -> None:
        if self.fake_mode is not None:  # for each call of a layer: torch leaves function modes for a backward pass
            self._attention.__enter__()
        if self._backward_layer is None:  # not computed again
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
        """Note a collective, or an operation around one. Returns what its results are for."""
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
        """Note a storage that is new; `again`: that an old one is for something else. Parameters stay what they are."""
        if getattr(tensor, "fake_mode", None) is not self.fake_mode:
            return  # shapes that torch computes aside
        storage = tensor.untyped_storage()
        key = storage._cdata
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
        """Keep the components if there is more in total than ever in this phase."""
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
    """The parameters of a module that learn and are whole at this time."""
    return [p for p in module.parameters() if p.requires_grad and as_sharded(p) is None]


def _ranks(arguments: Sequence[Any]) -> int:
    """The ranks of a collective's group, which is among its arguments, or its name the last of them."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return ProcessGroup.unbox(argument).size()
    return _resolve_process_group(arguments[-1]).size()
