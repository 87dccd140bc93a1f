"""Attention to keys and values that arrive in tiles, by an online softmax (Milakov & Gimelshein 2018)."""

from collections.abc import Callable

import torch
from torch import Tensor

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.dispatch.operation import device_type
from heddle.numerics.norms import at_least_float32, without_autocast


class _OnlineSoftmax:
    """Keeps, per query, the greatest score so far, the sum of the weights and the weighted sum of the values."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.max_score: Tensor | None = None
        self.weight_sum, self.value_sum = q.new_zeros(()), q.new_zeros(())

    def add(self, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """Add keys k [B, G, s, d], values v [B, G, s, d_v]. hidden: bool [B, 1, T, s], None if all are visible."""
        (batch, heads, queries, width), groups, keys = self.q.shape, k.shape[1], k.shape[2]
        rows = heads // groups * queries  # the heads of a group are folded into the queries
        scores = _matmul(self.q.reshape(batch, groups, rows, width), k.mT).view(batch, heads, queries, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        max_score = scores.detach().amax(-1, keepdim=True)
        if self.max_score is not None:
            max_score = torch.maximum(max_score, self.max_score)
        finite = max_score.masked_fill(max_score == float("-inf"), 0.0)  # for queries without a visible key so far
        weights = scores.sub_(finite).exp_()
        total = weights.sum(-1, keepdim=True)
        out = _matmul(weights.view(batch, groups, rows, keys), v).view(batch, heads, queries, v.shape[3])
        if self.max_score is not None:
            rescale = (self.max_score - finite).exp()
            total, out = total + self.weight_sum * rescale, out + self.value_sum * rescale
        self.max_score, self.weight_sum, self.value_sum = max_score, total, out

    def result(self) -> Tensor:
        """The output [B, H, T, d_v]. Queries that saw no key yield zeros."""
        return self.value_sum / self.weight_sum.masked_fill(self.weight_sum == 0, 1.0)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [B, G, m, n] @ y [B, G, n, s]. With G = 1 on a CPU, one product per row: a batched one may copy y, a view."""
    if y.shape[1] > 1 or device_type(y) != "cpu":
        return x @ y
    return torch.stack([left @ right for left, right in zip(x[:, 0], y[:, 0], strict=True)])[:, None]


def online_attention(
    q: Tensor, tile: Callable[[slice], tuple[Tensor, Tensor]], mask: AttentionMask, sizes: tuple[int, int]
) -> Tensor:
    """softmax(Q Kᵀ + mask) V in at least float32. `tile(keys)` returns a range of K and V. sizes: (queries, keys)."""
    queries, keys = q.shape[2], mask.k_positions.shape[1]
    if keys == 0:  # a call without tokens and an empty state
        return q.new_zeros(*q.shape[:3], tile(slice(0, 0))[1].shape[-1])
    tile_size = max(1, sizes[0])
    starts = range(0, max(1, queries), tile_size)  # one empty tile for a call without tokens
    tiles = [slice(start, min(start + tile_size, queries)) for start in starts]
    softmaxes = [_OnlineSoftmax(at_least_float32(q[:, :, query_range])) for query_range in tiles]
    for start in range(0, keys, sizes[1]):
        key_range = slice(start, min(start + sizes[1], keys))
        k, v = tile(key_range)
        for query_range, online_softmax in zip(tiles, softmaxes, strict=True):
            in_order = mask.contiguous and mask.causal
            if in_order and key_range.start >= keys - queries + query_range.stop:
                continue
            first_query_sees = keys - queries + query_range.start + 1  # keys, if they are in order
            all_visible = mask.all_visible or (in_order and key_range.stop <= first_query_sees)
            hidden = None if all_visible else ~mask.materialize(query_range, key_range)[:, None]
            with without_autocast(q):
                online_softmax.add(k, v, hidden)
    return torch.cat([online_softmax.result() for online_softmax in softmaxes], dim=2)
