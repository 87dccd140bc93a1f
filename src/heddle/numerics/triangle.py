"""Attention by plain batched products: causal, in tiles of queries against only the keys they may see, or masked.

    P = softmax(Q Kᵀ · scale + mask),   Y = P V
    dV = Pᵀ dY,   dP = dY Vᵀ,   dS = P ⊙ (dP − rowsum(dP ⊙ P)),   dQ = dS K · scale,   dK = dSᵀ Q · scale

Plain batched products, which on a CPU outrun torch's fused kernel for short rows and above all in its backward pass
(docs/log.md). The heads of a group are queries of one head. Nothing of size T×S is kept: the gradient makes each
tile's P again. Narrow dtypes are computed in float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from heddle.numerics.norms import at_least_float32

TILE = 64  # queries to a tile; up to twice as many are one tile
WEIGHTS = 2**20  # weights that exist at one time under a mask: 4 MB in float32, which a cache holds


def triangle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], the queries last -> [B, H, T, d_v]."""
    y: Tensor = _Triangle.apply(q, k, v, scale)
    return y


def masked(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor) -> Tensor:
    """As `triangle`, but seeing what `mask` shows, bool [T, S], in which every query sees some key."""
    folded = q.reshape(k.shape[0] * k.shape[1], -1, q.shape[3])
    y: Tensor = _Masked.apply(folded, k.flatten(0, 1), v.flatten(0, 1), scale, ~mask)
    return y.view(*q.shape[:3], v.shape[3])


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


def _weights(q: Tensor, k: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """P of q [N, R · T, d] and k [N, S, d]; `hidden` [T, w] hides some of the last w keys from each query."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    tile, keys = hidden.shape
    scores[:, :, -keys:].unflatten(1, (-1, tile)).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


def _slope(weights: Tensor, v: Tensor, gradient: Tensor, scale: float) -> Tensor:
    """dS · scale from P, V and dY."""
    slope = torch.bmm(gradient, v.transpose(1, 2))
    return torch._softmax_backward_data(slope, weights, -1, weights.dtype).mul_(scale)


class _Triangle(torch.autograd.Function):
    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        wide_k, wide_v = (at_least_float32(x).flatten(0, 1) for x in (k, v))
        batch, heads, queries, _ = q.shape
        # Laid out as [B, T, H, d], the order in which the next projection reads it.
        out = q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)
        for here, seen in _tiles(queries, k.shape[2]):
            tile = here.stop - here.start
            some_q = at_least_float32(_fold(q, k.shape[1], here))
            weights = _weights(some_q, wide_k[:, :seen], scale, _hidden(tile, q.device))
            out[:, :, here] = torch.bmm(weights, wide_v[:, :seen]).view(batch, heads, tile, -1)
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        groups, scale = k.shape[1], ctx.scale
        wide_k, wide_v = (at_least_float32(x).flatten(0, 1) for x in (k, v))
        to_q = torch.empty_like(q)
        to_k, to_v = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
        for here, seen in _tiles(q.shape[2], k.shape[2]):
            tile = here.stop - here.start
            some_q, some_g = (at_least_float32(_fold(x, groups, here)) for x in (q, gradients[0]))
            weights = _weights(some_q, wide_k[:, :seen], scale, _hidden(tile, q.device))
            to_v[:, :seen].baddbmm_(weights.transpose(1, 2), some_g)
            slope = _slope(weights, wide_v[:, :seen], some_g, scale)
            to_q[:, :, here] = torch.bmm(slope, wide_k[:, :seen]).view(q.shape[0], q.shape[1], tile, -1)
            to_k[:, :seen].baddbmm_(slope.transpose(1, 2), some_q)
        return to_q, to_k.view(k.shape).to(k.dtype), to_v.view(v.shape).to(v.dtype), None


class _Masked(torch.autograd.Function):
    """q [N, R · T, d_k], k [N, S, d_k], v [N, S, d_v], a part of the N at a time."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, hidden)
        ctx.scale = scale
        size = max(1, WEIGHTS // max(1, q.shape[1] * k.shape[1]))
        out = q.new_empty(*q.shape[:2], v.shape[2])
        parts = [x.split(size) for x in (q, k, v, out)]
        for some_q, some_k, some_v, some_out in zip(*parts, strict=True):
            weights = _weights(at_least_float32(some_q), at_least_float32(some_k), scale, hidden)
            some_out.copy_(torch.bmm(weights, at_least_float32(some_v)))
        return out

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, hidden = ctx.saved_tensors
        size = max(1, WEIGHTS // max(1, q.shape[1] * k.shape[1]))
        found = [torch.empty_like(x) for x in (q, k, v)]
        parts = [x.split(size) for x in (q, k, v, gradients[0])]
        outs = [x.split(size) for x in found]
        for some, (to_q, to_k, to_v) in zip(zip(*parts, strict=True), zip(*outs, strict=True), strict=True):
            some_q, some_k, some_v, gradient = (at_least_float32(x) for x in some)
            weights = _weights(some_q, some_k, ctx.scale, hidden)
            slope = _slope(weights, some_v, gradient, ctx.scale)
            to_v.copy_(torch.bmm(weights.transpose(1, 2), gradient))
            to_q.copy_(torch.bmm(slope, some_k))
            to_k.copy_(torch.bmm(slope.transpose(1, 2), some_q))
        return (*found, None, None)
