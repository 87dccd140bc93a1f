"""Counts kernel launches, bytes and FLOPs of calls on fake tensors: real sizes, no memory, no arithmetic, no GPU.

Each aten call that is no view counts as one launch that reads its inputs and writes its outputs once. The time of a
launch is the largest of bytes / bandwidth, FLOPs / rate and `MIN_KERNEL`; the modelled time of a call is the larger of
the sum of its launches' times and launches × `LAUNCH`. All of it is a lower bound: real kernels reach no peak.

Within `fused` regions (what `torch.compile` gets) neighboring pointwise operations and reductions of one size are one
launch, which reads what was made outside and writes what is read outside.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from heddle.model.decoder import Decoder
from heddle.numerics import cross_entropy
from heddle.numerics.recurrent import fla as fla_library
from heddle.parts.modules.eager import eager_methods

# An H200: bf16 products, float32 products without TF32, copies (published measurements), and one eager launch.
RATES = {torch.bfloat16: 790e12, torch.float16: 790e12, torch.float32: 55e12, torch.float64: 60e12}
BANDWIDTH, LAUNCH, MIN_KERNEL = 4.3e12, 6e-6, 2e-6
# FLOP/s of attention kernels in the forward pass, by (dtype is narrow, has a mask or bias, needs T x S memory).
ATTENTION_RATES = {
    (True, False, False): 480e12,
    (True, True, False): 130e12,
    (True, True, True): 60e12,
    (False, False, False): 25e12,
    (False, True, False): 20e12,
    (False, False, True): 10e12,
    (False, True, True): 10e12,
}
BACKWARD_TIME = 2.7  # of attention, over the forward pass's
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "detach"}
FILLS = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_"}  # read nothing
GATHERS = {"index", "index_select", "gather", "embedding", "_unsafe_index"}  # they read as much as they write
ALONE = {"sort", "topk", "cumsum", "cummax", "nonzero", "scatter", "scatter_add_", "index_put_", "_index_put_impl_",
         "index_add", "index_add_", "scatter_add", "index_copy_", "embedding_dense_backward", "convolution",
         "convolution_backward", "_fused_adamw_"}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "baddbmm_", "addmm_", "_grouped_mm"}


@dataclass
class Launches:
    """What calls cost. `kernel_time` in seconds; `largest`: bytes of the largest tensor made; `peak`: bytes alive."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    kernel_time: float = 0.0
    largest: int = 0
    peak: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    updated: Counter[int] = field(default_factory=Counter)  # launches that read and write so many elements

    @property
    def time(self) -> float:
        """Lower bound of the seconds."""
        return max(self.kernel_time, self.launches * LAUNCH)


def elements(x: Tensor) -> int:
    """The number of distinct elements: an expanded dimension is read once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride or not size else 1
    return count


def tensor_bytes(x: Tensor) -> int:
    return elements(x) * x.element_size()


def product_flops(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    if name not in PRODUCTS:
        return 0
    if name == "_grouped_mm":
        a, out = inputs[0], outputs[0]
        inner = a.shape[-1] if out.dim() == 2 or a.dim() == 3 else a.shape[1]
        return 2 * out.numel() * inner if out.dim() == 2 else 2 * a.shape[0] * inner * out.shape[-1]
    return 2 * outputs[0].numel() * factors(name, inputs)[0].shape[-1]


def factors(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """The two factors of a product, without what it is added to or written to."""
    first = int("add" in name)
    return inputs[first : first + 2]


class LaunchCounter(TorchDispatchMode):
    """Counts what runs within the mode. `fuse` starts and ends a region that `torch.compile` would get."""

    current: ClassVar["LaunchCounter | None"] = None

    def __init__(self) -> None:
        super().__init__()
        self.total = Launches()
        self.live = 0
        self.fused_depth = 0
        self._range_start = 0
        self.fused_nodes: list[tuple[int, int]] = []  # sequence numbers of autograd nodes made within such regions
        self._segment: set[int] = set()  # sizes of the open segment's launches
        self._number = 0  # of the open segment
        self._made: dict[int, tuple[int, int]] = {}  # storage -> (segment, bytes) while nothing outside has read it

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        name = function._schema.name.split("::")[1]
        returns = function._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns) or name == "_unsafe_view"
        if not outputs or is_view or all(x.is_meta for x in outputs):
            return result
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name in FILLS:
            inputs = [x for x in inputs if any(x is y for y in outputs)]
        for x in outputs:
            if not any(x is y for y in inputs):
                self._allocated(x)
        if name not in ALLOCATIONS:
            self._launched(name, [] if name in FILLS else inputs, outputs)
        return result

    def _allocated(self, x: Tensor) -> None:
        size = x.numel() * x.element_size()
        self.total.largest = max(self.total.largest, size)
        self.live += size
        self.total.peak = max(self.total.peak, self.live)
        storage = x.untyped_storage()
        weakref.finalize(storage, self._freed, storage._cdata, size)

    def _freed(self, key: int, size: int) -> None:
        self.live -= size
        self._made.pop(key, None)  # another storage may get this address

    def _launched(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.total.operations[name] += 1
        self.total.updated.update({x.numel() for x in inputs} & {x.numel() for x in outputs})
        flops = product_flops(name, inputs, outputs)
        if self._in_fused_region() and name not in PRODUCTS | ALONE:
            self._fuse(name, inputs, outputs)
            return
        self.end_segment()
        read = outputs if name in GATHERS else inputs
        moved = sum(map(tensor_bytes, [*read, *outputs])) + sum(self._written_out(x) for x in inputs)
        read_by = factors(name, inputs) if name in PRODUCTS else inputs
        dtype = read_by[0].dtype if read_by else outputs[0].dtype
        self.add(1, moved, flops, max(moved / BANDWIDTH, flops / RATES.get(dtype, 55e12), MIN_KERNEL))

    def add(self, launches: int, moved: int, flops: int, seconds: float) -> None:
        """Count launches of a kernel that this mode does not see."""
        self.total.launches += launches
        self.total.bytes += moved
        self.total.flops += flops
        self.total.kernel_time += seconds

    def _in_fused_region(self) -> bool:
        if self.fused_depth:
            return True
        node = torch._C._current_autograd_node()
        if node is None or not self.fused_nodes:
            return False
        number = node._sequence_nr()
        return any(first <= number < last for first, last in self.fused_nodes)

    def _fuse(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        size = max(x.numel() for x in [*inputs, *outputs])
        new = size not in self._segment
        self._segment.add(size)
        moved = 0
        for x in outputs if name in GATHERS else inputs:
            key = x.untyped_storage()._cdata
            if self._made.get(key, (-1, 0))[0] == self._number:
                continue
            moved += tensor_bytes(x) + self._written_out(x)
        for x in outputs:
            self._made[x.untyped_storage()._cdata] = (self._number, tensor_bytes(x))
        self.add(int(new), moved, 0, max(moved / BANDWIDTH, MIN_KERNEL if new else 0.0))

    def _written_out(self, x: Tensor) -> int:
        """Bytes of writing a tensor of an earlier segment, if this is the first launch outside that reads it."""
        return self._made.pop(x.untyped_storage()._cdata, (0, 0))[1]

    def end_segment(self) -> None:
        """What follows is not fused with what came before."""
        self._segment.clear()
        self._number += 1

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as if `torch.compile` had compiled it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.end_segment()
            with self.fuse():
                result = function(*args, **kwargs)
            self.end_segment()
            return result

        return run

    @contextmanager
    def fuse(self) -> Iterator[None]:
        """Within the block, and in the backward pass of what it computes, launches are those of a compiled graph."""
        with self._region(self.fused_depth + 1):
            yield

    def island(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, as if it stayed out of every compiled graph."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.end_segment()
            with self._region(0):
                result = function(*args, **kwargs)
            self.end_segment()
            return result

        return run

    @contextmanager
    def _region(self, depth: int) -> Iterator[None]:
        self._end_range()
        previous, self.fused_depth = self.fused_depth, depth
        try:
            yield
        finally:
            self._end_range()
            self.fused_depth = previous

    def _end_range(self) -> None:
        """Autograd nodes that were made since the last call belong to the region that ends here, or begins to rest."""
        now = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self.fused_depth:
            self.fused_nodes.append((self._range_start, now))
        self._range_start = now


class _Attention(torch.autograd.Function):
    """Stands in for a fused attention kernel: shapes only; the counter gets its launches."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, counter: LaunchCounter, cost: tuple[int, int, float]) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.counter, ctx.cost = counter, cost
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        moved, flops, seconds = ctx.cost
        ctx.counter.end_segment()
        ctx.counter.add(2, 3 * moved, round(2.5 * flops), BACKWARD_TIME * seconds)
        return *(torch.empty_like(x) for x in (q, k, v)), None, None


def attend(counter: LaunchCounter, qkv: tuple[Tensor, Tensor, Tensor], pairs: float, rate: float) -> Tensor:
    """One fused attention kernel over `pairs` (query, key) pairs per head, at a rate in FLOP/s."""
    q, k, v = qkv
    heads = q.shape[0] * q.shape[1] if q.dim() == 4 else q.shape[1]
    flops = round(2 * heads * pairs * (q.shape[-1] + v.shape[-1]))
    moved = sum(map(tensor_bytes, qkv)) + q.numel() // q.shape[-1] * v.shape[-1] * q.element_size()
    seconds = max(flops / rate, moved / BANDWIDTH, 2 * MIN_KERNEL)
    counter.end_segment()
    counter.add(1, moved, flops, seconds)
    counter.total.operations["attention"] += 1
    y: Tensor = _Attention.apply(q, k, v, counter, (moved, flops, seconds))
    return y


class StandIns(TorchFunctionMode):
    """Answers calls that have no kernel for fake tensors on a simulated GPU: `stand_ins[function](*args)`."""

    def __init__(self, stand_ins: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.stand_ins = stand_ins

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = self.stand_ins.get(function, function)
        return stand_in(*args, **(kwargs or {}))


def without_pages() -> StandIns:
    """Within the mode tensors pass `pin_memory` as they are: fake ones have no memory."""
    return StandIns({Tensor.pin_memory: lambda x, *_: x})


def sdpa(counter: LaunchCounter) -> Callable[..., Tensor]:
    """torch's scaled_dot_product_attention: which of its kernels serves decides the rate, and T x S memory."""

    def call(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **options: Any
    ) -> Tensor:
        narrow, masked = q.dtype in (torch.bfloat16, torch.float16), attn_mask is not None
        grouped = q.shape[1] != k.shape[1]
        square = grouped and (masked or not narrow)  # only torch's plain form takes grouped heads with these
        if square:
            counter._allocated(torch.empty(*q.shape[:3], k.shape[2], dtype=torch.float32, device=q.device))
        pairs = q.shape[2] * k.shape[2] * (0.5 if is_causal else 1.0)
        return attend(counter, (q, k, v), pairs, ATTENTION_RATES[narrow, masked, square])

    return call


# Functions that heddle compiles on CUDA, by the names under which they are called.
COMPILED = ((cross_entropy, "fused_step"),)


def compile_layers(model: Decoder) -> None:
    """Let each layer count as compiled, and its methods marked `eager` as they are, as `heddle.model.copies` does."""

    def counted(function: Callable[..., Any], in_graph: bool) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            counter = LaunchCounter.current
            assert counter is not None
            return (counter.compiled if in_graph else counter.island)(function)(*args, **kwargs)

        return run

    for module in model.modules():
        for name in eager_methods(module, "cuda"):
            setattr(module, name, counted(getattr(module, name), False))
    for layer in model.layers:
        setattr(layer, "forward", counted(layer.forward, True))  # noqa: B010 - mypy refuses to assign a method


@contextmanager
def counting(compiled: bool = False, fla: bool = False) -> Iterator[LaunchCounter]:
    """Yield a counter of what runs in the block.

    compiled: all of it as one graph of `torch.compile`. fla: with flash-linear-attention installed.
    """
    from tests.accelerator import counted_attention, counted_norms, counted_recurrence  # they count with this module

    counter = LaunchCounter()
    functions: dict[Any, Callable[..., Any]] = {torch.nn.functional.scaled_dot_product_attention: sdpa(counter)}
    functions |= counted_attention.functions(counter) | {torch.nn.functional.rms_norm: counted_norms.rms_norm(counter)}
    patches = counted_attention.patches(counter)
    patches |= {(module, name): counter.compiled(getattr(module, name)) for module, name in COMPILED}
    patches[fla_library, "functions"] = lambda: counted_recurrence.functions(counter) if fla else None
    with ExitStack() as stack:
        for (module, name), replacement in patches.items():
            stack.enter_context(patch.object(module, name, replacement))
        stack.enter_context(patch.object(LaunchCounter, "current", counter))
        stack.enter_context(StandIns(functions))
        stack.enter_context(counter)
        if compiled:
            stack.enter_context(counter.fuse())
        yield counter
