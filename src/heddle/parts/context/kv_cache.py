"""Keys and values that a softmax mixer remembers: every token of a row, or a ring of the last few.

Tensors [B, G, slots, d], written in place, zero where unused. A ring attends over [what it held ; the call's own
tokens] and is written afterwards, so calls of any length are exact; a single token is written first.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heddle.numerics.attention.visibility import Visibility
from heddle.parts.context.layout import Layout
from heddle.parts.context.mixer_state import MixerState
from heddle.parts.context.position_table import GROWTH_START, Past, PositionTable


@dataclass(frozen=True, eq=False)
class Cache(MixerState):
    """keys [B, G, slots, d_k], values [B, G, slots, d_v]; `ring` slots are reused, others never."""

    keys: Tensor
    values: Tensor
    ring: bool

    @staticmethod
    def empty(
        shape: tuple[int, int, int, int],
        kept: int | None,
        capacity: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "Cache":
        """shape is (batch, groups, key width, value width); the last `kept` tokens are held, or all (None)."""
        batch, groups, d_k, d_v = shape
        limits = [limit for limit in (kept, capacity) if limit is not None]
        slots = max(1, min(limits)) if limits else GROWTH_START
        ring = kept is not None and (capacity is None or kept < capacity)
        keys = torch.zeros(batch, groups, slots, d_k, dtype=dtype, device=device)
        values = torch.zeros(batch, groups, slots, d_v, dtype=dtype, device=device)
        return Cache(keys, values, ring)

    def goes_back(self, tokens: int, table: PositionTable) -> bool:
        """A ring that has turned goes back as far as its slack; before, and without a ring, nothing was lost."""
        return not self.ring or table.peak <= self.keys.shape[2] or tokens <= table.spare

    def rewound(self, table: PositionTable, gone: Callable[[int], Tensor]) -> "Cache":
        """Slots of tokens taken back become zero, as if never written."""
        unused = gone(self.keys.shape[2])[:, None, :, None]
        self.keys.masked_fill_(unused, 0.0)
        self.values.masked_fill_(unused, 0.0)
        return self

    def extend(
        self, k: Tensor, v: Tensor, layout: Layout, window: int | None
    ) -> tuple[Tensor, Tensor, Visibility, "Cache"]:
        """Add a call's keys and values [B, G, T, d]; returns all keys, values, who sees them, the new cache."""
        past = layout.past
        assert past is not None
        cache = self if self.ring else self._grown(past.after.size)
        if layout.padding is not None:  # padding is written nowhere, and shown to nobody
            unused = layout.padding[:, None, :, None]
            k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
        if cache.ring and layout.length > 1:
            return cache._extend_ring(k, v, layout, window)
        slots = cache.keys.shape[2]
        destination = past.destination(slots)
        destination.write(cache.keys, k)
        destination.write(cache.values, v)
        held = min(past.after.filled, slots)
        keys, values = cache.keys[:, :, :held], cache.values[:, :, :held]
        return keys, values, _seen_after(past, layout, window, slots, held), cache

    def _extend_ring(
        self, k: Tensor, v: Tensor, layout: Layout, window: int | None
    ) -> tuple[Tensor, Tensor, Visibility, "Cache"]:
        past = layout.past
        assert past is not None
        slots = self.keys.shape[2]
        held = min(past.before.filled, slots)
        old_k, old_v = self._in_order(self.keys, past), self._in_order(self.values, past)
        keys, values = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
        seen = past.once(("seen ring", slots, window), lambda: _seen_with_ring(past, layout, window, slots, held))
        destination = past.destination(slots)
        destination.write(self.keys, k)
        destination.write(self.values, v)
        return keys, values, seen, self

    def _in_order(self, held: Tensor, past: Past) -> Tensor:
        """What the ring holds, oldest first where rows are level (else in slot order)."""
        slots, filled = held.shape[2], past.before.filled
        if filled <= slots or not past.level:
            return held[:, :, : min(filled, slots)]
        turn = filled % slots
        return torch.cat((held[:, :, turn:], held[:, :, :turn]), dim=2)

    def _grown(self, slots: int) -> "Cache":
        held = self.keys.shape[2]
        if slots <= held:
            return self
        wider = [
            torch.cat((x, x.new_zeros(*x.shape[:2], slots - held, x.shape[3])), dim=2) for x in (self.keys, self.values)
        ]
        return replace(self, keys=wider[0], values=wider[1])


def _seen_after(past: Past, layout: Layout, window: int | None, slots: int, held: int) -> Visibility:
    """Visibility of slots that already hold the call's own tokens."""

    def make() -> Visibility:
        positions, documents = past.ring(slots, after=True)
        ordered = past.after.ordered
        turned = past.after.filled > slots  # a full ring stands in slot order; one query sees it whole
        alone = layout.length == 1 and ordered
        return Visibility(
            layout.positions,
            positions[:, :held],
            None if ordered else layout.numbers,
            None if ordered else documents[:, :held],
            window=window,
            ordered=ordered and not turned,
            everything=alone and (window is None or held <= window),
            pieces=layout.pieces if past.before.filled == 0 and layout.length == held else None,
            ragged=not past.level,
        )

    return past.once(("seen after", slots, held, window), make)


def _seen_with_ring(past: Past, layout: Layout, window: int | None, slots: int, held: int) -> Visibility:
    """Visibility of [what the ring held ; the call's own tokens]."""
    positions, documents = past.ring(slots, after=False)
    if past.level and past.before.filled > slots:
        turn = past.before.filled % slots
        positions, documents = positions.roll(-turn, 1), documents.roll(-turn, 1)
    ordered = past.after.ordered
    return Visibility(
        layout.positions,
        torch.cat((positions[:, :held], layout.positions), dim=1),
        None if ordered else layout.numbers,
        None if ordered else torch.cat((documents[:, :held], layout.numbers), dim=1),
        window=window,
        ordered=ordered,
        pieces=layout.pieces if past.before.filled == 0 else None,
        ragged=not past.level,
    )
