"""The table of positions and segment ids that all layers of a state share, and the slots that new tokens get.

Each token of a row has an arrival number, counted from 0; padding has none. Arrival a is stored in slot `a mod size`.
A mixer that keeps every token has as many slots as the table. A mixer with a window has a smaller ring buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.layout import Layout

V = TypeVar("V")

INITIAL_SLOTS = 64  # of a state without a cache length


@dataclass(frozen=True, eq=False)
class PositionTable:
    """The positions of the tokens in a state.

    positions, segment_ids: int32 [B, size]; a position of −1 marks an unused slot.
    token_counts: int64 [B], tokens of each row so far. last_token: int64 [B, 2], position and segment id of each
    row's newest token.
    lookback: how many earlier tokens the layers need (None: all). cache_length: the most tokens a row may get (None:
    the table doubles when it is full).
    max_tokens: no row has more tokens. equal_lengths: every row has exactly `max_tokens`. contiguous: every row is one
    document at positions 0, 1, ….
    rollback: how many tokens can be taken back at a time, for which ring buffers have that many extra slots.
    rollback_left: how many can be taken back now. peak_tokens: the most tokens that a row ever had.
    """

    positions: Tensor
    segment_ids: Tensor
    token_counts: Tensor
    last_token: Tensor
    lookback: int | None
    cache_length: int | None
    max_tokens: int = 0
    equal_lengths: bool = True
    contiguous: bool = True
    rollback: int = 0
    rollback_left: int = 0
    peak_tokens: int = 0

    @staticmethod
    def empty(
        batch: int, lookback: int | None, cache_length: int | None, device: torch.device | str, rollback: int = 0
    ) -> "PositionTable":
        """A table whose rows have no tokens."""
        if lookback is None:
            size = INITIAL_SLOTS if cache_length is None else cache_length
        else:  # one slot even at lookback 0: after a rollback the last remaining token is read from it
            size = max(1, lookback) + rollback
        if lookback is not None and cache_length is not None:
            size = min(size, cache_length)
        positions = torch.full((batch, size), -1, dtype=torch.int32, device=device)
        last_token = torch.tensor([[-1, 0]], device=device).expand(batch, 2).clone()
        token_counts = torch.zeros(batch, dtype=torch.int64, device=device)
        segment_ids = torch.zeros_like(positions)
        return PositionTable(
            positions, segment_ids, token_counts, last_token, lookback, cache_length, rollback=rollback
        )

    @property
    def size(self) -> int:
        """Number of slots."""
        return self.positions.shape[1]

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.positions.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field name, batch first."""
        return {
            "positions": self.positions,
            "segment_ids": self.segment_ids,
            "token_counts": self.token_counts,
            "last_token": self.last_token,
        }

    def map(self, change: Callable[[Tensor], Tensor]) -> "PositionTable":
        """A copy in which `change(tensor)` replaces each tensor."""
        positions, segment_ids, counts, last = (change(tensor) for tensor in self.tensors().values())
        return replace(self, positions=positions, segment_ids=segment_ids, token_counts=counts, last_token=last)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def select(self, index: Tensor) -> "PositionTable":
        """A copy of the rows of `index` (int64)."""
        return self.map(lambda x: x.index_select(0, index))._counted()

    def _counted(self) -> "PositionTable":
        """The same table with `max_tokens`, `equal_lengths` and `contiguous` read off `token_counts`."""
        least, most = torch.stack((self.token_counts.amin(), self.token_counts.amax())).tolist()
        equal = least == most
        return replace(self, max_tokens=most, equal_lengths=equal, contiguous=self.contiguous and equal)

    def can_roll_back(self, tokens: int) -> bool:
        """Whether the table still has the token before the last `tokens` of each row."""
        return self.lookback is None or self.peak_tokens <= self.size or tokens <= self.rollback_left

    def check_batch(self, rows: int) -> None:
        """Raise ConfigError if a call has another number of rows."""
        if rows != self.batch:
            raise ConfigError(f"state: holds {self.batch} rows, the call has {rows}; make a state of that batch")

    def next_layout(self, length: int) -> Layout:
        """`length` more tokens in each row, after its newest token and in the same document."""
        if self.equal_lengths and self.contiguous:
            return Layout.causal(self.batch, length, start=self.max_tokens, device=self.positions.device)
        ahead = torch.arange(1, length + 1, device=self.positions.device)
        segment_ids = self.last_token[:, 1:].expand(self.batch, length)
        return Layout(self.last_token[:, :1] + ahead, segment_ids, has_padding=False)

    def extend(self, layout: Layout) -> "tuple[PositionTable, Layout]":
        """Write the tokens of a call; returns the new table and the layout with its `cache_view` set.

        Raises ConfigError if the number of rows differs, or a row would get more tokens than `cache_length`.
        """
        self.check_batch(layout.batch)
        arrivals, counts = self._arrivals(layout)
        # With padding the number of new tokens is a value on the device. Only then it is read, once for each call.
        equal = self.equal_lengths and not layout.has_padding
        max_tokens, fewest = self.max_tokens + layout.length, layout.length
        if layout.has_padding and layout.length:
            max_tokens, fewest = torch.stack((counts.amax(), (counts - self.token_counts).amin())).tolist()
        if self.cache_length is not None and max_tokens > self.cache_length:
            raise ConfigError(
                f"state: cache_length {self.cache_length} is too small for {max_tokens} tokens; "
                "give init_state a larger one"
            )
        before = self._grown(max_tokens)
        contiguous = before.contiguous and layout.start == before.max_tokens and equal
        last = before._last_token(layout, arrivals)
        left = min(self.rollback, self.rollback_left + fewest)
        peak = max(self.peak_tokens, max_tokens)
        after = replace(before, token_counts=counts, last_token=last, max_tokens=max_tokens, equal_lengths=equal)
        after = replace(after, contiguous=contiguous, rollback_left=left, peak_tokens=peak)
        if self.lookback is not None:  # a ring buffer overwrites slots that are still read through `before`
            after = replace(after, positions=before.positions.clone(), segment_ids=before.segment_ids.clone())
        mapping = SlotMapping.of(before, layout, arrivals, counts, before.size)
        mapping.write(after.positions, layout.positions.to(torch.int32))
        mapping.write(after.segment_ids, layout.dense_segment_ids.to(torch.int32))
        view = CacheView(before, after, arrivals, layout)
        return after, replace(layout, cache_view=view, cache={})

    def rolled_back(self, tokens: Tensor) -> "tuple[PositionTable, Callable[[int], Tensor]]":
        """Take back the last `tokens` [B] of each row, in place; returns the new table and `freed`.

        freed(slots) is bool [B, slots], True at the slots of removed tokens in a buffer of that size.
        Raises ConfigError if a row has fewer tokens.
        """
        most = int(tokens.max())
        if bool(((tokens < 0) | (tokens > self.token_counts)).any()):
            raise ConfigError(
                f"rollback: cannot take back {tokens.tolist()} tokens of rows that hold {self.token_counts.tolist()}"
            )
        counts, newest = self.token_counts - tokens, self.token_counts - 1

        def freed(size: int) -> Tensor:
            slots = torch.arange(size, device=counts.device)
            arrivals = newest[:, None] - (newest[:, None] - slots) % size
            return (arrivals >= counts[:, None]) & (arrivals >= 0)

        unused = freed(self.size)
        self.positions.masked_fill_(unused, -1)
        self.segment_ids.masked_fill_(unused, 0)
        slot = ((counts - 1) % self.size)[:, None]
        stored = torch.cat((self.positions.gather(1, slot), self.segment_ids.gather(1, slot)), dim=1).long()
        last = torch.where((counts > 0)[:, None], stored, torch.tensor([-1, 0], device=counts.device))
        left = max(0, self.rollback_left - most)
        return replace(self, token_counts=counts, last_token=last, rollback_left=left)._counted(), freed

    def _arrivals(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """The arrival number of each token [B, T] (−1 for padding), and the token counts after the call [B]."""
        if not layout.has_padding:
            ahead = torch.arange(layout.length, device=self.token_counts.device)
            return self.token_counts[:, None] + ahead, self.token_counts + layout.length
        is_token = layout.positions >= 0
        arrivals = self.token_counts[:, None] + is_token.cumsum(1) - 1
        return torch.where(is_token, arrivals, -1), self.token_counts + is_token.sum(1)

    def _last_token(self, layout: Layout, arrivals: Tensor) -> Tensor:
        if layout.length == 0:
            return self.last_token
        newest = arrivals.argmax(1, keepdim=True)
        last = torch.cat((layout.positions.gather(1, newest), layout.dense_segment_ids.gather(1, newest)), dim=1)
        return torch.where(arrivals.amax(1, keepdim=True) >= 0, last, self.last_token)

    def _grown(self, max_tokens: int) -> "PositionTable":
        """The table with room for `max_tokens`. One that keeps every token doubles until it is large enough."""
        if self.lookback is not None or max_tokens <= self.size:
            return self
        size = self.size
        while size < max_tokens:
            size *= 2
        added = (self.batch, size - self.size)
        positions = torch.cat((self.positions, self.positions.new_full(added, -1)), dim=1)
        segment_ids = torch.cat((self.segment_ids, self.segment_ids.new_zeros(added)), dim=1)
        return replace(self, positions=positions, segment_ids=segment_ids)

    def ring(self, size: int) -> tuple[Tensor, Tensor]:
        """Positions and segment ids [B, size] of the slots of a ring buffer; position −1 where a slot is unused."""
        slots = torch.arange(size, device=self.token_counts.device)
        newest = self.token_counts[:, None] - 1
        arrivals = newest - (newest - slots) % size
        index = arrivals.clamp(min=0) % self.size
        positions = torch.where(arrivals >= 0, self.positions.gather(1, index).long(), -1)
        return positions, self.segment_ids.gather(1, index).long()


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
    def of(table: PositionTable, layout: Layout, arrivals: Tensor, counts: Tensor, size: int) -> "SlotMapping":
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
        rows, tokens = keep.nonzero(as_tuple=True)
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

    before: PositionTable
    after: PositionTable
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
