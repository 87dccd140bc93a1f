"""Linear map `y = x Wᵀ + b`, which every projection of every part uses.

A weight is stored [out, in], as in torch. With few rows, the time is spent on reading the weight, and torch's usual
kernels reach a fraction of the memory bandwidth. oneDNN reads a copy in its own blocked layout about twice as fast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import count
from typing import Any, Literal, NamedTuple, TypeVar, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter, functional

from heddle.errors import ConfigError
from heddle.numerics import native
from heddle.numerics.dispatch import Kernel, Operation, add_flops, device_type
from heddle.torch_private import can_pack_weights, onednn_product, pack_weight, version_counters

# oneDNN's product with a packed weight, and its form in a graph that is recorded for a compiler.
#
# A compiler cannot hold a weight in oneDNN's own layout, and would pack none by itself. So a recorded graph calls an
# operator that finds the packed weight by its index in a `ProductTable`, which must live as long as the graph.


MAX_PACKED_ROWS = 64  # with more rows a product is bound by arithmetic, and packing gains little
LARGE_ELEMENTS = 2**20  # of a weight that exceeds a core's cache
PACKED_DTYPES = (torch.float32, torch.bfloat16)
ROW_CLASSES = (1, 8, MAX_PACKED_ROWS)  # row counts up to each share one fastest way
_CLASS_OF_ROWS = [next(most for most in ROW_CLASSES if rows <= most) for rows in range(MAX_PACKED_ROWS + 1)]
Way = Literal["plain", "packed", "four"]  # four: packed, and a single row repeated to four

# By dtype, whether the weight is large, and class of rows. Which way is fastest depends on the CPU: see
# `heddle.machine`, and `choose_ways`.
WayKey = tuple[torch.dtype, bool, int]
DEFAULT_WAYS: Mapping[WayKey, Way] = {
    (dtype, is_large, rows): "four" if is_large and rows == 1 else "packed"
    for dtype in PACKED_DTYPES
    for is_large in (False, True)
    for rows in ROW_CLASSES
}
_ways = dict(DEFAULT_WAYS)


def way_name(key: WayKey) -> str:
    """`float32 large 8`: the name of a class of products in a record."""
    dtype, is_large, rows = key
    return f"{str(dtype).removeprefix('torch.')} {'large' if is_large else 'small'} {rows}"


def check_ways(ways: Mapping[str, Any]) -> dict[WayKey, Way]:
    """Ways of products of few rows, by `way_name`. Raises ConfigError for an unknown name or way."""
    keys, checked = {way_name(key): key for key in DEFAULT_WAYS}, dict[WayKey, Way]()
    for name, way in ways.items():
        if name not in keys:
            raise ConfigError(f"packing {name}: unknown class of products; choices: {', '.join(keys)}")
        if way not in get_args(Way) or (way == "four" and keys[name][2] > 1):
            raise ConfigError(f"packing {name}: {way} is not a way to multiply; write plain, packed, or four for 1 row")
        checked[keys[name]] = way
    return checked


def choose_ways(ways: Mapping[str, str]) -> None:
    """From now on, products of few rows use these ways (see `check_ways`), and the defaults elsewhere.

    Existing packed copies keep whether they repeat a single row.
    """
    _ways.update({**DEFAULT_WAYS, **check_ways(ways)})


def _way(dtype: torch.dtype, elements: int, rows: int) -> Way:
    return _ways[dtype, elements >= LARGE_ELEMENTS, _CLASS_OF_ROWS[rows]]


LinearMap = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]


class PackedMaps(NamedTuple):
    """Concatenated weights in oneDNN's layout, their biases, and whether a single row is faster repeated to four."""

    weight: Tensor
    bias: Tensor | None
    pad_to_four_rows: bool


def pack_maps(linear_maps: Sequence[LinearMap]) -> PackedMaps:
    """Pack all weights and biases into one copy. A missing bias is zero if another map has one."""
    weights, bias = torch.cat([weight.detach() for weight, _ in linear_maps]), None
    if any(map_bias is not None for _, map_bias in linear_maps):
        biases = (weight.new_zeros(len(weight)) if bias is None else bias.detach() for weight, bias in linear_maps)
        bias = torch.cat(list(biases))
    packed = pack_weight(weights, MAX_PACKED_ROWS)
    return PackedMaps(packed, bias, _way(weights.dtype, weights.numel(), 1) == "four")


def packed_linear(rows: Tensor, packed: PackedMaps) -> Tensor:
    """rows [N, in] -> [N, Σ out]. While a table records, the call is one of its operator."""
    table = _recording.get()
    return _product(rows, packed) if table is None else table.record(rows, packed)


def _product(rows: Tensor, packed: PackedMaps) -> Tensor:
    padded = packed.pad_to_four_rows and rows.shape[0] == 1
    y = onednn_product(rows.expand(4, -1) if padded else rows, packed.weight, packed.bias)
    return y[:1] if padded else y


class ProductTable:
    """The packed weights of one recorded graph."""

    def __init__(self) -> None:
        self.packed: list[PackedMaps] = []
        # The smallest free number, so that equal graphs have equal numbers and hit the compiler's cache.
        self.number = next(number for number in count() if number not in _tables)
        _tables[self.number] = self

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block, `packed_linear` calls the operator, and this table holds its weights."""
        token = _recording.set(self)
        try:
            yield
        finally:
            _recording.reset(token)

    def record(self, rows: Tensor, packed: PackedMaps) -> Tensor:
        """`packed_linear` by the operator."""
        self.packed.append(packed)
        y: Tensor = torch.ops.heddle.packed_product(rows, self.number, len(self.packed) - 1, packed.weight.shape[0])
        return y


_tables: "WeakValueDictionary[int, ProductTable]" = WeakValueDictionary()
_recording: ContextVar[ProductTable | None] = ContextVar("recorded_products", default=None)


def _recorded_product(rows: Tensor, table: int, index: int, outputs: int) -> Tensor:
    return _product(rows, _tables[table].packed[index])


def _product_shape(rows: Tensor, table: int, index: int, outputs: int) -> Tensor:
    return rows.new_empty(rows.shape[0], outputs)


_library = torch.library.Library("heddle", "FRAGMENT")
_library.define("packed_product(Tensor rows, int table, int index, int outputs) -> Tensor")
_library.impl("packed_product", _recorded_product, "CPU")
_library.impl("packed_product", _product_shape, "Meta")


MIN_PACKED_ELEMENTS = 2**15  # calling a kernel costs more than reading a smaller weight

Cached = TypeVar("Cached")

# The key is the address, shape and strides of the tensors, so that a slice of a stacked weight is recognized. The entry
# is their storages, the storages' addresses, the tensors' version counters, and the cached value. A storage that is
# referenced can still lose its memory: FSDP frees a layer's weights, then gathers the next layer's at the same address.
TensorKey = tuple[int, torch.Size, tuple[int, ...]]
PackedWeightCache = dict[tuple[TensorKey, ...], tuple[list[torch.UntypedStorage], list[int], list[int], Any]]

_cache: ContextVar[PackedWeightCache | None] = ContextVar("packed_weights", default=None)


@contextmanager
def packed_weights(cache: PackedWeightCache | None = None) -> Iterator[None]:
    """Within the block, products of few rows without gradients use packed copies of their weights.

    For loops that use the same weights many times, such as generation. A weight is packed at its first use, which takes
    about as long as one or two products and as much memory as the weight. All copies are freed when the block ends,
    unless `cache` (a dict, empty at first) keeps them for later blocks. A weight that was changed in place is packed
    again if torch counted the change. torch's fused optimizers do not count, so run no optimizer step in the block.
    """
    current = _cache.get() if cache is None else cache
    token = _cache.set({} if current is None else current)
    try:
        yield
    finally:
        _cache.reset(token)


def packing_enabled() -> bool:
    """Whether the call is within `packed_weights` (and not being compiled)."""
    return not is_compiling() and _cache.get() is not None


class LinearFacts(NamedTuple):
    """What decides the kernel: rows of x, whether gradients or packing are required, weight elements, device, dtype.

    native: whether its C++ operator serves these tensors: no bias, one dtype.
    """

    rows: int
    gradients: bool
    packing: bool
    weight_elements: int
    device: str
    dtype: torch.dtype
    native: bool = False


def linear_flops(rows: int, inputs: int, outputs: int) -> int:
    """FLOPs of one call: a multiply and an add per weight and row."""
    return 2 * rows * inputs * outputs


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., in], `weight` [out, in], `bias` [out] or None -> [..., out]."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _packed_linears(x, ((weight, bias),))


def _packed_linears(x: Tensor, linear_maps: Sequence[LinearMap]) -> Tensor:
    """One product of x with all weights. Their outputs are concatenated: [..., Σ out]."""
    if x.is_meta:
        return torch.cat([functional.linear(x, *linear_map) for linear_map in linear_maps], dim=-1)
    rows = x.reshape(-1, x.shape[-1])
    tensors = [tensor for linear_map in linear_maps for tensor in linear_map if tensor is not None]
    y = packed_linear(rows, cached_pack(tensors, lambda: pack_maps(linear_maps)))
    return y.view(*x.shape[:-1], y.shape[-1])


def cached_pack(tensors: Sequence[Tensor], compute: Callable[[], Cached]) -> Cached:
    """The cached value of these tensors. `compute` is called if there is none or a tensor was changed or replaced."""
    cache = _cache.get()
    assert cache is not None
    key = tuple([(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors])
    entry, versions = cache.get(key), version_counters(tensors)
    if entry is None or entry[2] != versions or [storage.data_ptr() for storage in entry[0]] != entry[1]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        entry = cache[key] = (storages, [storage.data_ptr() for storage in storages], versions, compute())
    value: Cached = entry[3]
    return value


_can_pack = cache(can_pack_weights)


def _packed_unsupported(facts: LinearFacts) -> str | None:
    if not facts.packing:
        return "weight packing is off for this call"
    if facts.device != "cpu":
        return "it runs on the CPU only"
    if facts.gradients:
        return "gradients are required"
    if not 1 <= facts.rows <= MAX_PACKED_ROWS:
        return f"it takes 1 to {MAX_PACKED_ROWS} rows, not {facts.rows}"
    if facts.weight_elements < MIN_PACKED_ELEMENTS:
        return f"it pays off from {MIN_PACKED_ELEMENTS} weights on, not {facts.weight_elements}"
    if facts.dtype not in PACKED_DTYPES:
        return f"oneDNN cannot pack weights of {facts.dtype}"
    if not _can_pack(facts.dtype):
        return f"torch or this CPU cannot pack weights of {facts.dtype}"
    if _way(facts.dtype, facts.weight_elements, facts.rows) == "plain":
        return f"plain products of {facts.rows} rows are faster on this machine"
    return None


MIN_NATIVE_ROWS, MAX_NATIVE_ELEMENTS = 64, 2**17  # of x and of a weight: oneDNN is as fast at larger products


def _native(x: Tensor, weight: Tensor, bias: None) -> Tensor:
    y: Tensor = torch.ops.heddle.linear(x, weight)
    return y


def _native_unsupported(facts: LinearFacts) -> str | None:
    if not facts.native:
        return native.NOT_IN_USE
    if facts.rows < MIN_NATIVE_ROWS or facts.weight_elements > MAX_NATIVE_ELEMENTS:
        return f"it pays off from {MIN_NATIVE_ROWS} rows on, and up to {MAX_NATIVE_ELEMENTS} weights"
    return None if facts.dtype in (torch.float32, torch.float64) else f"its C++ operator does not read {facts.dtype}"


LINEAR = Operation(
    "linear",
    (
        Kernel("packed", _packed, _packed_unsupported),
        Kernel("native", _native, _native_unsupported, traceable=False),
        Kernel("matrix", functional.linear, lambda facts: None),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in] plus `bias` [out] -> [..., out]."""
    add_flops(linear_flops(x.numel() // max(x.shape[-1], 1), weight.shape[1], weight.shape[0]))
    return uncounted_linear(x, weight, bias)


def uncounted_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` for operations that count their own FLOPs."""
    y: Tensor = LINEAR.choose(_facts(x, ((weight, bias),))).run(x, weight, bias)
    return y


def uncounted_linears(x: Tensor, linear_maps: Sequence[LinearMap]) -> Sequence[Tensor]:
    """`uncounted_linear` of one x with several weights, [..., out] each. One call, if all weights can be packed."""
    if len(linear_maps) > 1 and can_use_packed(x, linear_maps):
        widths = [weight.shape[0] for weight, _ in linear_maps]
        outputs: tuple[Tensor, ...] = _packed_linears(x, linear_maps).split(widths, dim=-1)
        return outputs
    return [uncounted_linear(x, *linear_map) for linear_map in linear_maps]


def can_use_packed(x: Tensor, linear_maps: Sequence[LinearMap]) -> bool:
    """Whether one packed copy of all these weights can be used for x in this call."""
    facts = _facts(x, linear_maps)
    usable = facts.packing and LINEAR.can_use("packed", facts)
    if usable:
        LINEAR.choose(facts)
    return usable


def linears(x: Tensor, linear_maps: Sequence[LinearMap]) -> Sequence[Tensor]:
    """`linear` of one x [..., in] with several weights and biases -> [..., out] each."""
    rows = x.numel() // max(x.shape[-1], 1)
    add_flops(sum(linear_flops(rows, weight.shape[1], weight.shape[0]) for weight, _ in linear_maps))
    return uncounted_linears(x, linear_maps)


def _facts(x: Tensor, linear_maps: Sequence[LinearMap]) -> LinearFacts:
    weight, device = linear_maps[0][0], device_type(x)
    gradients = torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w, _ in linear_maps))
    # Autocast does not cast the inputs of oneDNN's operators. Tensor subclasses of other libraries, such as torchao's
    # quantized weights, define products but cannot be packed.
    packing = packing_enabled() and x.dtype == weight.dtype and not torch.is_autocast_enabled(device)
    packing = packing and all(type(w) in (Parameter, Tensor) for w, _ in linear_maps)
    elements = sum([weight.numel() for weight, _ in linear_maps])
    serves = gradients and native.serves("linear", x, *(w for w, _ in linear_maps))
    serves = serves and x.dtype == weight.dtype and all(bias is None for _, bias in linear_maps)
    serves = serves and not torch.is_autocast_enabled(device)
    return LinearFacts(x.numel() // max(x.shape[-1], 1), gradients, packing, elements, device, x.dtype, serves)
