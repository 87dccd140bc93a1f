"""The attention mask: which keys each query sees, from positions, segment ids and a window.

A query at position i sees a key at position j if both are tokens (position ≥ 0), both have the same segment id, and
the window allows it: causal `0 ≤ i − j < w` (w keys including itself), bidirectional `|i − j| ≤ w` (w on each side).
With chunks of w positions, also ⌊i / w⌋ = ⌊j / w⌋: the chunks of a document then have segment ids of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.attention.householder import HouseholderProducts
from heddle.numerics.norms import at_least_float32

V = TypeVar("V")
CHUNKS = 2**31  # more than a document can have


@dataclass(frozen=True)
class AttentionMask:
    """Positions and segment ids of queries and keys, with static facts for choosing a kernel without reading values.

    contiguous: in each row the keys have consecutive positions in one document, and the queries are the last T of them.
    all_visible: every query sees every key.
    doc_lengths: packed rows, T = S: the document lengths of each row. Each document is contiguous and sees only itself.
    may_have_padding: some key slots may be padding or unused. Their contents must not reach any result.
    selected: bool [B, N, T, S], the keys that an indexer selected for each query, at most `most_selected` of the
    visible ones; entry n is for the n-th of N equal shares of the heads. None: all visible keys.
    chunk: the width of the chunks that the segment ids tell apart. None: they separate documents only.
    pair_count: the number of visible pairs of a row, where keys are not consecutive tokens.
    adjacent: T = S, queries and keys are the same tokens, and the documents of a row lie next to each other.
    """

    q_positions: Tensor  # int [B, T], −1 is padding
    k_positions: Tensor  # int [B, S], −1 is padding or unused
    q_segment_ids: Tensor | None = None  # int [B, T]
    k_segment_ids: Tensor | None = None  # int [B, S]
    window: int | None = None
    causal: bool = True
    contiguous: bool = False
    all_visible: bool = False
    doc_lengths: tuple[tuple[int, ...], ...] | None = None
    may_have_padding: bool = False
    selected: Tensor | None = None
    most_selected: int | None = None
    chunk: int | None = None
    pair_count: int | None = None
    adjacent: bool = False
    cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached(self, key: Any, make: Callable[[], V]) -> V:
        """`make()`, computed for the first layer that asks and stored for the others. `replace` drops it."""
        if key not in self.cache:
            with torch.inference_mode(False):  # a mask made in inference may be used in training afterwards
                self.cache[key] = make()
        value: V = self.cache[key]
        return value

    def for_queries(self, queries: slice) -> "AttentionMask":
        """The mask of some of the queries, without the static facts."""
        segment_ids = None if self.q_segment_ids is None else self.q_segment_ids[:, queries]
        positions = self.q_positions[:, queries]
        mask = AttentionMask(positions, self.k_positions, segment_ids, self.k_segment_ids, self.window, self.causal)
        if self.selected is None:
            return mask
        return replace(mask, selected=self.selected[:, :, queries], most_selected=self.most_selected)

    def selecting(self, selected: Tensor, most: int) -> "AttentionMask":
        """The mask restricted to `selected`, bool [B, N, T, S], at most `most` of the keys visible to each query."""
        facts: dict[str, Any] = {"contiguous": False, "all_visible": False, "doc_lengths": None}
        return replace(self, selected=selected, most_selected=most, **facts)

    def in_chunks(self, width: int, doc_lengths: tuple[tuple[int, ...], ...] | None) -> "AttentionMask":
        """The mask whose documents are cut at multiples of `width` positions; doc_lengths: of the pieces, if known."""

        def chunk_ids(positions: Tensor, segment_ids: Tensor | None) -> Tensor:
            chunks = positions.to(torch.int64).div(width, rounding_mode="floor")
            return chunks if segment_ids is None else segment_ids.to(torch.int64) * CHUNKS + chunks

        return replace(
            self,
            q_segment_ids=chunk_ids(self.q_positions, self.q_segment_ids),
            k_segment_ids=chunk_ids(self.k_positions, self.k_segment_ids),
            window=self.window if doc_lengths is None else None,  # no piece is longer
            contiguous=False,
            all_visible=False,
            doc_lengths=doc_lengths,
            chunk=width,
        )

    def first_keys(self) -> Tensor:
        """The first key that each query sees, int64 [B, T], of an `adjacent` causal mask without padding."""
        index = torch.arange(self.q_positions.shape[1], device=self.q_positions.device).expand_as(self.q_positions)
        if self.q_segment_ids is None:
            first = torch.zeros_like(index)
        else:
            begins = self.q_segment_ids[:, 1:] != self.q_segment_ids[:, :-1]
            first = functional.pad(index[:, 1:] * begins, (1, 0)).cummax(1).values
        return first if self.window is None else torch.maximum(first, index - self.window + 1)

    def pairs(self, queries: int, keys: int) -> int:
        """Number of visible (query, key) pairs when the queries are the last of consecutive keys.

        With chunks, the first key is taken to be the first of a chunk.
        """
        if self.pair_count is not None:
            return self.pair_count
        if self.chunk is not None:
            return self._pairs_of_chunks(keys) - self._pairs_of_chunks(keys - queries)
        return visible_pairs(queries, keys, self.window, self.causal, self.most_selected)

    def _pairs_of_chunks(self, tokens: int) -> int:
        assert self.chunk is not None
        chunks, rest = divmod(tokens, self.chunk)
        whole, last = (visible_pairs(n, n, None, self.causal, self.most_selected) for n in (self.chunk, rest))
        return chunks * whole + last

    def collapse_equal_rows(self) -> "AttentionMask":
        """The mask of the first row only, if all rows are known to be equal. Otherwise the mask itself."""
        if not (self.contiguous or self.all_visible):
            return self
        return replace(self, q_positions=self.q_positions[:1], k_positions=self.k_positions[:1])

    def offsets(self) -> Tensor:
        """i − j of every query and key, int [B, T, S], or [1, T, S] if all rows are known to be equal."""
        mask = self.collapse_equal_rows()
        return mask.q_positions[:, :, None] - mask.k_positions[:, None, :]

    def materialize(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Which keys are visible to which queries, before any selection: bool [B, queries, keys]."""
        i = self.q_positions[:, queries, None]
        j = self.k_positions[:, None, keys]
        visible = (j >= 0) & (i >= 0)
        if self.causal:
            visible = visible & (j <= i)
            if self.window is not None:
                visible = visible & (i - j < self.window)
        elif self.window is not None:
            visible = visible & ((i - j).abs() <= self.window)
        if self.q_segment_ids is not None and self.k_segment_ids is not None:
            visible = visible & (self.q_segment_ids[:, queries, None] == self.k_segment_ids[:, None, keys])
        return visible

    def visible(self, heads: int, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Which keys the heads attend to: bool [B, heads, queries, keys], or [B, 1, queries, keys] for all heads."""
        visible = self.materialize(queries, keys)[:, None]
        if self.selected is None:
            return visible
        selected = self.selected[:, :, queries, keys]
        shares = selected.shape[1]
        return visible & (selected if shares == 1 else selected.repeat_interleave(heads // shares, dim=1))


def zero_unused_slots(k: Tensor, v: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Zero the key and value slots that hold no token: NaN there would reach a result, as 0 · NaN is NaN."""
    if not mask.may_have_padding:
        return k, v
    unused = (mask.k_positions < 0)[:, None, :, None]
    return k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)


def visible_pairs(queries: int, keys: int, window: int | None, causal: bool, most: int | None = None) -> int:
    """Number of visible (query, key) pairs when the queries are the last of consecutive keys.

    most: the largest number of keys that each query attends to within its window. None: all.
    """
    if most is not None and causal:
        return visible_pairs(queries, keys, most if window is None else min(most, window), causal)
    if most is not None:
        most = min(most, keys)
        fewer = 0 if window is None else max(0, most - window - 1)  # windows are truncated at both ends
        return queries * most - fewer * (fewer + 1)
    if not causal:
        if window is None:
            return queries * keys
        half_width = min(window, keys - 1)
        if queries == keys:
            return keys * (2 * half_width + 1) - half_width * (half_width + 1)
        return queries * min(keys, 2 * half_width + 1)
    max_keys = keys if window is None else min(window, keys)
    first_visible = keys - queries + 1  # keys before and at the first query
    partial_queries = max(0, min(queries, max_keys - first_visible))  # queries that see fewer than `max_keys` keys
    return partial_queries * (2 * first_visible + partial_queries - 1) // 2 + (queries - partial_queries) * max_keys


# Modifiers of attention scores: softcap (Gemma 2), a score bias (ALiBi, T5), a bias by tokens (FoX, Inkling, PaTH),
# attention sink (gpt-oss).
#
#     score = cap · tanh(q k · scale / cap) + bias_h(i − j) + bias_h,i,j,   weights = softmax([scores ; sink_h])[:-1]
#
# Everything here is computed in at least float32.


class ScoreBiasFunction(Protocol):
    """What is added to the scores: a function of the offset i − j of query i and key j, for each head.

    It may depend on tensors that have gradients. Kernels call it for the offsets that they need.
    """

    def __call__(self, offsets: Tensor, /) -> Tensor:
        """offsets int64 [...] -> the bias of each head at each offset, [H, ...], in at least float32."""


class LinearBias(NamedTuple):
    """−slope_h · |i − j| (ALiBi), with the slope of each head [H]. A kernel may compute it from the slopes."""

    slopes: Tensor

    def __call__(self, offsets: Tensor, /) -> Tensor:
        """offsets int64 [...] -> [H, ...]."""
        slopes = self.slopes.view(-1, *(1 for _ in offsets.shape))
        return slopes * -offsets.abs().to(slopes.dtype)


class TokenBias(NamedTuple):
    """What the tokens themselves add to the score of query i and key j, in causal attention.

    log_forget [B, H, S]: Σ_l log_forget_l over the tokens l after j up to i, those hidden from i left out. relative
    [B, H, T, E]: element i − j of query i, and 0 from E on. products: what they add, without a window. ordered: whether
    later keys of a document have later slots.
    """

    log_forget: Tensor | None = None
    relative: Tensor | None = None
    products: HouseholderProducts | None = None
    ordered: bool = True

    def for_queries(self, queries: slice) -> "TokenBias":
        """The bias of some of the queries."""
        relative = None if self.relative is None else self.relative[:, :, queries]
        products = None if self.products is None else self.products._replace(q=self.products.q[:, :, queries])
        return self._replace(relative=relative, products=products)

    def __call__(self, mask: AttentionMask) -> Tensor:
        """[B, H, T, S] in at least float32. Sums run over each query's own keys, so no other document changes a bit."""
        biases = [] if self.products is None else [self.products.bias(mask.visible(1)[:, 0])]
        if self.relative is not None:
            offsets, extent = mask.offsets().to(torch.int64)[:, None], self.relative.shape[3]
            index = offsets.clamp(0, extent - 1).expand(*self.relative.shape[:2], -1, -1)
            beyond = (offsets < 0) | (offsets >= extent)
            biases.append(at_least_float32(self.relative).gather(3, index).masked_fill(beyond, 0.0))
        if self.log_forget is not None:
            logs, visible = self.log_forget[:, :, None], mask.materialize()[:, None]
            order = None if self.ordered else mask.k_positions.argsort(1)[:, None, None]
            if order is not None:
                logs, visible = logs.gather(3, order.expand_as(logs)), visible.gather(3, order.expand_as(visible))
            shown = at_least_float32(logs).masked_fill(~visible, 0.0)
            later = functional.pad(shown[..., 1:], (0, 1)).flip(3).cumsum(3).flip(3)
            biases.append(later if order is None else later.gather(3, order.argsort(3).expand_as(later)))
        return sum(biases[1:], biases[0])


class ScoreModifiers(NamedTuple):
    """`softcap` bounds the scores. The biases are added to them. `sink` [H] is one logit per head without a value."""

    softcap: float | None = None
    sink: Tensor | None = None
    score_bias: ScoreBiasFunction | None = None
    token_bias: TokenBias | None = None

    def for_queries(self, queries: slice) -> "ScoreModifiers":
        """The modifiers of some of the queries."""
        return self if self.token_bias is None else self._replace(token_bias=self.token_bias.for_queries(queries))

    def sink_per_query(self, q: Tensor) -> Tensor | None:
        """The sink of every query of q [B, H, T, d]: [B, H, T, 1]."""
        return None if self.sink is None else at_least_float32(self.sink)[:, None, None].expand(*q.shape[:3], 1)

    def bias(self, mask: AttentionMask) -> Tensor | None:
        """The bias of every query and key, [B, H, T, S], or [1, H, T, S] if all rows are known to have the same."""
        bias = None if self.score_bias is None else self.score_bias(mask.offsets()).transpose(0, 1)
        if self.token_bias is None:
            return bias
        return self.token_bias(mask) if bias is None else bias + self.token_bias(mask)

    def distance_table(self, keys: int, device: torch.device) -> Tensor | None:
        """The score bias at the offsets 0 … keys − 1, [H, keys]: all that causal attention needs."""
        return None if self.score_bias is None else self.score_bias(torch.arange(keys, device=device))


class BlockModifiers(NamedTuple):
    """The modifiers of a call whose queries may be in blocks: `sink` [B, H, T, 1], `bias` [H, T, S] or folded.

    With `blocks` > 1 each group of keys is repeated `blocks` times in a row, and all repeats have the same bias.
    """

    softcap: float | None = None
    sink: Tensor | None = None
    bias: Tensor | None = None
    blocks: int = 1


NO_MODIFIERS = ScoreModifiers()
NO_BLOCK_MODIFIERS = BlockModifiers()
