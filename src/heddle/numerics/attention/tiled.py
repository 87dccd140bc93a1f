"""Attention by plain batched products: causal, in tiles of queries against only the keys they may see, or masked.

    P = softmax(Q Kᵀ · scale + mask),   Y = P V
    dV = Pᵀ dY,   dP = dY Vᵀ,   dS = P ⊙ (dP − rowsum(dP ⊙ P)),   dQ = dS K · scale,   dK = dSᵀ Q · scale

A cap on the scores, `cap · tanh(S / cap)`, multiplies dS by 1 − tanh². A bias of distance, −slope · |i − j| after the
cap, changes P alone. A sink is a first key of zeros with a value of
zeros, whose score is set to the sink's logit: its column of dS is the gradient of the logit.

Plain batched products, which on a CPU outrun torch's fused kernel for short rows and above all in its backward pass
(docs/log.md). The heads of a group are queries of one head. Nothing of size T×S is kept: the gradient makes each
tile's P again. Narrow dtypes are computed in float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.attention.score_modifiers import NONE, Columns
from heddle.numerics.norms import at_least_float32

TILE = 64  # queries to a tile; up to twice as many are one tile
BLOCK = 64  # keys of a length that comes again from token to token
WEIGHTS = 2**20  # weights that exist at one time under a mask: 4 MB in float32, which a cache holds


def triangle(q: Tensor, k: Tensor, v: Tensor, scale: float, columns: Columns = NONE) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], the queries last -> [B, H, T, d_v].

    The gap of `columns` is known here and not looked at.
    """
    y: Tensor = _Triangle.apply(q, k, v, columns.sink, columns.slope, scale, columns.cap)
    return y


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, columns: Columns = NONE) -> Tensor:
    """As `triangle`, but seeing what `mask` shows, bool [T, S], in which every query sees some key; None: all."""
    rows = (k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])
    folded = [None if x is None else x.reshape(*rows, x.shape[3]) for x in (q, columns.sink, columns.slope)]
    hidden = None if mask is None else ~mask
    given = (k.flatten(0, 1), v.flatten(0, 1), *folded[1:], columns.gap, hidden)
    y: Tensor = _Masked.apply(folded[0], *given, scale, columns.cap)
    return y.view(*q.shape[:3], v.shape[3])


def unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Few queries that see every key: K qᵀ, softmax, P V, the keys read in the order in which they lie.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]; bias [B or 1, H, T, S] is added to scores.
    Products are of whole blocks of keys, the rest is summed: oneDNN prepares itself for every new length, which costs a
    step more than its products.
    """
    folded = (q * scale).reshape(k.shape[0] * k.shape[1], -1, q.shape[3])
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    whole = k.shape[1] - k.shape[1] % BLOCK
    scores = torch.bmm(k[:, :whole], folded.transpose(1, 2)).transpose(1, 2)
    scores = torch.cat((scores, (folded[:, :, None] * k[:, None, whole:]).sum(-1)), dim=2)
    if bias is not None:
        scores = scores + bias.expand(q.shape[0], -1, -1, -1).reshape(scores.shape)
    weights = scores.softmax(-1)
    rest = (weights[:, :, whole:, None] * v[:, None, whole:]).sum(2)
    return (torch.bmm(weights[:, :, :whole], v[:, :whole]) + rest).view(*q.shape[:3], v.shape[2])


def _keys(x: Tensor, sink: Tensor | None) -> Tensor:
    """Keys or values [N, S, d] in at least float32, behind zeros for the sink if there is one."""
    wide = at_least_float32(x)
    return wide if sink is None else functional.pad(wide, (0, 0, 1, 0))


def _tiles(queries: int, keys: int) -> Iterator[tuple[slice, int]]:
    """Queries of each tile, and how many keys the last of them sees."""
    size = TILE if queries > 2 * TILE else max(1, queries)
    for start in range(0, queries, size):
        stop = min(start + size, queries)
        yield slice(start, stop), keys - queries + stop


def _fold(x: Tensor, groups: int, here: slice) -> Tensor:
    """One tile of heads [B, H, T, d] -> [B·G, H/G · tile, d]."""
    tile = x[:, :, here]
    return tile.reshape(x.shape[0] * groups, -1, x.shape[3])


def _hidden(tile: int, device: torch.device) -> Tensor:
    """What a tile of queries may not see of the keys of its own positions."""
    return torch.ones(tile, tile, dtype=torch.bool, device=device).triu_(1)


def _weights(
    q: Tensor, k: Tensor, scale: float, hidden: Tensor | None, columns: Columns
) -> tuple[Tensor, Tensor | None]:
    """P of q [N, R · T, d] and k [N, S, d], and the tanh of capped scores.

    `hidden` [T, w] hides some of the last w keys from each query; the sink [N, R · T, 1] is the score of the first key,
    the slopes [N, R · T, 1] are of the others, which `gap` [T, S] tells of.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    bent = None
    if columns.cap is not None:
        bent = scores.div_(columns.cap).tanh_()
        scores = bent * columns.cap
    if columns.slope is not None:
        assert columns.gap is not None
        gap = columns.gap.to(scores.dtype)
        own, slope = (x.unflatten(1, (-1, len(gap))) for x in (scores, columns.slope.to(scores.dtype)))
        own[..., -gap.shape[1] :].addcmul_(slope, gap, value=-1.0)
    if columns.sink is not None:
        scores[:, :, :1] = columns.sink
    if hidden is not None:
        tile, keys = hidden.shape
        scores[:, :, -keys:].unflatten(1, (-1, tile)).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1), bent


def _gap(here: slice, queries: int, keys: int, device: torch.device) -> Tensor:
    """How far back each key that a tile sees is from each of its queries, the last of all."""
    seen = torch.arange(keys - queries + here.stop, device=device)
    return seen[keys - queries + here.start :, None] - seen


def _rise(weights: Tensor, bent: Tensor | None, v: Tensor, gradient: Tensor) -> Tensor:
    """dS from P, V and dY."""
    rise = torch.bmm(gradient, v.transpose(1, 2))
    rise = torch._softmax_backward_data(rise, weights, -1, weights.dtype)
    return rise if bent is None else torch.ops.aten.tanh_backward(rise, bent)


class _Triangle(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, sink, slope, ctx.scale, ctx.cap = given
        ctx.save_for_backward(q, k, v, sink, slope)
        wide_k, wide_v = (_keys(x.flatten(0, 1), sink) for x in (k, v))
        batch, heads, queries, _ = q.shape
        # Laid out as [B, T, H, d], the order in which the next projection reads it.
        out: Tensor = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
        for here, seen in _tiles(queries, wide_k.shape[1]):
            tile = here.stop - here.start
            some_q = at_least_float32(_fold(q, k.shape[1], here))
            columns = _columns(ctx, (q, k, sink, slope), here)
            weights, _ = _weights(some_q, wide_k[:, :seen], ctx.scale, _hidden(tile, q.device), columns)
            out[:, :, here] = torch.bmm(weights, wide_v[:, :seen]).view(batch, heads, tile, -1)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, slope = ctx.saved_tensors
        wide_k, wide_v = (_keys(x.flatten(0, 1), sink) for x in (k, v))
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        to_sink = None if sink is None else sink.new_empty(sink.shape)
        for here, seen in _tiles(q.shape[2], wide_k.shape[1]):
            tile = here.stop - here.start
            some_q, some_g = (at_least_float32(_fold(x, k.shape[1], here)) for x in (q, gradients[0]))
            columns = _columns(ctx, (q, k, sink, slope), here)
            hidden = _hidden(tile, q.device)
            weights, bent = _weights(some_q, wide_k[:, :seen], ctx.scale, hidden, columns)
            to_v[:, :seen].baddbmm_(weights.transpose(1, 2), some_g)
            rise = _rise(weights, bent, wide_v[:, :seen], some_g)
            if to_sink is not None:
                to_sink[:, :, here] = rise[:, :, :1].reshape(*q.shape[:2], tile, 1)
            rise.mul_(ctx.scale)
            to_q[:, :, here] = torch.bmm(rise, wide_k[:, :seen]).view(*q.shape[:2], tile, -1)
            to_k[:, :seen].baddbmm_(rise.transpose(1, 2), some_q)
        own = slice(0 if sink is None else 1, None)
        found = (x[:, own].reshape(like.shape).to(like.dtype) for x, like in ((to_k, k), (to_v, v)))
        return (to_q, *found, to_sink, None, None, None)


def _columns(ctx: Any, given: tuple[Tensor, Tensor, Tensor | None, Tensor | None], here: slice) -> Columns:
    """Those of one tile of queries."""
    q, k, *both = given
    sink, slope = (None if x is None else _fold(x, k.shape[1], here) for x in both)
    gap = None if slope is None else _gap(here, q.shape[2], k.shape[2], q.device)
    return Columns(ctx.cap, sink, slope, gap)


class _Masked(torch.autograd.Function):
    """q [N, R · T, d_k], k [N, S, d_k], v [N, S, d_v], sink and slope [N, R · T, 1], a part of the N at a time."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, sink, slope, gap, hidden, ctx.scale, ctx.cap = given
        ctx.save_for_backward(q, k, v, sink, slope, gap, hidden)
        out: Tensor = q.new_empty(*q.shape[:2], v.shape[2])
        for part in _parts(q, k):
            some_k, some_v = (_keys(x[part], sink) for x in (k, v))
            columns = _some(Columns(ctx.cap, sink, slope, gap), part)
            weights, _ = _weights(at_least_float32(q[part]), some_k, ctx.scale, hidden, columns)
            out[part] = torch.bmm(weights, some_v)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, slope, gap, hidden = ctx.saved_tensors
        to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
        to_sink = None if sink is None else torch.empty_like(sink)
        own = slice(0 if sink is None else 1, None)
        for part in _parts(q, k):
            some_k, some_v = (_keys(x[part], sink) for x in (k, v))
            some_q, gradient = (at_least_float32(x[part]) for x in (q, gradients[0]))
            columns = _some(Columns(ctx.cap, sink, slope, gap), part)
            weights, bent = _weights(some_q, some_k, ctx.scale, hidden, columns)
            rise = _rise(weights, bent, some_v, gradient)
            if to_sink is not None:
                to_sink[part] = rise[:, :, :1]
            rise.mul_(ctx.scale)
            to_v[part] = torch.bmm(weights.transpose(1, 2), gradient)[:, own]
            to_q[part] = torch.bmm(rise, some_k)
            to_k[part] = torch.bmm(rise.transpose(1, 2), some_q)[:, own]
        return to_q, to_k, to_v, to_sink, None, None, None, None, None


def _some(columns: Columns, part: slice) -> Columns:
    """Those of a part of the N."""
    sink, slope = (None if x is None else x[part] for x in (columns.sink, columns.slope))
    return columns._replace(sink=sink, slope=slope)


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """As many of the N at a time as keep the weights in a cache."""
    size = max(1, WEIGHTS // max(1, q.shape[1] * k.shape[1]))
    for start in range(0, q.shape[0], size):
        yield slice(start, start + size)
