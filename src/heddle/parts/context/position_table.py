"""The table of positions and documents that all layers of a state share, and where new tokens go.

Tokens are numbered by arrival in their row, padding never counts; arrival a stands in slot `a mod size`. A mixer
that keeps every token has as many slots as the table; one with a window keeps a ring of its own, smaller size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from heddle.errors import ConfigError
from heddle.parts.context.layout import Layout

V = TypeVar("V")

GROWTH_START = 64


@dataclass(frozen=True, eq=False)
class PositionTable:
    """Where the tokens of a state stand.

    positions, documents: int32 [B, size], −1 where unused. counts: int64 [B], tokens that arrived in each row.
    last: int64 [B, 2], position and document of each row's newest token. filled: no row has more tokens.
    level: every row has exactly `filled`. ordered: positions of every row are 0, 1, … in one document.
    reach: tokens that layers look back on (None: all). capacity: the declared limit (None: doubles when full).
    rewind: how many tokens more are kept, so that as many can be taken back; spare: how many can be now, by what
    rings kept. peak: the most tokens that a row ever had.
    """

    positions: Tensor
    documents: Tensor
    counts: Tensor
    last: Tensor
    reach: int | None
    capacity: int | None
    filled: int = 0
    level: bool = True
    ordered: bool = True
    rewind: int = 0
    spare: int = 0
    peak: int = 0

    @staticmethod
    def empty(
        batch: int, reach: int | None, capacity: int | None, device: torch.device | str, rewind: int = 0
    ) -> "PositionTable":
        """A table for rows without tokens."""
        # Beside those that can be taken back, at least the token before them, which says where the row goes on.
        size = (GROWTH_START if capacity is None else capacity) if reach is None else max(1, reach) + rewind
        if reach is not None and capacity is not None:
            size = min(size, capacity)
        positions = torch.full((batch, size), -1, dtype=torch.int32, device=device)
        last = torch.tensor([-1, 0], device=device).repeat(batch, 1)
        counts = torch.zeros(batch, dtype=torch.int64, device=device)
        return PositionTable(positions, torch.zeros_like(positions), counts, last, reach, capacity, rewind=rewind)

    @property
    def size(self) -> int:
        """Slots of the table."""
        return self.positions.shape[1]

    @property
    def batch(self) -> int:
        """Rows."""
        return self.positions.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the table, batch first."""
        return {"positions": self.positions, "documents": self.documents, "counts": self.counts, "last": self.last}

    def map(self, change: Callable[[Tensor], Tensor]) -> "PositionTable":
        """The same table with each tensor changed."""
        positions, documents, counts, last = (change(tensor) for tensor in self.tensors().values())
        return replace(self, positions=positions, documents=documents, counts=counts, last=last)

    @property
    def bytes(self) -> int:
        """Bytes of every tensor of the table."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def select(self, index: Tensor) -> "PositionTable":
        """A copy of the rows of `index` (int64), with the facts of these rows."""
        return self.map(lambda x: x.index_select(0, index))._counted()

    def _counted(self) -> "PositionTable":
        """The same table, its facts read off its counts."""
        least, most = torch.stack((self.counts.amin(), self.counts.amax())).tolist()
        level = least == most
        return replace(self, filled=most, level=level, ordered=self.ordered and level)

    def goes_back(self, tokens: int) -> bool:
        """Whether the position before the last `tokens` of each row is still known."""
        return self.reach is None or self.peak <= self.size or tokens <= self.spare

    def check_batch(self, rows: int) -> None:
        """Raises ConfigError if a call has another number of rows."""
        if rows != self.batch:
            raise ConfigError(f"state: holds {self.batch} rows, the call has {rows}; make a state of that batch")

    def following(self, length: int) -> Layout:
        """`length` more tokens in each row, after its newest one and in its document."""
        if self.level and self.ordered:
            return Layout.causal(self.batch, length, start=self.filled, device=self.positions.device)
        ahead = torch.arange(1, length + 1, device=self.positions.device)
        documents = self.last[:, 1:].expand(self.batch, length)
        return Layout(self.last[:, :1] + ahead, documents, has_padding=False)

    def extend(self, layout: Layout) -> "tuple[PositionTable, Layout]":
        """Write the tokens of a call; returns the new table and the layout with its `past` set.

        Raises ConfigError if the rows differ in number, or the declared capacity would be exceeded.
        """
        self.check_batch(layout.batch)
        arrivals, counts = self._arrivals(layout)
        # Padding makes the number of tokens a value: it is read once a call, only when there may be padding.
        level = self.level and not layout.has_padding
        filled, fewest = self.filled + layout.length, layout.length
        if layout.has_padding and layout.length:
            filled, fewest = torch.stack((counts.amax(), (counts - self.counts).amin())).tolist()
        if self.capacity is not None and filled > self.capacity:
            raise ConfigError(
                f"state: capacity {self.capacity} is too small for {filled} tokens; make it with a larger capacity"
            )
        before = self._grown(filled)
        ordered = before.ordered and layout.start == before.filled and level
        last = before._last(layout, arrivals)
        spare = min(self.rewind, self.spare + fewest)
        peak = max(self.peak, filled)
        after = replace(before, counts=counts, last=last, filled=filled, level=level, ordered=ordered)
        after = replace(after, spare=spare, peak=peak)
        if self.reach is not None:  # a ring overwrites what `before` must still tell
            after = replace(after, positions=before.positions.clone(), documents=before.documents.clone())
        destination = Destination.of(before, layout, arrivals, counts, before.size)
        destination.write(after.positions, layout.positions.to(torch.int32))
        destination.write(after.documents, layout.numbers.to(torch.int32))
        past = Past(before, after, arrivals, layout)
        return after, replace(layout, past=past, memo={})

    def rewound(self, tokens: Tensor) -> "tuple[PositionTable, Callable[[int], Tensor]]":
        """Take back the last `tokens` [B] of each row, in place; returns the new table, and which slots became free.

        The second is a function of a number of slots: bool [B, slots], slot = arrival mod slots.
        Raises ConfigError if a row has fewer tokens.
        """
        most = int(tokens.max())
        if bool(((tokens < 0) | (tokens > self.counts)).any()):
            raise ConfigError(
                f"rewind: cannot take back {tokens.tolist()} tokens of rows that hold {self.counts.tolist()}"
            )
        counts, newest = self.counts - tokens, self.counts - 1

        def gone(size: int) -> Tensor:
            slots = torch.arange(size, device=counts.device)
            arrivals = newest[:, None] - (newest[:, None] - slots) % size
            return (arrivals >= counts[:, None]) & (arrivals >= 0)

        free = gone(self.size)
        self.positions.masked_fill_(free, -1)
        self.documents.masked_fill_(free, 0)
        slot = ((counts - 1) % self.size)[:, None]
        held = torch.cat((self.positions.gather(1, slot), self.documents.gather(1, slot)), dim=1).long()
        last = torch.where((counts > 0)[:, None], held, torch.tensor([-1, 0], device=counts.device))
        return replace(self, counts=counts, last=last, spare=max(0, self.spare - most))._counted(), gone

    def _arrivals(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Arrival number of each token [B, T] (−1 for padding), and the counts afterwards [B]."""
        if not layout.has_padding:
            ahead = torch.arange(layout.length, device=self.counts.device)
            return self.counts[:, None] + ahead, self.counts + layout.length
        real = layout.positions >= 0
        arrivals = self.counts[:, None] + real.cumsum(1) - 1
        return torch.where(real, arrivals, -1), self.counts + real.sum(1)

    def _last(self, layout: Layout, arrivals: Tensor) -> Tensor:
        if layout.length == 0:
            return self.last
        newest = arrivals.argmax(1, keepdim=True)
        now = torch.cat((layout.positions.gather(1, newest), layout.numbers.gather(1, newest)), dim=1)
        return torch.where(arrivals.amax(1, keepdim=True) >= 0, now, self.last)

    def _grown(self, filled: int) -> "PositionTable":
        """A table with room; one that must keep everything doubles."""
        if self.reach is not None or filled <= self.size:
            return self
        size = self.size
        while size < filled:
            size *= 2
        wider = (self.batch, size - self.size)
        positions = torch.cat((self.positions, self.positions.new_full(wider, -1)), dim=1)
        documents = torch.cat((self.documents, self.documents.new_zeros(wider)), dim=1)
        return replace(self, positions=positions, documents=documents)

    def ring(self, size: int) -> tuple[Tensor, Tensor]:
        """Positions and documents [B, size] of what the slots of a ring hold; −1 where a slot is unused."""
        slots = torch.arange(size, device=self.counts.device)
        newest = self.counts[:, None] - 1
        arrivals = newest - (newest - slots) % size
        index = arrivals.clamp(min=0) % self.size
        positions = torch.where(arrivals >= 0, self.positions.gather(1, index).long(), -1)
        return positions, self.documents.gather(1, index).long()


@dataclass(frozen=True, eq=False)
class Destination:
    """The slots in a ring of `size` where the tokens of a call go.

    Level rows write slices [(source, target), …]; others write single tokens (row, slot, token). Tokens that the
    same call overwrites again are not written.
    """

    slices: tuple[tuple[slice, slice], ...] | None
    rows: Tensor | None = None
    slots: Tensor | None = None
    tokens: Tensor | None = None

    @staticmethod
    def of(table: PositionTable, layout: Layout, arrivals: Tensor, counts: Tensor, size: int) -> "Destination":
        """Where a call's tokens go, `table` being that before the call."""
        if table.level and not layout.has_padding:
            kept = min(layout.length, size)
            source, slot = layout.length - kept, (table.filled + layout.length - kept) % max(size, 1)
            straight = min(kept, size - slot)
            slices = [(slice(source, source + straight), slice(slot, slot + straight))]
            if straight < kept:
                slices.append((slice(source + straight, source + kept), slice(0, kept - straight)))
            return Destination(tuple(slices))
        keep = (arrivals >= 0) & (arrivals >= counts[:, None] - size)
        if layout.length == 1 and not layout.has_padding:
            rows = torch.arange(table.batch, device=arrivals.device)
            return Destination(None, rows, arrivals[:, 0] % size, torch.zeros_like(rows))
        rows, tokens = keep.nonzero(as_tuple=True)
        return Destination(None, rows, arrivals[rows, tokens] % size, tokens)

    def write(self, target: Tensor, source: Tensor) -> None:
        """Write source [B, T] into target [B, size], or [B, G, T, d] into [B, G, size, d], in place."""
        heads = target.dim() == 4
        if self.slices is not None:
            for there, here in self.slices:
                if heads:
                    target[:, :, here] = source[:, :, there].to(target.dtype)
                else:
                    target[:, here] = source[:, there]
        elif heads:
            target[self.rows, :, self.slots] = source[self.rows, :, self.tokens].to(target.dtype)
        else:
            target[self.rows, self.slots] = source[self.rows, self.tokens]


@dataclass(frozen=True, eq=False)
class Past:
    """What a mixer needs of the state's table in one call: the table before and after, and where tokens go."""

    before: PositionTable
    after: PositionTable
    arrivals: Tensor
    layout: Layout
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Any, make: Callable[[], V]) -> V:
        """Make a value the first time a layer asks for it."""
        if key not in self.memo:
            self.memo[key] = make()
        value: V = self.memo[key]
        return value

    @property
    def level(self) -> bool:
        """Every row has the same number of tokens, before and after."""
        return self.after.level

    def destination(self, size: int) -> Destination:
        """Where this call's tokens go in a ring of `size` slots."""
        make = lambda: Destination.of(self.before, self.layout, self.arrivals, self.after.counts, size)  # noqa: E731
        return self.once(("destination", size), make)

    def ring(self, size: int, after: bool) -> tuple[Tensor, Tensor]:
        """Positions and documents of a ring's slots before or after this call."""
        return self.once(("ring", size, after), lambda: (self.after if after else self.before).ring(size))
