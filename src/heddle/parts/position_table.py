"""The table of positions and segment ids that all layers of a state share, and the slots that new tokens get.

Each token of a row has an arrival number, counted from 0; padding has none. Arrival a is stored in slot `a mod size`.
A mixer that keeps every token has as many slots as the table. A mixer with a window has a smaller ring buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.layout import Layout

# Whether a call can continue a state: in the document of a row's newest token, or in a later one.


def is_no_continuation(token_counts: Tensor, last_token: Tensor, layout: Layout, arrivals: Tensor) -> Tensor:
    """int64 [B], 1 for a row whose first new token neither continues the newest document nor starts a later one.

    token_counts [B] and last_token [B, 2] as in `PositionTable`, arrivals [B, T] of the call's tokens.
    """
    position, segment = _first_tokens(layout, arrivals)
    last_position, last_segment = last_token.unbind(1)
    is_same = segment == last_segment
    is_wrong = (segment < last_segment) | (is_same & (position != last_position + 1))
    return (is_wrong & (arrivals.amax(1) >= 0) & (token_counts > 0)).long()


def refuse_layout(last_token: Tensor, layout: Layout, arrivals: Tensor, is_wrong: Tensor) -> NoReturn:
    """Raise ConfigError that names the first invalid row and its first new token."""
    row = int(is_wrong.argmax())
    position, segment = (int(values[row]) for values in _first_tokens(layout, arrivals))
    last_position, last_segment = last_token[row].tolist()
    is_earlier = segment < last_segment
    name, value, last = ("segment id", segment, last_segment) if is_earlier else ("position", position, last_position)
    raise ConfigError(
        f"layout: {name} {value} in row {row} follows {last}, the state's newest; continue that token's document "
        "at the next position, or begin one with a higher segment id"
    )


def _first_tokens(layout: Layout, arrivals: Tensor) -> tuple[Tensor, Tensor]:
    """Position and segment id [B] of the first new token of each row."""
    first = (arrivals >= 0).int().argmax(1, keepdim=True)
    return layout.positions.gather(1, first)[:, 0], layout.dense_segment_ids.gather(1, first)[:, 0]


# The position table as mixers see it in a call, and the slots that the call's tokens are written to.


V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class SlotMapping:
    """Which token of a call goes to which slot of a buffer of `size` slots.

    Rows of equal lengths are written by slices [(source, target), …], others by the indices (rows, slots, tokens).
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


INITIAL_SLOTS = 64  # of a state without a cache length


@dataclass(frozen=True, eq=False)
class PositionTable:
    """The positions of the tokens in a state.

    positions, segment_ids: int32 [B, size]; a position of −1 marks an unused slot.
    token_counts: int64 [B], tokens of each row so far. last_token: int64 [B, 2], position and segment id of each
    row's newest token.
    lookback: how many earlier tokens the layers need (None: all). cache_length: the maximum number of tokens of a row
    (None: the table doubles when it is full).
    max_tokens: no row has more tokens. equal_lengths: every row has exactly `max_tokens`. contiguous: every row is one
    document at positions 0, 1, ….
    rollback: how many tokens can be removed at a time; ring buffers have that many extra slots for it.
    rollback_left: how many can be removed now. peak_tokens: the most tokens that a row ever had.
    max_position: no position is larger. None: not known.
    is_pinned: the facts hold for up to `max_tokens` tokens, whatever the table holds: see `pinned`.
    text_lengths: the final length of each sequence, for rotary embeddings that depend on it (None: cache_length).
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
    max_position: int | None = -1
    is_pinned: bool = False
    text_lengths: tuple[int, ...] | None = None

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
        last_token = PositionTable._no_tokens(batch, device)
        token_counts = torch.zeros(batch, dtype=torch.int64, device=device)
        segment_ids = torch.zeros_like(positions)
        return PositionTable(
            positions, segment_ids, token_counts, last_token, lookback, cache_length, rollback=rollback
        )

    @staticmethod
    def _no_tokens(batch: int, device: torch.device | str) -> Tensor:
        """The `last_token` of empty rows."""
        last_token = torch.zeros(batch, 2, dtype=torch.int64, device=device)
        last_token[:, 0] = -1
        return last_token

    def with_text_lengths(self, text_lengths: Sequence[int] | None) -> "PositionTable":
        """The table with these final lengths. Raises ConfigError unless there is a positive one for each row."""
        if text_lengths is not None and (len(text_lengths) != self.batch or min(text_lengths) < 1):
            reason = f"text_lengths = {list(text_lengths)} must be {self.batch} numbers of at least 1"
            raise ConfigError(f"state: {reason}, one for each row")
        return replace(self, text_lengths=None if text_lengths is None else tuple(text_lengths))

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

    @property
    def final_lengths(self) -> tuple[int, ...]:
        """The final length of each sequence. Raises ConfigError if the state was created without a length."""
        if self.text_lengths is not None:
            return self.text_lengths
        if self.cache_length is None:
            raise ConfigError(
                "state: has no cache_length, on which a rotary embedding depends; give init_state a cache_length"
            )
        return (self.cache_length,) * self.batch

    def pinned(self, max_tokens: int) -> "PositionTable":
        """The table with room for `max_tokens`, and with facts that hold for every decode step up to that number.

        Slots are written and read by token counts on the device, so that every decode step runs the same operations.
        Raises ConfigError for more tokens than `cache_length`.
        """
        self._check_capacity(max_tokens)
        before = max_tokens - 1  # the most tokens of a row before a decode step
        max_position = None if self.max_position is None else self.max_position + before - self.max_tokens
        table = replace(self._grown(max_tokens), max_tokens=before, equal_lengths=False, contiguous=False)
        return replace(table, is_pinned=True, peak_tokens=before, rollback_left=0, max_position=max_position)

    def select(self, index: Tensor, rows: Sequence[int]) -> "PositionTable":
        """A copy with the rows `index` (int64); `rows` are the same numbers on the host."""
        table, texts = self.map(lambda x: x.index_select(0, index)), self.text_lengths
        if not self.equal_lengths:
            table = table.counted()
        return table if texts is None else replace(table, text_lengths=tuple(texts[row] for row in rows))

    def counted(self) -> "PositionTable":
        """The same table with `max_tokens`, `equal_lengths` and `contiguous` computed from `token_counts`."""
        return self._with_lengths(*torch.stack((self.token_counts.amin(), self.token_counts.amax())).tolist())

    def _with_lengths(self, least: int, most: int) -> "PositionTable":
        equal = least == most
        contiguous = self.contiguous and equal
        return replace(self, max_tokens=most, equal_lengths=equal, contiguous=contiguous, is_pinned=False)

    def can_roll_back(self, tokens: int) -> bool:
        """Whether the table still has the token before the last `tokens` of each row."""
        return self.lookback is None or self.peak_tokens <= self.size or tokens <= self.rollback_left

    def check_batch(self, rows: int) -> None:
        """Raise ConfigError if a call has another number of rows."""
        if rows != self.batch:
            raise ConfigError(f"state: has {self.batch} rows, the call has {rows}; create a state with that batch")

    def next_layout(self, length: int, token_counts: Tensor | None = None) -> Layout:
        """`length` more tokens in each row, after its newest token and in the same document.

        token_counts: int64 [B], how many of these are tokens; the rest is padding, on the right.
        """
        if self.equal_lengths and self.contiguous and token_counts is None:
            return Layout.causal(self.batch, length, start=self.max_tokens, device=self.positions.device)
        ahead = torch.arange(1, length + 1, device=self.positions.device)
        positions = self.last_token[:, :1] + ahead
        if token_counts is not None:
            positions = torch.where(ahead <= token_counts[:, None], positions, -1)
        segment_ids = self.last_token[:, 1:].expand(self.batch, length)
        newest = None if self.max_position is None else self.max_position + length
        has_padding = token_counts is not None
        return Layout(positions, segment_ids, max_position=newest, has_padding=has_padding, is_checked=True)

    def extend(self, layout: Layout, check: bool = True) -> "tuple[PositionTable, Layout]":
        """Write the tokens of a call; returns the new table and the layout with its `cache_view` set.

        check: False for a layout from `next_layout`. Raises ConfigError if the number of rows differs, if the layout
        does not continue where the rows end, or if a row would get more tokens than `cache_length`.
        """
        self.check_batch(layout.batch)
        continues = layout.segment_ids is None and self.contiguous and layout.start == self.max_tokens
        if layout.segment_ids is None and not self.contiguous:
            layout = replace(layout, segment_ids=self.last_token[:, 1:].expand(layout.batch, layout.length))
        arrivals, counts = self._arrivals(layout)
        equal = self.equal_lengths and not layout.has_padding
        max_tokens, fewest = self.max_tokens + layout.length, layout.length
        # With padding of unknown length the number of new tokens is a value on the device, and so are a row's newest
        # token and the first of a layout from outside. They are read only then, once per call.
        check = check and not continues and self.max_tokens > 0
        row_tokens = layout.row_tokens if self.equal_lengths else None
        if row_tokens is not None:
            max_tokens, fewest = self.max_tokens + max(row_tokens), min(row_tokens)
        if layout.length and (check or (layout.has_padding and row_tokens is None)):
            is_wrong = (
                is_no_continuation(self.token_counts, self.last_token, layout, arrivals)
                if check
                else torch.zeros_like(counts)
            )
            added = counts - self.token_counts
            max_tokens, fewest, wrong = torch.stack((counts.amax(), added.amin(), is_wrong.amax().long())).tolist()
            if wrong:
                refuse_layout(self.last_token, layout, arrivals, is_wrong)
        self._check_capacity(max_tokens)
        before = self._grown(max_tokens)
        contiguous = continues and equal
        last = before._last_token(layout, arrivals)
        left = min(self.rollback, self.rollback_left + fewest)
        peak = max(self.peak_tokens, max_tokens)
        newest = layout.max_position if layout.start is None else layout.start + layout.length - 1
        newest = None if newest is None or self.max_position is None else max(newest, self.max_position)
        after = replace(before, token_counts=counts, last_token=last, max_tokens=max_tokens, equal_lengths=equal)
        after = replace(after, contiguous=contiguous, rollback_left=left, peak_tokens=peak, max_position=newest)
        if self.lookback is not None:  # a ring buffer overwrites slots that are still read through `before`
            after = replace(after, positions=before.positions.clone(), segment_ids=before.segment_ids.clone())
        mapping = SlotMapping.of(before, layout, arrivals, counts, before.size)
        mapping.write(after.positions, layout.positions.to(torch.int32))
        mapping.write(after.segment_ids, layout.dense_segment_ids.to(torch.int32))
        view = CacheView(before, after, arrivals, layout)
        return after, replace(layout, cache_view=view, cache={})

    def rolled_back(self, tokens: Tensor, most: int) -> "tuple[PositionTable, Callable[[int], Tensor]]":
        """Remove the last `tokens` [B] of each row, at most `most`, in place; returns the new table and `freed`.

        freed(slots) is bool [B, slots], True at the slots of removed tokens in a buffer of that size.
        Raises ConfigError if a row has fewer tokens.
        """
        counts, newest = self.token_counts - tokens, self.token_counts - 1
        is_wrong = ((tokens < 0) | (counts < 0)).any()
        least, longest, wrong = torch.stack((counts.amin(), counts.amax(), is_wrong.long())).tolist()
        if wrong:
            raise ConfigError(
                f"rollback: cannot remove {tokens.tolist()} of {self.token_counts.tolist()} tokens per row; "
                "give numbers from 0 to the tokens of each row"
            )

        def freed(size: int) -> Tensor:
            slots = torch.arange(size, device=counts.device)
            arrivals = newest[:, None] - (newest[:, None] - slots) % size
            return (arrivals >= counts[:, None]) & (arrivals >= 0)

        unused = freed(self.size)
        self.positions.masked_fill_(unused, -1)
        self.segment_ids.masked_fill_(unused, 0)
        slot = ((counts - 1) % self.size)[:, None]
        stored = torch.cat((self.positions.gather(1, slot), self.segment_ids.gather(1, slot)), dim=1).long()
        last = torch.where((counts > 0)[:, None], stored, PositionTable._no_tokens(self.batch, counts.device))
        left = max(0, self.rollback_left - most)
        table = replace(self, token_counts=counts, last_token=last, rollback_left=left)
        return table._with_lengths(least, longest), freed

    def _check_capacity(self, max_tokens: int) -> None:
        if self.cache_length is not None and max_tokens > self.cache_length:
            raise ConfigError(
                f"state: cache_length {self.cache_length} is too small for {max_tokens} tokens; "
                "give init_state a larger one"
            )

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


# Join tables of positions: the rows of several states as one batch.


def join_tables(tables: Sequence[PositionTable]) -> PositionTable:
    """A table with the rows of all tables, in order. If it keeps every token, it has the slots of the largest.

    Raises ConfigError for tables with different lookbacks, cache lengths or rollbacks.
    """
    first = tables[0]
    for name in ("lookback", "cache_length", "rollback"):
        values = sorted({str(getattr(table, name)) for table in tables})
        if len(values) > 1:
            raise ConfigError(f"join: the states have {name} {' and '.join(values)}; create all with one value")
    size = max(table.size for table in tables)
    positions = torch.cat([_with_slots(table.positions, size, -1) for table in tables])
    segment_ids = torch.cat([_with_slots(table.segment_ids, size, 0) for table in tables])
    text_lengths = None
    if any(table.text_lengths is not None for table in tables):
        text_lengths = tuple(length for table in tables for length in table.final_lengths)
    newest = [table.max_position for table in tables]
    facts: dict[str, Any] = {
        "contiguous": all(table.contiguous for table in tables),
        "rollback_left": min(table.rollback_left for table in tables),
        "peak_tokens": max(table.peak_tokens for table in tables),
        "max_position": None if None in newest else max(value for value in newest if value is not None),
        "text_lengths": text_lengths,
    }
    counts = torch.cat([table.token_counts for table in tables])
    last = torch.cat([table.last_token for table in tables])
    table = replace(first, positions=positions, segment_ids=segment_ids, token_counts=counts, last_token=last, **facts)
    return table.counted()


def _with_slots(values: Tensor, size: int, unused: int) -> Tensor:
    """values [B, slots] with `size` slots; the added ones hold `unused`."""
    added = values.new_full((values.shape[0], size - values.shape[1]), unused)
    return torch.cat((values, added), dim=1)
