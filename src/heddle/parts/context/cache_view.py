"""The position table as mixers see it in a call, and the slots that the call's tokens are written to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from heddle.parts.context.layout import Layout

if TYPE_CHECKING:
    from heddle.parts.context.position_table import PositionTable

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """Which token of a call goes to which slot of a buffer of `size` slots.

    Rows of equal lengths are written by slices [(source, target), …], others token by token (rows, slots, tokens).
    A token that a later token of the same call would overwrite is not written.
    """

    slices: tuple[tuple[slice, slice], ...] | None
    rows: Tensor | None = None
    slots: Tensor | None = None
    tokens: Tensor | None = None

    @staticmethod
    def of(table: "PositionTable", layout: Layout, arrivals: Tensor, counts: Tensor, size: int) -> "SlotMapping":
        """The mapping of a call; `table` is the table before the call, `counts` the token counts after it."""
        if table.equal_lengths and not layout.has_padding:
            written = min(layout.length, size)
            source, slot = layout.length - written, (table.max_tokens + layout.length - written) % max(size, 1)
            straight = min(written, size - slot)
            slices = [(slice(source, source + straight), slice(slot, slot + straight))]
            if straight < written:
                slices.append((slice(source + straight, source + written), slice(0, written - straight)))
            return SlotMapping(tuple(slices))
        keep = (arrivals >= 0) & (arrivals >= counts[:, None] - size)
        if layout.length == 1 and not layout.has_padding:
            rows = torch.arange(table.batch, device=arrivals.device)
            return SlotMapping(None, rows, arrivals[:, 0] % size, torch.zeros_like(rows))
        if layout.row_tokens is None:
            rows, tokens = keep.nonzero(as_tuple=True)
        else:  # their number is known, so the host does not wait for it
            written = sum(min(tokens_of_row, size) for tokens_of_row in layout.row_tokens)
            rows, tokens = keep.nonzero_static(size=written).unbind(1)
        return SlotMapping(None, rows, arrivals[rows, tokens] % size, tokens)

    def write(self, target: Tensor, source: Tensor) -> None:
        """Write source [B, T] into target [B, size], or [B, G, T, d] into [B, G, size, d], in place."""
        heads = target.dim() == 4
        if self.slices is not None:
            for source_slice, target_slice in self.slices:
                if heads:
                    target[:, :, target_slice] = source[:, :, source_slice].to(target.dtype)
                else:
                    target[:, target_slice] = source[:, source_slice]
        elif heads:
            target[self.rows, :, self.slots] = source[self.rows, :, self.tokens].to(target.dtype)
        else:
            target[self.rows, self.slots] = source[self.rows, self.tokens]


@dataclass(frozen=True, eq=False)
class CacheView:
    """The position table as mixers see it in a call: before and after the call, and where the new tokens are stored."""

    before: "PositionTable"
    after: "PositionTable"
    arrivals: Tensor
    layout: Layout
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Any, make: Callable[[], V]) -> V:
        """`make()`, computed for the first layer and stored for the others."""
        if key not in self.cache:
            self.cache[key] = make()
        value: V = self.cache[key]
        return value

    @property
    def equal_lengths(self) -> bool:
        """Whether every row has the same number of tokens, before and after the call."""
        return self.after.equal_lengths

    def slot_mapping(self, size: int) -> SlotMapping:
        """The mapping of this call's tokens to a buffer of `size` slots."""
        make = lambda: SlotMapping.of(  # noqa: E731
            self.before, self.layout, self.arrivals, self.after.token_counts, size
        )
        return self.cached(("slot mapping", size), make)

    def ring(self, size: int, after: bool) -> tuple[Tensor, Tensor]:
        """Positions and segment ids of a ring buffer's slots, before or after this call."""
        return self.cached(("ring", size, after), lambda: (self.after if after else self.before).ring(size))
