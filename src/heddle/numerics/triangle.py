"""Attention by plain batched products: causal, in tiles of queries against only the keys they may see, or masked.

    P = softmax(Q Kᵀ · scale + mask),   Y = P V
    dV = Pᵀ dY,   dP = dY Vᵀ,   dS = P ⊙ (dP − rowsum(dP ⊙ P)),   dQ = dS K · scale,   dK = dSᵀ Q · scale

A cap on the scores, `cap · tanh(S / cap)`, multiplies dS by 1 − tanh². A sink is a first key of zeros with a value of
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

from heddle.numerics.norms import at_least_float32

TILE = 64  # queries to a tile; up to twice as many are one tile
BLOCK = 64  # keys of a length that comes again from token to token
WEIGHTS = 2**20  # weights that exist at one time under a mask: 4 MB in float32, which a cache holds


def triangle(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float | None = None, sink: Tensor | None = None
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], the queries last, sink [B, H, T, 1] -> [B, H, T, d_v]."""
    y: Tensor = _Triangle.apply(q, k, v, sink, scale, cap)
    return y


def masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    mask: Tensor | None,
    cap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """As `triangle`, but seeing what `mask` shows, bool [T, S], in which every query sees some key; None: all."""
    rows = (k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2])
    folded = [None if x is None else x.reshape(*rows, x.shape[3]) for x in (q, sink)]
    hidden = None if mask is None else ~mask
    y: Tensor = _Masked.apply(folded[0], k.flatten(0, 1), v.flatten(0, 1), folded[1], hidden, scale, cap)
    return y.view(*q.shape[:3], v.shape[3])


def unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Few queries that see every key: K qᵀ, softmax, P V, the keys read in the order in which they lie.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. Products are of whole blocks of keys, the
    rest is summed: oneDNN prepares itself for every new length, which costs a step more than its products.
    """
    folded = (q * scale).reshape(k.shape[0] * k.shape[1], -1, q.shape[3])
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    whole = k.shape[1] - k.shape[1] % BLOCK
    scores = torch.bmm(k[:, :whole], folded.transpose(1, 2)).transpose(1, 2)
    weights = torch.cat((scores, (folded[:, :, None] * k[:, None, whole:]).sum(-1)), dim=2).softmax(-1)
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
    q: Tensor, k: Tensor, scale: float, hidden: Tensor | None, cap: float | None, sink: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """P of q [N, R · T, d] and k [N, S, d], and the tanh of capped scores.

    `hidden` [T, w] hides some of the last w keys from each query; `sink` [N, R · T, 1] is the score of the first key.
    """
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    bent = None
    if cap is not None:
        bent = scores.div_(cap).tanh_()
        scores = bent * cap
    if sink is not None:
        scores[:, :, :1] = sink
    if hidden is not None:
        tile, keys = hidden.shape
        scores[:, :, -keys:].unflatten(1, (-1, tile)).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1), bent


def _slope(weights: Tensor, bent: Tensor | None, v: Tensor, gradient: Tensor) -> Tensor:
    """dS from P, V and dY."""
    slope = torch.bmm(gradient, v.transpose(1, 2))
    slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype)
    return slope if bent is None else torch.ops.aten.tanh_backward(slope, bent)


class _Triangle(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, scale: float, cap: Any) -> Tensor:
        ctx.save_for_backward(q, k, v, sink)
        ctx.scale, ctx.cap = scale, cap
        wide_k, wide_v = (_keys(x.flatten(0, 1), sink) for x in (k, v))
        batch, heads, queries, _ = q.shape
        # Laid out as [B, T, H, d], the order in which the next projection reads it.
        out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
        for here, seen in _tiles(queries, wide_k.shape[1]):
            tile = here.stop - here.start
            some_q = at_least_float32(_fold(q, k.shape[1], here))
            column = None if sink is None else _fold(sink, k.shape[1], here)
            weights, _ = _weights(some_q, wide_k[:, :seen], scale, _hidden(tile, q.device), cap, column)
            out[:, :, here] = torch.bmm(weights, wide_v[:, :seen]).view(batch, heads, tile, -1)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink = ctx.saved_tensors
        wide_k, wide_v = (_keys(x.flatten(0, 1), sink) for x in (k, v))
        to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        to_sink = None if sink is None else sink.new_empty(sink.shape)
        for here, seen in _tiles(q.shape[2], wide_k.shape[1]):
            tile = here.stop - here.start
            some_q, some_g = (at_least_float32(_fold(x, k.shape[1], here)) for x in (q, gradients[0]))
            column = None if sink is None else _fold(sink, k.shape[1], here)
            hidden = _hidden(tile, q.device)
            weights, bent = _weights(some_q, wide_k[:, :seen], ctx.scale, hidden, ctx.cap, column)
            to_v[:, :seen].baddbmm_(weights.transpose(1, 2), some_g)
            slope = _slope(weights, bent, wide_v[:, :seen], some_g)
            if to_sink is not None:
                to_sink[:, :, here] = slope[:, :, :1].reshape(*q.shape[:2], tile, 1)
            slope.mul_(ctx.scale)
            to_q[:, :, here] = torch.bmm(slope, wide_k[:, :seen]).view(*q.shape[:2], tile, -1)
            to_k[:, :seen].baddbmm_(slope.transpose(1, 2), some_q)
        own = slice(0 if sink is None else 1, None)
        found = (x[:, own].reshape(like.shape).to(like.dtype) for x, like in ((to_k, k), (to_v, v)))
        return (to_q, *found, to_sink, None, None)


class _Masked(torch.autograd.Function):
    """q [N, R · T, d_k], k [N, S, d_k], v [N, S, d_v], sink [N, R · T, 1], a part of the N at a time."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, sink, hidden, ctx.scale, ctx.cap = given
        ctx.save_for_backward(q, k, v, sink, hidden)
        out: Tensor = q.new_empty(*q.shape[:2], v.shape[2])
        for part in _parts(q, k):
            some_k, some_v = (_keys(x[part], sink) for x in (k, v))
            column = None if sink is None else sink[part]
            weights, _ = _weights(at_least_float32(q[part]), some_k, ctx.scale, hidden, ctx.cap, column)
            out[part] = torch.bmm(weights, some_v)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, hidden = ctx.saved_tensors
        to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
        to_sink = None if sink is None else torch.empty_like(sink)
        own = slice(0 if sink is None else 1, None)
        for part in _parts(q, k):
            some_k, some_v = (_keys(x[part], sink) for x in (k, v))
            some_q, gradient = (at_least_float32(x[part]) for x in (q, gradients[0]))
            column = None if sink is None else sink[part]
            weights, bent = _weights(some_q, some_k, ctx.scale, hidden, ctx.cap, column)
            slope = _slope(weights, bent, some_v, gradient)
            if to_sink is not None:
                to_sink[part] = slope[:, :, :1]
            slope.mul_(ctx.scale)
            to_v[part] = torch.bmm(weights.transpose(1, 2), gradient)[:, own]
            to_q[part] = torch.bmm(slope, some_k)
            to_k[part] = torch.bmm(slope.transpose(1, 2), some_q)[:, own]
        return to_q, to_k, to_v, to_sink, None, None, None


def _parts(q: Tensor, k: Tensor) -> Iterator[slice]:
    """As many of the N at a time as keep the weights in a cache."""
    size = max(1, WEIGHTS // max(1, q.shape[1] * k.shape[1]))
    for start in range(0, q.shape[0], size):
        yield slice(start, start + size)
