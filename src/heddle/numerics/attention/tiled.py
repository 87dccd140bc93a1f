"""Attention by plain batched products: causal in tiles of queries, or with any mask.

    P = softmax(Q Kᵀ · scale + mask),   Y = P V
    dV = Pᵀ dY,   dP = dY Vᵀ,   dS = P ⊙ (dP − rowsum(dP ⊙ P)),   dQ = dS K · scale,   dK = dSᵀ Q · scale

A softcap, `cap · tanh(S / cap)`, multiplies dS by 1 − tanh². A distance bias, −slope · |i − j| after the softcap,
changes P only. A sink is an extra first key of zeros with a value of zeros. Its score is set to the sink's logit, so
its column of dS is the gradient of the logit.

On a CPU this is faster than torch's fused kernel for short rows, above all in the backward pass (docs/log.md). A causal
tile of queries is multiplied only by the keys it may see. The heads of a group are folded into the queries of one head.
Nothing of size T×S is saved: the backward pass recomputes P tile by tile. Narrow dtypes are computed in float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.attention.score_modifiers import NO_QUERY_MODIFIERS, PerQueryModifiers
from heddle.numerics.norms import at_least_float32

QUERY_TILE = 64  # queries per tile; up to twice as many run as one tile
KEY_BLOCK = 64  # products run over whole blocks of keys, so that their sizes repeat from token to token
MAX_WEIGHTS = 2**20  # weights of a masked call that exist at one time: 4 MB in float32, which fit a CPU cache


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, modifiers: PerQueryModifiers = NO_QUERY_MODIFIERS
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. The queries are the last T positions.

    `modifiers.distance` is ignored: the distances follow from the positions.
    """
    y: Tensor = _CausalAttention.apply(q, k, v, modifiers.sink, modifiers.slope, scale, modifiers.softcap)
    return y


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    modifiers: PerQueryModifiers = NO_QUERY_MODIFIERS,
) -> Tensor:
    """As `causal_attention`, with a mask, bool [T, S], in which every query sees some key. None: all are visible."""
    rows = (k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])
    folded = [None if x is None else x.reshape(*rows, x.shape[3]) for x in (q, modifiers.sink, modifiers.slope)]
    hidden = None if mask is None else ~mask
    inputs = (k.flatten(0, 1), v.flatten(0, 1), *folded[1:], modifiers.distance, hidden)
    y: Tensor = _MaskedAttention.apply(folded[0], *inputs, scale, modifiers.softcap)
    return y.view(*q.shape[:3], v.shape[3])


def unmasked_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of few queries that see every key: K qᵀ, softmax, P V. Keys are read in memory order.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. bias [B or 1, H, T, S] is added to scores.
    Products run over whole blocks of keys, and the remaining keys are summed elementwise: for each new length oneDNN
    sets up a new primitive, which costs a decoding step more than its products.
    """
    folded = (q * scale).reshape(k.shape[0] * k.shape[1], -1, q.shape[3])
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    aligned = k.shape[1] - k.shape[1] % KEY_BLOCK
    scores = torch.bmm(k[:, :aligned], folded.transpose(1, 2)).transpose(1, 2)
    scores = torch.cat((scores, (folded[:, :, None] * k[:, None, aligned:]).sum(-1)), dim=2)
    if bias is not None:
        scores = scores + bias.expand(q.shape[0], -1, -1, -1).reshape(scores.shape)
    weights = scores.softmax(-1)
    remainder = (weights[:, :, aligned:, None] * v[:, None, aligned:]).sum(2)
    return (torch.bmm(weights[:, :, :aligned], v[:, :aligned]) + remainder).view(*q.shape[:3], v.shape[2])


def _with_sink_row(x: Tensor, sink: Tensor | None) -> Tensor:
    """Keys or values [N, S, d] in at least float32, after a row of zeros for the sink if there is one."""
    wide = at_least_float32(x)
    return wide if sink is None else functional.pad(wide, (0, 0, 1, 0))


def _query_tiles(queries: int, keys: int) -> Iterator[tuple[slice, int]]:
    """Yield (queries of a tile, number of keys that its last query sees)."""
    tile_size = QUERY_TILE if queries > 2 * QUERY_TILE else max(1, queries)
    for start in range(0, queries, tile_size):
        stop = min(start + tile_size, queries)
        yield slice(start, stop), keys - queries + stop


def _fold_heads(x: Tensor, groups: int, queries: slice) -> Tensor:
    """One tile of queries of heads [B, H, T, d] -> [B·G, H/G · tile, d]."""
    tile = x[:, :, queries]
    return tile.reshape(x.shape[0] * groups, -1, x.shape[3])


def _future_keys(tile_size: int, device: torch.device) -> Tensor:
    """The mask of hidden keys within a causal tile's own positions, bool [tile, tile]."""
    return torch.ones(tile_size, tile_size, dtype=torch.bool, device=device).triu_(1)


def _weights(
    q: Tensor, k: Tensor, scale: float, hidden: Tensor | None, modifiers: PerQueryModifiers
) -> tuple[Tensor, Tensor | None]:
    """P of q [N, R · T, d] and k [N, S, d], and the tanh of the scores if there is a softcap.

    `hidden` [T, w] is True where one of the last w keys is hidden from a query. The sink [N, R · T, 1] is the score of
    the first key. The slopes [N, R · T, 1] apply to the other keys, by their distances [T, S].
    """
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    tanh_scores = None
    if modifiers.softcap is not None:
        tanh_scores = scores.div_(modifiers.softcap).tanh_()
        scores = tanh_scores * modifiers.softcap
    if modifiers.slope is not None:
        assert modifiers.distance is not None
        distance = modifiers.distance.to(scores.dtype)
        biased, slope = (x.unflatten(1, (-1, len(distance))) for x in (scores, modifiers.slope.to(scores.dtype)))
        biased[..., -distance.shape[1] :].addcmul_(slope, distance, value=-1.0)
    if modifiers.sink is not None:
        scores[:, :, :1] = modifiers.sink
    if hidden is not None:
        tile_size, keys = hidden.shape
        scores[:, :, -keys:].unflatten(1, (-1, tile_size)).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1), tanh_scores


def _distances(query_range: slice, queries: int, keys: int, device: torch.device) -> Tensor:
    """i − j of the queries of a tile and the keys it sees. All queries are the last of the keys."""
    k_positions = torch.arange(keys - queries + query_range.stop, device=device)
    return k_positions[keys - queries + query_range.start :, None] - k_positions


def _score_gradient(weights: Tensor, tanh_scores: Tensor | None, v: Tensor, gradient: Tensor) -> Tensor:
    """Compute dS from P, V and dY."""
    score_gradient = torch.bmm(gradient, v.transpose(1, 2))
    score_gradient = torch._softmax_backward_data(score_gradient, weights, -1, weights.dtype)
    return score_gradient if tanh_scores is None else torch.ops.aten.tanh_backward(score_gradient, tanh_scores)


class _CausalAttention(torch.autograd.Function):
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], sink and slope [B, H, T, 1]. Runs tile by tile."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, sink, slope, ctx.scale, ctx.cap = inputs
        ctx.save_for_backward(q, k, v, sink, slope)
        keys, values = (_with_sink_row(x.flatten(0, 1), sink) for x in (k, v))
        batch, heads, queries, _ = q.shape
        # The memory layout is [B, T, H, d], the order in which the output projection reads it.
        out: Tensor = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
        for query_range, visible_keys in _query_tiles(queries, keys.shape[1]):
            tile_size = query_range.stop - query_range.start
            tile_q = at_least_float32(_fold_heads(q, k.shape[1], query_range))
            modifiers = _tile_modifiers(ctx, (q, k, sink, slope), query_range)
            weights, _ = _weights(
                tile_q, keys[:, :visible_keys], ctx.scale, _future_keys(tile_size, q.device), modifiers
            )
            out[:, :, query_range] = torch.bmm(weights, values[:, :visible_keys]).view(batch, heads, tile_size, -1)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, slope = ctx.saved_tensors
        keys, values = (_with_sink_row(x.flatten(0, 1), sink) for x in (k, v))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        grad_sink = None if sink is None else sink.new_empty(sink.shape)
        for query_range, visible_keys in _query_tiles(q.shape[2], keys.shape[1]):
            tile_size = query_range.stop - query_range.start
            tile_q, tile_grad = (at_least_float32(_fold_heads(x, k.shape[1], query_range)) for x in (q, gradients[0]))
            modifiers = _tile_modifiers(ctx, (q, k, sink, slope), query_range)
            hidden = _future_keys(tile_size, q.device)
            weights, tanh_scores = _weights(tile_q, keys[:, :visible_keys], ctx.scale, hidden, modifiers)
            grad_v[:, :visible_keys].baddbmm_(weights.transpose(1, 2), tile_grad)
            score_gradient = _score_gradient(weights, tanh_scores, values[:, :visible_keys], tile_grad)
            if grad_sink is not None:
                grad_sink[:, :, query_range] = score_gradient[:, :, :1].reshape(*q.shape[:2], tile_size, 1)
            score_gradient.mul_(ctx.scale)
            grad_q[:, :, query_range] = torch.bmm(score_gradient, keys[:, :visible_keys]).view(
                *q.shape[:2], tile_size, -1
            )
            grad_k[:, :visible_keys].baddbmm_(score_gradient.transpose(1, 2), tile_q)
        without_sink = slice(0 if sink is None else 1, None)
        grads_kv = (x[:, without_sink].reshape(like.shape).to(like.dtype) for x, like in ((grad_k, k), (grad_v, v)))
        return (grad_q, *grads_kv, grad_sink, None, None, None)


def _tile_modifiers(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None], query_range: slice
) -> PerQueryModifiers:
    """The modifiers of one tile of queries."""
    q, k, *per_head = inputs
    sink, slope = (None if x is None else _fold_heads(x, k.shape[1], query_range) for x in per_head)
    distance = None if slope is None else _distances(query_range, q.shape[2], k.shape[2], q.device)
    return PerQueryModifiers(ctx.cap, sink, slope, distance)


class _MaskedAttention(torch.autograd.Function):
    """q [N, R · T, d_k], k [N, S, d_k], v [N, S, d_v], sink and slope [N, R · T, 1]. Computes a part of N at a time."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, sink, slope, distance, hidden, ctx.scale, ctx.cap = inputs
        ctx.save_for_backward(q, k, v, sink, slope, distance, hidden)
        out: Tensor = q.new_empty(*q.shape[:2], v.shape[2])
        for part in _parts(q, k):
            part_k, part_v = (_with_sink_row(x[part], sink) for x in (k, v))
            modifiers = _part_modifiers(PerQueryModifiers(ctx.cap, sink, slope, distance), part)
            weights, _ = _weights(at_least_float32(q[part]), part_k, ctx.scale, hidden, modifiers)
            out[part] = torch.bmm(weights, part_v)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, slope, distance, hidden = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_sink = None if sink is None else torch.empty_like(sink)
        without_sink = slice(0 if sink is None else 1, None)
        for part in _parts(q, k):
            part_k, part_v = (_with_sink_row(x[part], sink) for x in (k, v))
            part_q, part_grad = (at_least_float32(x[part]) for x in (q, gradients[0]))
            modifiers = _part_modifiers(PerQueryModifiers(ctx.cap, sink, slope, distance), part)
            weights, tanh_scores = _weights(part_q, part_k, ctx.scale, hidden, modifiers)
            score_gradient = _score_gradient(weights, tanh_scores, part_v, part_grad)
            if grad_sink is not None:
                grad_sink[part] = score_gradient[:, :, :1]
            score_gradient.mul_(ctx.scale)
            grad_v[part] = torch.bmm(weights.transpose(1, 2), part_grad)[:, without_sink]
            grad_q[part] = torch.bmm(score_gradient, part_k)
            grad_k[part] = torch.bmm(score_gradient.transpose(1, 2), part_q)[:, without_sink]
        return grad_q, grad_k, grad_v, grad_sink, None, None, None, None, None


def _part_modifiers(modifiers: PerQueryModifiers, part: slice) -> PerQueryModifiers:
    """The modifiers of a part of N."""
    sink, slope = (None if x is None else x[part] for x in (modifiers.sink, modifiers.slope))
    return modifiers._replace(sink=sink, slope=slope)


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Split N into parts whose weights fit a CPU cache."""
    part_size = max(1, MAX_WEIGHTS // max(1, q.shape[1] * k.shape[1]))
    for start in range(0, q.shape[0], part_size):
        yield slice(start, start + part_size)
