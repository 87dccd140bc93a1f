"""The table of positions and segment ids that all layers of a state share, and the slots that new tokens get.

Each token of a row has an arrival number, counted from 0; padding has none. Arrival a is stored in slot `a mod size`.
A mixer that keeps every token has as many slots as the table. A mixer with a window has a smaller ring buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.cache_view import CacheView, SlotMapping
from heddle.parts.context.continuation import is_no_continuation, refuse_layout
from heddle.parts.context.layout import Layout

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
    max_position: no position is larger. None: not known.
    is_pinned: the facts are those of a table with `max_tokens`, whatever it holds: see `pinned`.
    text_lengths: the final length of each row's text, for rotary embeddings that depend on it (None: cache_length).
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
        """The final length of each row's text. Raises ConfigError if the state was created without a length."""
        if self.text_lengths is not None:
            return self.text_lengths
        if self.cache_length is None:
            raise ConfigError(
                "state: has no cache_length, on which a rotary embedding depends; give init_state a cache_length"
            )
        return (self.cache_length,) * self.batch

    def pinned(self, max_tokens: int) -> "PositionTable":
        """The table with room for `max_tokens`, and with facts that hold for each next token until a row has so many.

        Slots are written and read by token counts on the device, so that every next token takes the same operations.
        Raises ConfigError for more tokens than `cache_length`.
        """
        self._check_capacity(max_tokens)
        before = max_tokens - 1  # what a row has at most when a call of one token begins
        max_position = None if self.max_position is None else self.max_position + before - self.max_tokens
        table = replace(self._grown(max_tokens), max_tokens=before, equal_lengths=False, contiguous=False)
        return replace(table, is_pinned=True, peak_tokens=before, rollback_left=0, max_position=max_position)

    def select(self, index: Tensor, rows: Sequence[int]) -> "PositionTable":
        """A copy of the rows of `index` (int64), whose values are `rows`."""
        table, texts = self.map(lambda x: x.index_select(0, index)), self.text_lengths
        if not self.equal_lengths:
            table = table.counted()
        return table if texts is None else replace(table, text_lengths=tuple(texts[row] for row in rows))

    def counted(self) -> "PositionTable":
        """The same table with `max_tokens`, `equal_lengths` and `contiguous` read off `token_counts`."""
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
            raise ConfigError(f"state: holds {self.batch} rows, the call has {rows}; make a state of that batch")

    def next_layout(self, length: int, token_counts: Tensor | None = None) -> Layout:
        """`length` more tokens in each row, after its newest token and in the same document.

        token_counts: int64 [B], how many of them are tokens; the others are padding, on the right.
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

        check: False if the layout is that of `next_layout`. Raises ConfigError if the number of rows differs, if the
        layout does not go on where the rows end, or if a row would get more tokens than `cache_length`.
        """
        self.check_batch(layout.batch)
        continues = layout.segment_ids is None and self.contiguous and layout.start == self.max_tokens
        if layout.segment_ids is None and not self.contiguous:
            layout = replace(layout, segment_ids=self.last_token[:, 1:].expand(layout.batch, layout.length))
        arrivals, counts = self._arrivals(layout)
        equal = self.equal_lengths and not layout.has_padding
        max_tokens, fewest = self.max_tokens + layout.length, layout.length
        # With padding of unknown length the number of new tokens is a value on the device, and so are a row's newest
        # token and the first of a layout from outside. Only then they are read, once for each call.
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
        """Take back the last `tokens` [B] of each row, at most `most`, in place; returns the new table and `freed`.

        freed(slots) is bool [B, slots], True at the slots of removed tokens in a buffer of that size.
        Raises ConfigError if a row has fewer tokens.
        """
        counts, newest = self.token_counts - tokens, self.token_counts - 1
        is_wrong = ((tokens < 0) | (counts < 0)).any()
        least, longest, wrong = torch.stack((counts.amin(), counts.amax(), is_wrong.long())).tolist()
        if wrong:
            raise ConfigError(
                f"rollback: cannot take back {tokens.tolist()} tokens of rows that hold {self.token_counts.tolist()}"
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
