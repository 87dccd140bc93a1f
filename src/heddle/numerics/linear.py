"""Linear map `y = x Wᵀ + b`: the one place through which every projection of every part goes.

A weight is stored [out, in], as in torch. With few rows the time is that of reading the weight, and torch's usual
routes read it at a fraction of the memory's speed; oneDNN reads a copy in its own order of blocks about twice as fast.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation, device_of

PACKED_ROWS = 64  # with more, a product is bound by arithmetic and packing gains little
PACKED_ELEMENTS = 2**17  # a smaller weight costs more to call for than to read
SLOW_ALONE = 2**20  # oneDNN reads a weight this large faster for four rows than for one

V = TypeVar("V")
Map = tuple[Tensor, Tensor | None]  # weight [out, in] and bias [out]

# By the address, shape and strides of tensors, so that a slice of a stacked weight is known again: they themselves (so
# that the addresses stay theirs), torch's counts of their changes, and what was made of them.
Place = tuple[int, torch.Size, tuple[int, ...]]
Packs = dict[tuple[Place, ...], tuple[list[Tensor], list[int], Any]]

_packs: ContextVar[Packs | None] = ContextVar("packs", default=None)


@contextmanager
def packing(kept: Packs | None = None) -> Iterator[None]:
    """Within the block, products of few rows without gradients use packed copies of their weights, made when first met.

    For loops that use the same weights many times (generation): a copy costs about as much time as one or two
    products and as much memory as the weight, and all are freed when the block ends. A weight changed in place is
    packed anew, as far as torch counts the change: torch's fused optimizers do not, so take no step within.
    `kept` (an empty dict at first) holds the copies from block to block instead.
    """
    outer = _packs.get() if kept is None else kept
    token = _packs.set({} if outer is None else outer)
    try:
        yield
    finally:
        _packs.reset(token)


def packs_wanted() -> bool:
    """Whether packed copies are in force."""
    return not is_compiling() and _packs.get() is not None


class LinearFacts(NamedTuple):
    """What decides the form: rows of x, gradients or packing wanted, elements of the weight, device, dtype."""

    rows: int
    gradients: bool
    packing: bool
    elements: int
    device: str
    dtype: torch.dtype


def flops(rows: int, inputs: int, outputs: int) -> int:
    """Operations of one call: a multiply and an add per weight and row."""
    return 2 * rows * inputs * outputs


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x` [..., in], `weight` [out, in], `bias` [out] or None -> [..., out]."""
    y = torch.einsum("...i,oi->...o", x, weight)
    return y if bias is None else y + bias


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _packed_maps(x, ((weight, bias),))


def _packed_maps(x: Tensor, maps: Sequence[Map]) -> Tensor:
    """One product with all weights, their outputs one after another: [..., Σ out]."""
    if x.is_meta:
        return torch.cat([functional.linear(x, *one) for one in maps], dim=-1)
    rows = x.reshape(-1, x.shape[-1])
    tensors = [tensor for one in maps for tensor in one if tensor is not None]
    y = packed_rows(rows, kept(tensors, lambda: pack(maps)))
    return y.view(*x.shape[:-1], y.shape[-1])


class Packed(NamedTuple):
    """Weights below one another in oneDNN's order, their biases, and whether one row is better read as four."""

    weight: Tensor
    bias: Tensor | None
    four: bool


def pack(maps: Sequence[Map]) -> Packed:
    """One copy of all weights and biases; a missing bias beside others is zero."""
    whole, bias = torch.cat([weight.detach() for weight, _ in maps]), None
    if any(one is not None for _, one in maps):
        bias = torch.cat([weight.new_zeros(len(weight)) if one is None else one.detach() for weight, one in maps])
    return Packed(torch.ops.mkldnn._reorder_linear_weight(whole, PACKED_ROWS), bias, whole.numel() >= SLOW_ALONE)


def packed_rows(rows: Tensor, packed: Packed) -> Tensor:
    """rows [N, in] -> [N, Σ out]."""
    alone = packed.four and rows.shape[0] == 1
    product = torch.ops.mkldnn._linear_pointwise.default
    y: Tensor = product(rows.expand(4, -1) if alone else rows, packed.weight, packed.bias, "none", [], "")
    return y[:1] if alone else y


def kept(tensors: Sequence[Tensor], make: Callable[[], V]) -> V:
    """What `make` makes of tensors, from the packs in force; made anew where one of them was changed or replaced."""
    packs = _packs.get()
    assert packs is not None
    place = tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)
    known, versions = packs.get(place), [tensor._version for tensor in tensors]
    if known is None or known[1] != versions:
        known = packs[place] = ([tensor.detach() for tensor in tensors], versions, make())
    made: V = known[2]
    return made


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch and this CPU have the operators."""
    names = ("mkldnn::_linear_pointwise", "mkldnn::_reorder_linear_weight")
    if not all(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU") for name in names):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _no_packed(facts: LinearFacts) -> str | None:
    if not facts.packing:
        return "packed weights are not wanted here"
    if facts.device != "cpu":
        return "it is for the CPU"
    if facts.gradients:
        return "gradients are wanted"
    if not 1 <= facts.rows <= PACKED_ROWS:
        return f"it multiplies 1 to {PACKED_ROWS} rows, here are {facts.rows}"
    if facts.elements < PACKED_ELEMENTS:
        return f"it pays for {PACKED_ELEMENTS} weights or more, here are {facts.elements}"
    if facts.dtype not in (torch.float32, torch.bfloat16):
        return f"oneDNN packs no weights of {facts.dtype}"
    return None if _can_pack(facts.dtype) else f"torch or this CPU cannot pack weights of {facts.dtype}"


LINEAR = Operation(
    "linear",
    (
        Form("packed", _packed, _no_packed),
        Form("matrix", functional.linear, lambda facts: None),
        Form("reference", reference, lambda facts: None),
    ),
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in] plus `bias` [out] -> [..., out]."""
    count(flops(x.numel() // max(x.shape[-1], 1), weight.shape[1], weight.shape[0]))
    return product(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` for the pieces of an operation that counts its own."""
    y: Tensor = LINEAR.choose(_facts(x, ((weight, bias),))).run(x, weight, bias)
    return y


def products(x: Tensor, maps: Sequence[Map]) -> Sequence[Tensor]:
    """`product` of one x with several weights, [..., out] each: one call where packed copies serve all of them."""
    if len(maps) > 1 and packs_serve(x, maps):
        return _packed_maps(x, maps).split([weight.shape[0] for weight, _ in maps], dim=-1)
    return [product(x, *one) for one in maps]


def packs_serve(x: Tensor, maps: Sequence[Map]) -> bool:
    """Whether x may meet one packed copy of these weights, here and now."""
    joint = _facts(x, maps)
    serve = joint.packing and LINEAR.takes("packed", joint)
    if serve:
        LINEAR.choose(joint)
    return serve


def linears(x: Tensor, maps: Sequence[Map]) -> Sequence[Tensor]:
    """`linear` of one x [..., in] with several weights and biases -> [..., out] each."""
    rows = x.numel() // max(x.shape[-1], 1)
    count(sum(flops(rows, weight.shape[1], weight.shape[0]) for weight, _ in maps))
    return products(x, maps)


def _facts(x: Tensor, maps: Sequence[Map]) -> LinearFacts:
    rows, weight = x.numel() // max(x.shape[-1], 1), maps[0][0]
    learning = x.requires_grad or any(weight.requires_grad for weight, _ in maps)
    # Autocast casts the usual routes, but not oneDNN's operators.
    packing = packs_wanted() and x.dtype == weight.dtype and not torch.is_autocast_enabled(device_of(x))
    elements = sum(weight.numel() for weight, _ in maps)
    return LinearFacts(rows, torch.is_grad_enabled() and learning, packing, elements, device_of(x), x.dtype)
