"""Which keys a query attends to, one by one or in blocks, by an indexer (DeepSeek Sparse Attention, 2025).

    score(i, j) = Σ_h w_h(i) · relu(q_h(i) · k(j)),   or without weights   score_h(i, j) = q_h(i) · k(j)

Query i attends to the `top_k` keys of the highest score among those that its mask shows, or to all shown keys of the
`top_k` blocks of the highest score. A block is the keys of one document at positions b · block … (b + 1) · block − 1:
it counts a document's own tokens, wherever they lie in a row. Its score is the highest of its shown keys, or their
mean, which is q · mean(k) of these keys; or the weight that it has in the softmax of these means over all blocks whose
every key is shown, averaged over the heads of a key head, which select together, and 0 for other blocks. With weights
all heads of the attention attend to the same keys; without them each head has a selection, for an equal share of the
heads.

Of equal scores those at the lowest positions win. Scores are compared in 16 significant bits (float64: 33): products of
different shapes round differently, and equal keys should tie in all of them. Everything is computed in at least
float32. A selection has no gradient.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from heddle.numerics.attention.mask import (
    NO_MODIFIERS,
    AttentionMask,
    ScoreModifiers,
    zero_unused_slots,
)
from heddle.numerics.attention.softmax import softmax_weights
from heddle.numerics.dispatch import DeviceSize, add_flops, counts_flops
from heddle.numerics.norms import at_least_float32, without_autocast

# Scores of one head of the indexer, or weights of the attention, that exist at one time.
MAX_SCORES = DeviceSize(cpu=2**22, accelerator=2**26)
COMPARED = {
    torch.float32: (torch.int32, 8),
    torch.float64: (torch.int64, 20),
}  # dtype -> bits, and how many are dropped


BlockScore = Literal["highest", "mean", "attention"]


class Choice(NamedTuple):
    """What is selected. block: positions in a block.

    local, first: blocks up to the query's own, and from its document's position 0, that are always selected.
    """

    top_k: int
    block: int = 1
    score: BlockScore = "highest"
    local: int = 0
    first: int = 0


class Blocks(NamedTuple):
    """The blocks of a mask's keys. of_key: int64 [B, S]. numbers: position // block of each block, int64 [B, blocks].

    In each row blocks are in the order of their documents and positions. Blocks without a key have the number −1.
    """

    of_key: Tensor
    numbers: Tensor


class KeyBlocks(NamedTuple):
    """Blocks with one pooled key each: which blocks queries see, and the block of each key, int64 [B, S]; −1: none."""

    mask: AttentionMask
    of_key: Tensor


def indexer_flops(pairs: int, batch: int, heads: int, dim: int, weighted: bool = True) -> int:
    """FLOPs of the scores of `pairs` (query, key) pairs: a product of `dim` elements per head, and their sum."""
    return 2 * batch * pairs * heads * (dim + int(weighted))


def index_scores(q: Tensor, k: Tensor, weights: Tensor | None) -> Tensor:
    """q [B, H, T, d], k [B, G, S, d], weights [B, H, T] -> scores [B, 1, T, S] in at least float32.

    Without weights [B, H, T, S], where head h reads key head h // (H / G).
    """
    with without_autocast(q):
        q, k = at_least_float32(q), at_least_float32(k)
        per_head = torch.matmul(q.unflatten(1, (k.shape[1], -1)), k[:, :, None].mT).flatten(1, 2)
        if weights is None:
            return per_head
        return torch.einsum("bht,bhts->bts", at_least_float32(weights), per_head.relu())[:, None]


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """The largest scale · q·k of each head over its visible pairs: [H] in at least float32; −inf without any."""
    q, k = q.detach(), zero_unused_slots(k.detach(), k.detach(), mask)[0]
    largest = at_least_float32(q.new_full((q.shape[1],), float("-inf")))
    for queries in _query_tiles(q, q.shape[0] * q.shape[1] * k.shape[2]):
        scores = index_scores(q[:, :, queries], k, None) * scale
        shown = scores.masked_fill(~mask.visible(q.shape[1], queries), float("-inf"))
        largest = torch.maximum(largest, shown.amax((0, 2, 3))) if shown.numel() else largest
    return largest


def select_keys(q: Tensor, k: Tensor, weights: Tensor | None, mask: AttentionMask, choice: Choice) -> AttentionMask:
    """The mask that shows only the selected keys. Shapes as in `index_scores`. It has no gradient.

    If no row can have more than `top_k` blocks it is the mask itself, except in traced graphs, which serve any length.
    """
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    if not is_compiling() and most_blocks(mask, keys, choice.block) <= choice.top_k:
        return mask
    if counts_flops():
        add_flops(indexer_flops(mask.pairs(queries, keys), batch, heads, dim, weights is not None))
    with torch.no_grad():
        blocks = mask.cached(("blocks", choice.block), lambda: blocks_of(mask, choice.block))
        tiles = []
        for tile in _query_tiles(q, batch * heads * keys):
            scores = index_scores(q[:, :, tile], k, None if weights is None else weights[:, :, tile])
            visible, positions = mask.materialize(tile), mask.q_positions[:, tile]
            tiles.append(_selected(scores, visible, positions, blocks, choice, k.shape[1]))
        return mask.selecting(torch.cat(tiles, dim=2), choice.top_k * choice.block)


@torch.no_grad()
def show_blocks(mask: AttentionMask, blocks: KeyBlocks, most: int) -> AttentionMask:
    """The mask restricted to the keys of the selected blocks, and to those that are in no block that the query sees.

    most: how many keys a query sees then, at most.
    """
    assert blocks.mask.selected is not None
    of_key = blocks.of_key.clamp(min=0)[:, None, None]

    def of_keys(shown: Tensor) -> Tensor:
        return shown.gather(3, of_key.expand(*shown.shape[:3], -1))

    finished = of_keys(blocks.mask.materialize()[:, None]) & (blocks.of_key >= 0)[:, None, None]
    return mask.selecting(of_keys(blocks.mask.selected) | ~finished, most)


def most_blocks(mask: AttentionMask, keys: int, block: int) -> int:
    """An upper bound of the blocks of a row, from static facts."""
    if mask.contiguous:
        return _blocks_of_length(keys, block)
    if mask.doc_lengths is not None:
        return max(sum(_blocks_of_length(length, block) for length in row) for row in mask.doc_lengths)
    return keys


def _blocks_of_length(length: int, block: int) -> int:
    """The most blocks that adjacent positions can lie in, from any first position."""
    return (length + block - 2) // block + 1 if length else 0


def blocks_of(mask: AttentionMask, block: int) -> Blocks:
    """The block of each key."""
    number = mask.k_positions.to(torch.int64).div(block, rounding_mode="floor")
    order = number.argsort(dim=1, stable=True)
    starts = number.gather(1, order).diff(dim=1) != 0
    if mask.k_segment_ids is not None:
        segment = mask.k_segment_ids.to(torch.int64)
        order = order.gather(1, segment.gather(1, order).argsort(dim=1, stable=True))
        starts = (number.gather(1, order).diff(dim=1) != 0) | (segment.gather(1, order).diff(dim=1) != 0)
    if block == 1:
        starts = torch.ones_like(starts)  # padding shares its position, but each key has a place of its own
    of_sorted = functional.pad(starts.cumsum(1), (1, 0))
    most = number.shape[1] if is_compiling() else max(1, most_blocks(mask, number.shape[1], block))
    of_key = torch.empty_like(order).scatter(1, order, of_sorted)
    numbers = number.new_full((len(number), most), -1).scatter(1, of_key, number)
    return Blocks(of_key, numbers)


def _query_tiles(q: Tensor, per_query: int) -> Iterator[slice]:
    """Ranges of queries, each of which has `per_query` scores. A traced graph has one, so that it serves any length.

    On the meta device, which has no scores, and for a call without tokens there is a single range.
    """
    queries = q.shape[2]
    if is_compiling() or q.is_meta:
        yield slice(0, queries)
        return
    size = max(1, MAX_SCORES.on(q) // max(1, per_query))
    yield from (slice(start, min(start + size, queries)) for start in range(0, max(1, queries), size))


def _selected(
    scores: Tensor, visible: Tensor, q_positions: Tensor, blocks: Blocks, choice: Choice, groups: int = 1
) -> Tensor:
    """Which visible keys are selected, bool [B, N, T, S], of scores [B, N, T, S] and visible [B, T, S].

    groups: N of the result where the heads of a key head select together.
    """
    visible = visible[:, None]
    of_key = blocks.of_key[:, None, None].expand_as(scores)
    of_block = _block_scores(scores, visible, of_key, blocks, choice, groups)
    hidden = of_block == float("-inf")
    ranked = _compared(of_block.masked_fill(hidden, 0.0)).masked_fill(hidden, float("-inf"))
    if choice.local:
        own = q_positions.div(choice.block, rounding_mode="floor")[:, None, :, None]
        distance = (own - blocks.numbers[:, None, None]).abs()
        ranked = ranked.masked_fill((distance < choice.local) & ~hidden, float("inf"))
    if choice.first:
        ranked = ranked.masked_fill((blocks.numbers < choice.first)[:, None, None] & ~hidden, float("inf"))
    # a traced graph may get fewer blocks than top_k
    enough = functional.pad(ranked, (0, choice.top_k), value=float("-inf")) if is_compiling() else ranked
    least = enough.topk(choice.top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = ranked > least, ranked == least
    taken = above | (equal & (equal.cumsum(-1) <= choice.top_k - above.sum(-1, keepdim=True)))
    return taken.gather(3, of_key[:, : taken.shape[1]]) & visible


def _block_scores(
    scores: Tensor, visible: Tensor, of_key: Tensor, blocks: Blocks, choice: Choice, groups: int = 1
) -> Tensor:
    """The score of each block, [B, N, T, blocks], of its visible keys; −inf without one."""
    shown = scores.masked_fill(~visible, float("-inf"))
    empty = shown.new_full((*shown.shape[:3], blocks.numbers.shape[1]), float("-inf"))
    if choice.block == 1:
        return empty.scatter(3, of_key, shown)
    if choice.score == "highest":
        return empty.scatter_reduce(3, of_key, shown, "amax")
    # a product with zeros and ones has the same rounding in every run, which sums by scatter do not have on a GPU
    number = torch.arange(blocks.numbers.shape[1], device=scores.device)
    members = (blocks.of_key[:, None, :, None] == number).to(scores.dtype)
    count = visible.to(scores.dtype) @ members
    mean = (scores.masked_fill(~visible, 0.0) @ members) / count
    if choice.score == "mean":
        return torch.where(count == 0, empty, mean)
    weights = torch.where(count == choice.block, mean, empty).softmax(-1).nan_to_num(0.0)  # NaN: no block is whole
    together: Tensor = weights.unflatten(1, (groups, -1)).mean(2)
    return together.masked_fill(count == 0, float("-inf"))


def _compared(scores: Tensor) -> Tensor:
    """Scores rounded to the bits that are compared; -0 becomes 0."""
    bits, dropped = COMPARED[scores.dtype]
    half, step = 1 << (dropped - 1), 1 << dropped
    return ((scores + 0.0).view(bits) + half).bitwise_and(-step).view(scores.dtype)


def index_loss(
    index: tuple[Tensor, Tensor, Tensor | None],
    attended: tuple[Tensor, Tensor],
    mask: AttentionMask,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
    blocks: KeyBlocks | None = None,
) -> Tensor:
    """Σ over queries of KL(p ‖ softmax(scores)), both over the keys that the mask shows; gradients for `index` only.

    index: q, k and weights of the indexer, as in `index_scores`. attended: q [B, H, T, d] and k [B, G, S, d] of the
    attention. p: the weights of the attention over these keys, summed over the heads, divided by their sum. Without
    weights: the mean over the indexer's heads, each with the sum over its share of the attention's heads. blocks: the
    scores are of these, and p of the sums of their keys' weights.
    """
    (q, k, weights), (attended_q, attended_k) = index, (x.detach() for x in attended)
    padding = (mask.q_positions < 0)[:, None]  # contents of padding must not reach the gradients of keys
    q = q.masked_fill(padding[..., None], 0.0)
    weights = None if weights is None else weights.masked_fill(padding, 0.0)
    scored = mask if blocks is None else blocks.mask
    k, _ = zero_unused_slots(k, k, scored)
    attended_k, _ = zero_unused_slots(attended_k, attended_k, mask)
    heads = max(q.shape[1], attended_q.shape[1])
    total = at_least_float32(q.new_zeros(()))
    for tile in _query_tiles(q, q.shape[0] * heads * k.shape[2]):
        tile_mask = mask.for_queries(tile)
        scores = index_scores(q[:, :, tile], k, None if weights is None else weights[:, :, tile])
        visible = scored.for_queries(tile).visible(scores.shape[1])
        with torch.no_grad(), without_autocast(q):
            attention = softmax_weights(
                attended_q[:, :, tile], attended_k, tile_mask, scale, modifiers.for_queries(tile)
            )
            attention = attention.unflatten(1, (scores.shape[1], -1)).sum(2)
            if blocks is not None:  # a product rounds in the same way in every run, as sums by scatter do not on a GPU
                number = torch.arange(k.shape[2], device=k.device)
                of_block = (blocks.of_key[:, None, :, None] == number).to(attention.dtype)
                attention = (attention @ of_block).masked_fill(~visible, 0.0)
            target = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
        hidden = torch.finfo(scores.dtype).min  # not -inf: a query that sees no key would have NaN
        log_index = scores.masked_fill(~visible, hidden).log_softmax(-1).masked_fill(~visible, 0.0)
        total = total + (torch.special.xlogy(target, target) - target * log_index).sum() / scores.shape[1]
    return total
