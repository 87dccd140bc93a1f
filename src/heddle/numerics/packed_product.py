"""oneDNN's product with a packed weight, and its form in a graph that is recorded for a compiler.

A compiler cannot hold a weight in oneDNN's own layout, and would pack none by itself. So a recorded graph calls an
operator that finds the packed weight by its index in a `ProductTable`, which must live as long as the graph.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

MAX_PACKED_ROWS = 64  # with more rows a product is bound by arithmetic, and packing gains little
FOUR_ROW_ELEMENTS = 2**20  # oneDNN reads a weight this large faster for four rows than for one

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
    packed = torch.ops.mkldnn._reorder_linear_weight(weights, MAX_PACKED_ROWS)
    return PackedMaps(packed, bias, weights.numel() >= FOUR_ROW_ELEMENTS)


def packed_linear(rows: Tensor, packed: PackedMaps) -> Tensor:
    """rows [N, in] -> [N, Σ out]. While a table records, the call is one of its operator."""
    table = _recording.get()
    return _product(rows, packed) if table is None else table.record(rows, packed)


def _product(rows: Tensor, packed: PackedMaps) -> Tensor:
    padded = packed.pad_to_four_rows and rows.shape[0] == 1
    product = torch.ops.mkldnn._linear_pointwise.default
    y: Tensor = product(rows.expand(4, -1) if padded else rows, packed.weight, packed.bias, "none", [], "")
    return y[:1] if padded else y


class ProductTable:
    """The packed weights of one recorded graph."""

    def __init__(self) -> None:
        self.packed: list[PackedMaps] = []
        # The smallest free number, so that equal graphs have equal numbers, and the compiler's cache knows them.
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
