"""Which keys a query attends to, by an indexer (DeepSeek Sparse Attention, DeepSeek-V3.2 2025).

    score(i, j) = Σ_h w_h(i) · relu(q_h(i) · k(j)),   query i attends to the `top_k` keys of the highest score

among those that its mask shows. All heads of the attention attend to the same keys. Of equal scores those at the lowest
positions win. Scores are compared in 16 significant bits (float64: 33): products of different shapes round differently,
and equal keys should tie in all of them. Everything is computed in at least float32.
"""

from collections.abc import Iterator

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


def indexer_flops(pairs: int, batch: int, heads: int, dim: int) -> int:
    """FLOPs of the scores of `pairs` (query, key) pairs: a product of `dim` elements per head, and their sum."""
    return 2 * batch * pairs * heads * (dim + 1)


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """q [B, H, T, d], k [B, 1, S, d], weights [B, H, T] -> scores [B, T, S] in at least float32."""
    with without_autocast(q):
        q, k, weights = (at_least_float32(x) for x in (q, k, weights))
        per_head = torch.matmul(q, k.mT).relu()
        return torch.einsum("bht,bhts->bts", weights, per_head)


def select_keys(q: Tensor, k: Tensor, weights: Tensor, mask: AttentionMask, top_k: int) -> AttentionMask:
    """The mask that shows only the selected keys. Shapes as in `index_scores`. It has no gradient.

    With at most `top_k` keys it is the mask itself, except in traced graphs, which serve any length.
    """
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    if not is_compiling() and keys <= top_k:
        return mask
    count_scores(batch, heads, dim, (queries, keys), mask)
    with torch.no_grad():
        order = mask.cached("key order", lambda: mask.k_positions.argsort(dim=1, stable=True))
        tiles = [
            _selected(index_scores(q[:, :, tile], k, weights[:, :, tile]), mask.materialize(tile), order, top_k)
            for tile in _query_tiles(q, batch * heads * keys)
        ]
        return mask.selecting(torch.cat(tiles, dim=1), top_k)


def count_scores(batch: int, heads: int, dim: int, lengths: tuple[int, int], mask: AttentionMask) -> None:
    """Count the FLOPs of the scores of one call."""
    if counts_flops():
        add_flops(indexer_flops(mask.pairs(*lengths), batch, heads, dim))


def _query_tiles(q: Tensor, per_query: int) -> Iterator[slice]:
    """Ranges of queries, each of which has `per_query` scores. A traced graph has one, so that it serves any length.

    Yields once for a call without tokens.
    """
    queries = q.shape[2]
    if is_compiling():
        yield slice(0, queries)
        return
    size = max(1, MAX_SCORES.on(q) // max(1, per_query))
    yield from (slice(start, min(start + size, queries)) for start in range(0, max(1, queries), size))


def _selected(scores: Tensor, visible: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Which visible keys are selected, bool [B, T, S]. order: int64 [B, S], the keys by position."""
    order = order[:, None].expand_as(scores)
    ranked = _compared(scores).masked_fill(~visible, float("-inf")).gather(2, order)
    # a traced graph may get fewer keys than top_k
    enough = functional.pad(ranked, (0, top_k), value=float("-inf")) if is_compiling() else ranked
    least = enough.topk(top_k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = ranked > least, ranked == least
    taken = above | (equal & (equal.cumsum(-1) <= top_k - above.sum(-1, keepdim=True)))
    return torch.zeros_like(visible).scatter(2, order, taken) & visible


def _compared(scores: Tensor) -> Tensor:
    """Scores rounded to the bits that are compared; -0 becomes 0."""
    bits, dropped = COMPARED[scores.dtype]
    half, step = 1 << (dropped - 1), 1 << dropped
    return ((scores + 0.0).view(bits) + half).bitwise_and(-step).view(scores.dtype)


def index_loss(
    index: tuple[Tensor, Tensor, Tensor],
    attended: tuple[Tensor, Tensor],
    mask: AttentionMask,
    scale: float,
    modifiers: ScoreModifiers = NO_MODIFIERS,
) -> Tensor:
    """Σ over queries of KL(p ‖ softmax(scores)), both over the keys that the mask shows; gradients for `index` only.

    index: q, k and weights of the indexer, as in `index_scores`. attended: q [B, H, T, d] and k [B, G, S, d] of the
    attention. p: the weights of the attention without a selection, summed over its heads, divided by their sum.
    """
    (q, k, weights), (attended_q, attended_k) = index, (x.detach() for x in attended)
    padding = (mask.q_positions < 0)[:, None]  # contents of padding must not reach the gradients of keys
    q, weights = q.masked_fill(padding[..., None], 0.0), weights.masked_fill(padding, 0.0)
    k, _ = zero_unused_slots(k, k, mask)
    attended_k, _ = zero_unused_slots(attended_k, attended_k, mask)
    heads = max(q.shape[1], attended_q.shape[1])
    total = at_least_float32(q.new_zeros(()))
    for tile in _query_tiles(q, q.shape[0] * heads * k.shape[2]):
        visible, tile_mask = mask.materialize(tile), mask.for_queries(tile)
        with torch.no_grad(), without_autocast(q):
            attention = softmax_weights(attended_q[:, :, tile], attended_k, tile_mask, scale, modifiers).sum(1)
            target = attention / attention.sum(-1, keepdim=True).clamp(min=torch.finfo(attention.dtype).tiny)
        scores = index_scores(q[:, :, tile], k, weights[:, :, tile])
        hidden = torch.finfo(scores.dtype).min  # not -inf: a query that sees no key would have NaN
        log_index = scores.masked_fill(~visible, hidden).log_softmax(-1).masked_fill(~visible, 0.0)
        total = total + (torch.special.xlogy(target, target) - target * log_index).sum()
    return total
