"""Attention by plain batched products: causal in tiles of queries, or with any mask.

    P = softmax(Q Kᵀ · scale + mask),   Y = P V
    dV = Pᵀ dY,   dP = dY Vᵀ,   dS = P ⊙ (dP − rowsum(dP ⊙ P)),   dQ = dS K · scale,   dK = dSᵀ Q · scale

A softcap, `cap · tanh(S / cap)`, multiplies dS by 1 − tanh². A score bias is added after the softcap; its gradient is
dS before that product. A sink is an extra first key of zeros with a value of zeros. Its score is set to the sink's
logit, so its column of dS is the gradient of the logit.

On a CPU this is faster than torch's fused kernel for short sequences, above all in the backward pass (docs/log.md). A
causal tile of queries is multiplied only by the keys it may see. The heads of a group become queries of one head.
Nothing of size T×S is saved: the backward pass recomputes P tile by tile. Narrow dtypes are computed in float32.
`scale` multiplies Q and K, which are smaller than S and dS. A key is hidden by adding −inf: torch's `masked_fill_` is
slow on a CPU.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.attention.mask import NO_BLOCK_MODIFIERS, NO_MODIFIERS, BlockModifiers, ScoreModifiers
from heddle.numerics.dispatch import DeviceSize
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.torch_private import softmax_gradient

QUERY_TILE = 64  # queries per tile; up to twice as many run as one tile
# Weights of a masked call that exist at one time: 4 MB in float32, which fit a CPU's cache, or 256 MB.
MAX_WEIGHTS = DeviceSize(cpu=2**20, accelerator=2**26)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. The queries are the last T positions."""
    sink, table = modifiers.sink_per_query(q), modifiers.distance_table(k.shape[2], q.device)
    y: Tensor = _CausalAttention.apply(q, k, v, sink, table, scale, modifiers.softcap)
    return y


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    modifiers: BlockModifiers = NO_BLOCK_MODIFIERS,
) -> Tensor:
    """As `causal_attention`, with a mask, bool [T, S], in which every query sees some key. None: all are visible."""
    rows = (k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])
    folded, sink = (None if x is None else x.reshape(*rows, x.shape[3]) for x in (q, modifiers.sink))
    bias, blocks = modifiers.bias, modifiers.blocks
    if bias is not None:
        groups = k.shape[1] // blocks
        bias = bias.reshape(groups, bias.shape[0] * bias.shape[1] // groups, bias.shape[2])
    hiding = None if mask is None else at_least_float32(q.new_zeros(mask.shape)).masked_fill_(~mask, float("-inf"))
    inputs = (folded, k.flatten(0, 1), v.flatten(0, 1), sink, bias)
    y: Tensor = _MaskedAttention.apply(*inputs, hiding, blocks, scale, modifiers.softcap)
    return y.view(*q.shape[:3], v.shape[3])


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


def _reversed(x: Tensor, table: Tensor | None, dim: int = 2) -> Tensor:
    """x with its queries in reverse order if there is a table of biases, which is read in this order; else x itself."""
    return x if table is None else x.flip(dim)


def _fold_heads(x: Tensor, groups: int, queries: slice, table: Tensor | None) -> Tensor:
    """One tile of queries of heads [B, H, T, d], reversed if there is a table -> [B·G, H/G · tile, d]."""
    return _reversed(x[:, :, queries], table).reshape(x.shape[0] * groups, -1, x.shape[3])


def _hide_future(tile_size: int, like: Tensor, table: Tensor | None) -> Tensor:
    """The additive mask within a causal tile, [tile, tile]: −inf at later keys, else 0; reversed as above."""
    return _reversed(like.new_full((tile_size, tile_size), float("-inf")).triu_(1), table, 0)


def _weights(q: Tensor, k: Tensor, hiding: Tensor | None, modifiers: BlockModifiers) -> tuple[Tensor, Tensor | None]:
    """P of q · scale [N, R · T, d] and k [N, S, d], and the tanh of the scores if there is a softcap.

    `hiding` [T, w] is −inf where one of the last w keys is hidden from a query, else 0. The sink [N, R · T, 1] is the
    score of the first key. The bias [M, R, T, w] belongs to the last w keys, and M divides N.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    tanh_scores = None
    if modifiers.softcap is not None:
        tanh_scores = scores.div_(modifiers.softcap).tanh_()
        scores = tanh_scores * modifiers.softcap
    if modifiers.bias is not None:
        bias = modifiers.bias
        biased = scores[:, :, scores.shape[2] - bias.shape[3] :].unflatten(1, (bias.shape[1], -1))
        biased.unflatten(0, (len(scores) // len(bias), -1)).add_(bias)
    if modifiers.sink is not None:
        scores[:, :, :1] = modifiers.sink
    if hiding is not None:
        tile_size, keys = hiding.shape
        scores[:, :, -keys:].unflatten(1, (-1, tile_size)).add_(hiding)
    return scores.softmax(-1), tanh_scores


def _softmax_gradient(weights: Tensor, v: Tensor, gradient: Tensor) -> Tensor:
    """Compute dS from P, V and dY, before a softcap."""
    return softmax_gradient(torch.bmm(gradient, v.transpose(1, 2)), weights)


def _softcap_gradient(score_gradient: Tensor, tanh_scores: Tensor | None) -> Tensor:
    """dS times 1 − tanh², if there is a softcap."""
    if tanh_scores is None:
        return score_gradient
    capped: Tensor = torch.ops.aten.tanh_backward(score_gradient, tanh_scores)
    return capped


def _bias_by_offset(table: Tensor, queries: int, groups: int) -> Tensor:
    """The score bias [G, H/G, queries, S] of queries in reverse order, the first of which is at the last of S keys.

    table [H, S]: the bias at the offsets 0 … S − 1. Later keys, which are hidden, have a bias of zero. In this order of
    the queries, each bias is the previous one shifted by one key, and the result is a view.
    """
    by_key = functional.pad(table.flip(1), (0, queries - 1))  # entry m belongs to the offset S − 1 − m
    bias: Tensor = by_key.unfold(1, table.shape[1], 1).unflatten(0, (groups, -1))
    return bias


def _sum_by_offset(gradient: Tensor, heads: int, keys: int) -> Tensor:
    """The gradient [H, S] of the table, from the bias's [G, H/G · queries, S]: the sum of each diagonal."""
    by_query = gradient.reshape(heads, -1, keys)
    queries = by_query.shape[1]
    # Rows of S + queries entries, read as rows of one entry less, are each shifted by one against the row before.
    shifted = functional.pad(by_query, (0, queries)).flatten(1)[:, :-queries]
    by_key: Tensor = shifted.unflatten(1, (queries, -1)).sum(1)
    return by_key[:, :keys].flip(1)


def _without_autocast(step: Callable[..., Any]) -> Callable[..., Any]:
    """The forward or backward step of a function, with autocast disabled on the device of its first tensor."""

    @wraps(step)
    def run(ctx: Any, *inputs: Any) -> Any:
        with without_autocast(inputs[0]):
            return step(ctx, *inputs)

    return run


class _CausalAttention(torch.autograd.Function):
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], sink [B, H, T, 1], table [H, S]. Runs tile by tile."""

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, sink, table, ctx.scale, ctx.cap = inputs
        ctx.save_for_backward(q, k, v, sink, table)
        keys, values = (_with_sink_row(x.flatten(0, 1), sink) for x in (k, v))
        batch, heads, queries, _ = q.shape
        # The memory layout is [B, T, H, d], the order in which the output projection reads it.
        out: Tensor = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
        for query_range, visible_keys in _query_tiles(queries, keys.shape[1]):
            tile_size = query_range.stop - query_range.start
            tile_q = at_least_float32(_fold_heads(q, k.shape[1], query_range, table)) * ctx.scale
            modifiers = _tile_modifiers(ctx, (q, k, sink, table), query_range)
            weights, _ = _weights(tile_q, keys[:, :visible_keys], _hide_future(tile_size, keys, table), modifiers)
            y = torch.bmm(weights, values[:, :visible_keys]).view(batch, heads, tile_size, -1)
            out[:, :, query_range] = _reversed(y, table)
        return out

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, table = ctx.saved_tensors
        keys, values = (_with_sink_row(x.flatten(0, 1), sink) for x in (k, v))
        scaled_keys = keys * ctx.scale
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        grad_sink = None if sink is None else sink.new_empty(sink.shape)
        grad_table = torch.zeros_like(table) if ctx.needs_input_grad[4] else None
        for query_range, visible_keys in _query_tiles(q.shape[2], keys.shape[1]):
            tile_size = query_range.stop - query_range.start
            folded = (_fold_heads(x, k.shape[1], query_range, table) for x in (q, gradients[0]))
            tile_q, tile_grad = map(at_least_float32, folded)
            tile_q = tile_q * ctx.scale
            modifiers = _tile_modifiers(ctx, (q, k, sink, table), query_range)
            hiding = _hide_future(tile_size, keys, table)
            weights, tanh_scores = _weights(tile_q, keys[:, :visible_keys], hiding, modifiers)
            grad_v[:, :visible_keys].baddbmm_(weights.transpose(1, 2), tile_grad)
            score_gradient = _softmax_gradient(weights, values[:, :visible_keys], tile_grad)
            if grad_sink is not None:
                by_head = score_gradient[:, :, :1].reshape(*q.shape[:2], tile_size, 1)
                grad_sink[:, :, query_range] = _reversed(by_head, table)
            if grad_table is not None:
                text = visible_keys if sink is None else visible_keys - 1
                over_rows = score_gradient[:, :, -text:].unflatten(0, (len(q), -1)).sum(0)
                grad_table[:, :text] += _sum_by_offset(over_rows, q.shape[1], text)
            score_gradient = _softcap_gradient(score_gradient, tanh_scores)
            tile_grad_q = torch.bmm(score_gradient, scaled_keys[:, :visible_keys])
            grad_q[:, :, query_range] = _reversed(tile_grad_q.view(*q.shape[:2], tile_size, -1), table)
            grad_k[:, :visible_keys].baddbmm_(score_gradient.transpose(1, 2), tile_q)
        without_sink = slice(0 if sink is None else 1, None)
        grads_kv = (x[:, without_sink].reshape(like.shape).to(like.dtype) for x, like in ((grad_k, k), (grad_v, v)))
        return (grad_q, *grads_kv, grad_sink, grad_table, None, None)


def _tile_modifiers(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None], query_range: slice
) -> BlockModifiers:
    """The modifiers of one tile of queries."""
    q, k, sink, table = inputs
    if sink is not None:
        sink = _fold_heads(sink, k.shape[1], query_range, table)
    bias = None
    if table is not None:
        visible_keys = k.shape[2] - q.shape[2] + query_range.stop
        bias = _bias_by_offset(table[:, :visible_keys], query_range.stop - query_range.start, k.shape[1])
    return BlockModifiers(ctx.cap, sink, bias)


class _MaskedAttention(torch.autograd.Function):
    """q [N, R · T, d_k], k [N, S, d_k], v [N, S, d_v], sink [N, R · T, 1], bias [M, R · T, S].

    Entry n of N has the bias (n // blocks) mod M. Computes a part of N at a time.
    """

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        q, k, v, sink, bias, hiding, ctx.blocks, ctx.scale, ctx.cap = inputs
        ctx.save_for_backward(q, k, v, sink, bias, hiding)
        out: Tensor = q.new_empty(*q.shape[:2], v.shape[2])
        for part in _parts(q, k):
            part_k, part_v = (_with_sink_row(x[part], sink) for x in (k, v))
            modifiers, _ = _part_modifiers(ctx, sink, bias, part)
            weights, _ = _weights(at_least_float32(q[part]) * ctx.scale, part_k, hiding, modifiers)
            out[part] = torch.bmm(weights, part_v)
        return out

    @staticmethod
    @_without_autocast
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, bias, hiding = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_sink = None if sink is None else torch.empty_like(sink)
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[4] else None
        without_sink = slice(0 if sink is None else 1, None)
        for part in _parts(q, k):
            part_k, part_v = (_with_sink_row(x[part], sink) for x in (k, v))
            part_q, part_grad = at_least_float32(q[part]) * ctx.scale, at_least_float32(gradients[0][part])
            modifiers, rows = _part_modifiers(ctx, sink, bias, part)
            weights, tanh_scores = _weights(part_q, part_k, hiding, modifiers)
            score_gradient = _softmax_gradient(weights, part_v, part_grad)
            if grad_sink is not None:
                grad_sink[part] = score_gradient[:, :, :1]
            if grad_bias is not None and rows is not None:
                grad_bias.index_add_(0, rows, score_gradient[:, :, without_sink])
            score_gradient = _softcap_gradient(score_gradient, tanh_scores)
            grad_v[part] = torch.bmm(weights.transpose(1, 2), part_grad)[:, without_sink]
            grad_q[part] = torch.bmm(score_gradient, part_k * ctx.scale)
            grad_k[part] = torch.bmm(score_gradient.transpose(1, 2), part_q)[:, without_sink]
        return grad_q, grad_k, grad_v, grad_sink, grad_bias, None, None, None, None


def _part_modifiers(
    ctx: Any, sink: Tensor | None, bias: Tensor | None, part: slice
) -> tuple[BlockModifiers, Tensor | None]:
    """The modifiers of a part of N, and the number of the bias of each of its entries."""
    part_sink = None if sink is None else sink[part]
    if bias is None:
        return BlockModifiers(ctx.cap, part_sink), None
    rows = torch.arange(part.start, part.stop, device=bias.device) // ctx.blocks % len(bias)
    return BlockModifiers(ctx.cap, part_sink, bias.index_select(0, rows)[:, None]), rows


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Split N into parts of at most MAX_WEIGHTS weights."""
    part_size = max(1, MAX_WEIGHTS.on(q) // max(1, q.shape[1] * k.shape[1]))
    for start in range(0, q.shape[0], part_size):
        yield slice(start, min(start + part_size, q.shape[0]))
