"""Attention within a window, in time and memory linear in the length: blocks of queries against a band of keys.

Queries and keys stand at consecutive positions, the queries last. Interior blocks go through one call, in which
every block has the same mask; the few queries near an edge go through another, over the keys near that edge.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.attention.score_modifiers import Columns, Extras
from heddle.numerics.attention.sdpa import fused
from heddle.numerics.attention.tiled import masked
from heddle.numerics.dispatch.operation import device_of

Kernel = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]


class Band(NamedTuple):
    """The window: causal `0 ≤ i − j < window`, bidirectional `|i − j| ≤ window`."""

    window: int
    causal: bool

    @property
    def before(self) -> int:
        """How far back a query sees."""
        return self.window - 1 if self.causal else self.window

    @property
    def after(self) -> int:
        """How far ahead a query sees."""
        return 0 if self.causal else self.window

    def mask(self, gap: Tensor) -> Tensor:
        """What is seen, bool [queries, keys], of how far back each key is from each query."""
        return (gap <= self.before) & (gap >= -self.after)


def attend(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, extras: Extras) -> Tensor:
    """Attention within a band; arguments and result as in `blocks`."""
    wide = q.dtype in (torch.float32, torch.float64) or (torch.is_grad_enabled() and q.requires_grad)
    if all(extra is None for extra in extras) and not (wide and device_of(q) == "cpu"):
        return blocks(q, k, v, band, scale, lambda q, k, v, scale, gap: fused(q, k, v, scale, band.mask(gap)))
    _, sink, slope, _ = extras.columns(q)

    def kernel(q: Tensor, k: Tensor, v: Tensor, scale: float, gap: Tensor) -> Tensor:
        d = k.shape[-1]
        columns = Columns(extras.softcap, None if sink is None else q[..., d : d + 1])
        if slope is not None:
            columns = columns._replace(slope=q[..., -1:], gap=gap.abs())
        return masked(q[..., :d], k, v, scale, band.mask(gap), columns)

    # Sinks and slopes ride along as the last places of each query, so that they are cut into blocks with it.
    riding = [x for x in (sink, slope) if x is not None]
    return blocks(torch.cat((q, *riding), dim=-1) if riding else q, k, v, band, scale, kernel).to(q.dtype)


def block_size(window: int) -> int:
    """Queries to a block: half a window wastes least arithmetic, bounded so that blocks are neither tiny nor large."""
    return max(16, min(128, window // 2))


def blocks(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, kernel: Kernel) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], S ≥ T -> [B, H, T, d_v].

    `kernel(q, k, v, scale, gap)` attends with grouped heads and the mask of gap, the int i − j [queries, keys].
    """
    behind = k.shape[2] - q.shape[2]
    if behind > band.before:  # keys that no query can see
        k, v = k[:, :, behind - band.before :], v[:, :, behind - band.before :]
        behind = band.before
    queries, keys = q.shape[2], k.shape[2]
    size = block_size(band.window)
    left = -(-band.before // size)  # whole blocks that reach as far back as the window
    right = -(-band.after // size)
    head = min(queries, max(0, left * size - behind))  # queries whose band would start before key 0
    count = (keys - behind - head - right * size) // size
    if count < 1:
        return _edge(q, k, v, (behind, 0), scale, kernel)
    middle = head + count * size
    out = (
        []
        if head == 0
        else [
            _edge(
                q[:, :, :head],
                k[:, :, : behind + head + band.after],
                v[:, :, : behind + head + band.after],
                (behind, 0),
                scale,
                kernel,
            )
        ]
    )
    first = behind + head - left * size
    spans = [slice(first + i * size, first + (i + count) * size) for i in range(left + right + 1)]
    out.append(
        _interior(
            q[:, :, head:middle],
            [k[:, :, s] for s in spans],
            [v[:, :, s] for s in spans],
            band,
            scale,
            kernel,
        )
    )
    if middle < queries:
        start = max(0, behind + middle - band.before)
        out.append(
            _edge(
                q[:, :, middle:],
                k[:, :, start:],
                v[:, :, start:],
                (behind + middle, start),
                scale,
                kernel,
            )
        )
    return torch.cat(out, dim=2)


def _edge(q: Tensor, k: Tensor, v: Tensor, start: tuple[int, int], scale: float, kernel: Kernel) -> Tensor:
    """Some queries against some keys; `start` are the positions of the first of each."""
    i = torch.arange(start[0], start[0] + q.shape[2], device=q.device)
    j = torch.arange(start[1], start[1] + k.shape[2], device=q.device)
    return kernel(q, k, v, scale, i[:, None] - j)


def _interior(q: Tensor, k: list[Tensor], v: list[Tensor], band: Band, scale: float, kernel: Kernel) -> Tensor:
    """Blocks whose whole band exists: k[i] and v[i] are the queries' blocks shifted by i blocks."""
    size = block_size(band.window)
    groups, repeats = k[0].shape[1], q.shape[1] // k[0].shape[1]
    count = q.shape[2] // size
    left = -(-band.before // size)
    # [B, G·count, repeats·size, d]: a block is a head of its own, the heads of a group are its queries.
    folded = q.unflatten(1, (groups, repeats)).unflatten(3, (count, size)).transpose(2, 3)
    folded = folded.flatten(1, 2).flatten(2, 3)
    wide_k = torch.cat([x.unflatten(2, (count, size)) for x in k], dim=3).flatten(1, 2)
    wide_v = torch.cat([x.unflatten(2, (count, size)) for x in v], dim=3).flatten(1, 2)
    i = torch.arange(left * size, (left + 1) * size, device=q.device)
    j = torch.arange(wide_k.shape[2], device=q.device)
    gap = (i[:, None] - j).repeat(repeats, 1)
    y = kernel(folded, wide_k, wide_v, scale, gap)
    y = y.unflatten(1, (groups, count)).unflatten(3, (repeats, size)).transpose(2, 3)
    return y.flatten(1, 2).flatten(2, 3)
