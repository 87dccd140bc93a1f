"""Blocks of a document's tokens: which exist, where a call's tokens end some, and what a state keeps of them.

Block b has the tokens at positions b · ratio … (b + 1) · ratio − 1 of a document. It is finished, and may have an
entry, once the document has all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.dispatch import counts_flops
from heddle.parts.layout import Layout
from heddle.parts.position_table import INITIAL_SLOTS, PositionTable
from heddle.parts.states import MixerState, StateSpec


class CallBlocks(NamedTuple):
    """The blocks of a call's rows, each at the slot ⌊arrival of its last token / ratio⌋, which no other block has.

    ends, segments: position and document of each block's last token, int64 [B, S]; −1: there is no block. slots: the
    slots that the call may fill, int64 [B, n]; filled: bool [B, n], whether it does. last: which of the call's tokens,
    padding not counted, ends the block, int64 [B, n]; 0 where none does. before: bool [B, n, ratio], which tokens of
    the block before there are in the document. order: the call's tokens with padding last, int64 [B, T]; None without
    padding. layout: of the filled blocks, at the positions of their first tokens.
    """

    ends: Tensor
    segments: Tensor
    slots: Tensor
    filled: Tensor
    last: Tensor
    before: Tensor
    order: Tensor | None
    layout: Layout


def block_ends(positions: Tensor, segment_ids: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Positions and documents [B, N] of a row's tokens as they arrive, −1 where there is none.

    Returns the arrival of the last token of the block at each slot, and its position, or −1; int64 [B, ⌈N / ratio⌉].
    Blocks of a row end at least `ratio` arrivals apart, so that no two have the same slot.
    """
    positions, length = positions.to(torch.int64), positions.shape[1]
    first = functional.pad(segment_ids, (ratio - 1, 0), value=-1)[:, :length]  # ratio − 1 arrivals before
    is_end = (positions >= 0) & (positions % ratio == ratio - 1) & (first == segment_ids)
    ends = functional.pad(torch.where(is_end, positions, -1), (0, -length % ratio), value=-1)
    ends, place = ends.unflatten(1, (-1, ratio)).max(2) if length else (ends, ends)
    return torch.arange(ends.shape[1], device=ends.device) * ratio + place, ends


def call_blocks(layout: Layout, ratio: int) -> CallBlocks:
    """The blocks after a call, computed once for all layers of this ratio."""
    return layout.cached(("blocks", ratio), lambda: _call_blocks(layout, ratio))


def _call_blocks(layout: Layout, ratio: int) -> CallBlocks:
    view, length, padding = layout.cache_view, layout.length, layout.padding
    order = None if padding is None else padding.to(torch.int8).argsort(dim=1, stable=True)
    if view is None:
        positions, segments = layout.positions, layout.dense_segment_ids
        if order is not None:
            positions, segments = positions.gather(1, order), segments.gather(1, order)
        before, tokens = positions.new_zeros(len(positions)), length
    else:
        table, tokens = view.after, min(view.after.max_tokens, view.after.size)
        positions, segments = table.positions[:, :tokens].to(torch.int64), table.segment_ids[:, :tokens].to(torch.int64)
        before = view.before.token_counts
    arrivals, ends = block_ends(positions, segments, ratio)
    total = ends.shape[1]
    most = min((length + ratio - 2) // ratio + 1, total) if length else 0  # slots that adjacent arrivals can lie in
    slots = (before // ratio).clamp(max=total - most)[:, None] + torch.arange(most, device=ends.device)
    last, end = arrivals.gather(1, slots), ends.gather(1, slots)
    filled = (end >= 0) & (last >= before[:, None])
    earlier = last[..., None] - torch.arange(2 * ratio - 1, ratio - 1, -1, device=ends.device)  # the block before
    all_segments = segments.gather(1, last.clamp(max=max(tokens - 1, 0)))
    theirs = segments.gather(1, earlier.clamp(min=0, max=max(tokens - 1, 0)).flatten(1)).view_as(earlier)
    end_segments = segments.gather(1, arrivals.clamp(max=max(tokens - 1, 0)))
    return CallBlocks(
        ends,
        end_segments,
        slots,
        filled,
        torch.where(filled, last - before[:, None], 0),
        (earlier >= 0) & (theirs == all_segments[..., None]),
        order,
        Layout(torch.where(filled, end - (ratio - 1), -1), is_checked=True),
    )


def block_pairs(tokens: int, ratio: int, most: int | None = None) -> int:
    """How many entries the queries of a document of `tokens` tokens see: Σ_i min(most, ⌊(i + 1) / ratio⌋)."""
    blocks, rest = divmod(tokens, ratio)
    pairs = ratio * blocks * (blocks - 1) // 2 + blocks * (rest + 1)
    return pairs if most is None or tokens < ratio * most else pairs - block_pairs(tokens - ratio * most, ratio)


@dataclass(frozen=True, eq=False)
class BlockCache(MixerState):
    """The entries of a row's finished blocks, and what its last tokens will add to the next ones.

    entries [B, slots, channels], by slot as in `CallBlocks`; unused slots are zero. tail [B, tokens, ...]: of the last
    tokens as they arrived, as many as the next entry can need and `rollback` more; zero before the first one.
    """

    entries: Tensor
    tail: Tensor
    ratio: int

    def join(self, others: Sequence[Self]) -> Self:
        """As in `MixerState`. All get the slots of the largest."""
        slots = max(cache.entries.shape[1] for cache in (self, *others))
        return MixerState.join(self.grown(slots), [cache.grown(slots) for cache in others])

    def grown(self, slots: int) -> Self:
        """The cache with at least these slots for entries."""
        added = max(0, slots - self.entries.shape[1])
        return replace(self, entries=functional.pad(self.entries, (0, 0, 0, added))) if added else self

    def can_roll_back(self, tokens: int, table: PositionTable) -> bool:
        """Any number of tokens, as long as all of them are in the tail; then at most `rollback_left`."""
        return table.peak_tokens <= self.tail.shape[1] or tokens <= table.rollback_left

    def rolled_back(self, table: PositionTable, freed: Callable[[int], Tensor]) -> Self:
        """The tail ends before the removed tokens; entries of blocks that they ended become zero."""
        size, slots = self.tail.shape[1], self.entries.shape[1]
        index = torch.arange(size, device=self.tail.device) - freed(size).sum(1)[:, None]
        rows = torch.arange(len(index), device=index.device)[:, None]
        before = (index < 0).view(*index.shape, *(1 for _ in self.tail.shape[2:]))
        tail = self.tail[rows, index.clamp(min=0)].masked_fill(before, 0.0)
        _, ends = block_ends(table.positions, table.segment_ids, self.ratio)
        ends = functional.pad(ends, (0, max(0, slots - ends.shape[1])), value=-1)[:, :slots]
        self.entries.masked_fill_((ends < 0)[..., None], 0.0)
        return replace(self, tail=tail)


def block_tokens(raw: Tensor, lead: int, blocks: CallBlocks, ratio: int) -> Tensor:
    """What the tokens of each block that a call may fill add to it, [B, n, ratio, ...]; raw as in `extend_blocks`."""
    rows = torch.arange(len(raw), device=raw.device)[:, None, None]
    places = blocks.last[..., None] + lead - torch.arange(ratio - 1, -1, -1, device=raw.device)
    return raw[rows, places.clamp(min=0)]


C = TypeVar("C", bound=BlockCache)


def empty_blocks(
    spec: StateSpec, ratio: int, tail: int, channels: int, of_token: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """The entries and the tail of an empty cache. tail: tokens that the next entry can need, each of shape of_token."""
    slots = INITIAL_SLOTS if spec.cache_length is None else spec.cache_length
    shapes = (-(-slots // ratio), channels), (tail + spec.rollback, *of_token)
    entries, last = (torch.zeros((spec.batch, *shape), dtype=spec.dtype, device=spec.device) for shape in shapes)
    return entries, last


def extend_blocks(
    cache: C | None,
    raw: Tensor,
    blocks: CallBlocks,
    layout: Layout,
    make: Callable[[Tensor, int, CallBlocks], Tensor],
) -> tuple[Tensor, C | None]:
    """The entries [B, S, channels] after a call, and the new cache.

    raw [B, T, ...]: what the call's tokens add to entries. make(raw, lead, blocks): the entries that the call may fill
    [B, n, channels], of the raw elements of `lead` tokens before the call, and of its own.
    """
    rows = torch.arange(len(raw), device=raw.device)[:, None]
    if blocks.order is not None:
        hidden = (layout.positions < 0).view(*raw.shape[:2], *(1 for _ in raw.shape[2:]))
        raw = raw.masked_fill(hidden, 0.0)[rows, blocks.order]
    if cache is None:
        return make(raw, 0, blocks).masked_fill(~blocks.filled[..., None], 0.0), None
    view, lead = layout.cache_view, cache.tail.shape[1]
    assert view is not None
    raw = torch.cat((cache.tail, raw.to(cache.tail.dtype)), dim=1)
    cache, used = cache.grown(-(-view.after.size // cache.ratio)), blocks.ends.shape[1]
    entries = cache.entries[:, :used]
    slots = blocks.slots[..., None].expand(-1, -1, entries.shape[2])
    made = make(raw, lead, blocks).to(entries.dtype)
    entries.scatter_(1, slots, torch.where(blocks.filled[..., None], made, entries.gather(1, slots)))
    if layout.padding is None:
        last = raw[:, layout.length :].clone()
    else:
        added = view.after.token_counts - view.before.token_counts
        last = raw[rows, added[:, None] + torch.arange(lead, device=raw.device)]
    return entries, replace(cache, tail=last)


def entry_pairs(layout: Layout, ratio: int, most: int | None) -> tuple[int, int]:
    """Pairs of a query of the call and an entry that it sees, `most` for each query; and the tokens after the call."""
    length, view = layout.length, layout.cache_view
    tokens = length if view is None else view.after.max_tokens
    return block_pairs(tokens, ratio, most) - block_pairs(tokens - length, ratio, most), tokens


def block_mask(layout: Layout, blocks: CallBlocks, ratio: int) -> AttentionMask:
    """The mask over the entries of finished blocks, for all layers of this ratio."""

    def make() -> AttentionMask:
        documents = layout.dense_segment_ids, blocks.segments
        pairs = entry_pairs(layout, ratio, None)[0] if counts_flops() else None
        return AttentionMask(layout.positions, blocks.ends, *documents, may_have_padding=True, pair_count=pairs)

    return layout.cached(("block mask", ratio), make)


def tail_pairs(layout: Layout, ratio: int) -> int:
    """Pairs of a query of the call and a key of its block, where the query does not finish it."""

    def of(tokens: int) -> int:
        blocks, rest = divmod(tokens, ratio)
        return blocks * (ratio * (ratio - 1) // 2) + rest * (rest + 1) // 2

    tokens = entry_pairs(layout, ratio, None)[1]
    return of(tokens) - of(tokens - layout.length)


def finished_blocks(layout: Layout, blocks: CallBlocks, ratio: int) -> Tensor:
    """The slot of each key's block in `blocks`, −1 where it is not finished: int64 [B, keys].

    The keys are the call's tokens, or with a state those of a cache of all tokens.
    """

    def make() -> Tensor:
        view = layout.cache_view
        if view is None:
            positions, segments = layout.positions, layout.dense_segment_ids
            arrivals = (positions >= 0).cumsum(1) - 1
        else:
            used = min(view.after.max_tokens, view.after.size)
            positions, segments = (x[:, :used] for x in (view.after.positions, view.after.segment_ids))
            arrivals = torch.arange(used, device=positions.device)
        ahead = ratio - 1 - positions.to(torch.int64) % ratio  # tokens until the block is finished
        slots = ((arrivals + ahead) // ratio).clamp(min=0, max=max(blocks.ends.shape[1] - 1, 0))
        is_there = (blocks.ends.gather(1, slots) == positions + ahead) & (blocks.segments.gather(1, slots) == segments)
        return slots.masked_fill(~is_there | (positions < 0), -1)

    return layout.cached(("finished blocks", ratio), make)
