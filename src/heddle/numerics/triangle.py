"""Causal attention in tiles of queries, each against only the keys it may see, with a gradient made the same way.

    P = softmax(Q Kᵀ · scale + mask),   Y = P V
    dV = Pᵀ dY,   dP = dY Vᵀ,   dS = P ⊙ (dP − rowsum(dP ⊙ P)),   dQ = dS K · scale,   dK = dSᵀ Q · scale

Plain batched products, which on a CPU outrun torch's fused kernel for short rows and above all in its backward pass
(benchmarks/README.md). The heads of a group are queries of one head. Nothing of size T×S is kept: the gradient makes
each tile's P again. Narrow dtypes are computed in float32.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from heddle.numerics.norms import at_least_float32

TILE = 64  # queries to a tile; up to twice as many are one tile


def triangle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], the queries last -> [B, H, T, d_v]."""
    y: Tensor = _Triangle.apply(q, k, v, scale)
    return y


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


def _weights(q: Tensor, k: Tensor, tile: int, scale: float) -> Tensor:
    """P of one tile: q [B·G, R · tile, d], k [B·G, seen, d], of which the last `tile` keys are partly hidden."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    hidden = torch.ones(tile, tile, dtype=torch.bool, device=q.device).triu_(1)
    scores[:, :, -tile:].unflatten(1, (-1, tile)).masked_fill_(hidden, float("-inf"))
    return scores.softmax(-1)


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
            weights = _weights(at_least_float32(_fold(q, k.shape[1], here)), wide_k[:, :seen], tile, scale)
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
            weights = _weights(some_q, wide_k[:, :seen], tile, scale)
            to_v[:, :seen].baddbmm_(weights.transpose(1, 2), some_g)
            slope = torch.bmm(some_g, wide_v[:, :seen].transpose(1, 2))
            slope = torch._softmax_backward_data(slope, weights, -1, weights.dtype).mul_(scale)
            to_q[:, :, here] = torch.bmm(slope, wide_k[:, :seen]).view(q.shape[0], q.shape[1], tile, -1)
            to_k[:, :seen].baddbmm_(slope.transpose(1, 2), some_q)
        return to_q, to_k.view(k.shape).to(k.dtype), to_v.view(v.shape).to(v.dtype), None
