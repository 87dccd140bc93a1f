"""Sliding-window attention in blocks: time and memory are linear in the length.

Queries and keys have consecutive positions, and the queries are the last of them. A block of queries attends to the
band of keys in its window. All interior blocks have the same mask and run as one call. The few queries near either end
run as a separate call over the keys near that end.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.attention.mask import BlockModifiers, ScoreModifiers
from heddle.numerics.attention.sdpa import sdpa
from heddle.numerics.attention.tiled import masked_attention
from heddle.numerics.dispatch import device_type


class Block(NamedTuple):
    """What queries and keys of one call share: offsets, the int i − j of queries and keys [T, S].

    Interior blocks are `blocks` calls in one: each of the G groups is repeated `blocks` times in a row, and the
    `repeats` heads of a group follow one another in its queries.
    """

    offsets: Tensor
    blocks: int = 1
    repeats: int = 1


BlockAttention = Callable[[Tensor, Tensor, Tensor, float, Block], Tensor]  # (q, k, v, scale, block) -> output


class Band(NamedTuple):
    """The keys j that query i sees: causal `0 ≤ i − j < window`, bidirectional `|i − j| ≤ window`."""

    window: int
    causal: bool

    @property
    def keys_before(self) -> int:
        """Number of keys before itself that a query sees."""
        return self.window - 1 if self.causal else self.window

    @property
    def keys_after(self) -> int:
        """Number of keys after itself that a query sees."""
        return 0 if self.causal else self.window

    def mask(self, block: Block) -> Tensor:
        """The mask of a block's queries, bool [repeats · T, S]."""
        visible = (block.offsets <= self.keys_before) & (block.offsets >= -self.keys_after)
        return visible.repeat(block.repeats, 1)


def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, modifiers: ScoreModifiers
) -> Tensor:
    """Attend within a band. Arguments and result as in `blockwise_attention`."""
    # Plain batched products, which are for the CPU, serve float32, float64 and training.
    use_masked = q.dtype in (torch.float32, torch.float64) or (torch.is_grad_enabled() and q.requires_grad)
    if all(modifier is None for modifier in modifiers) and not (use_masked and device_type(q) == "cpu"):
        return blockwise_attention(
            q, k, v, band, scale, lambda q, k, v, scale, block: sdpa(q, k, v, scale, band.mask(block))
        )
    sink = modifiers.sink_per_query(q)

    def masked_block(q: Tensor, k: Tensor, v: Tensor, scale: float, block: Block) -> Tensor:
        d_k = k.shape[-1]
        block_sink = None if sink is None else q[..., d_k:]
        bias = None if modifiers.score_bias is None else modifiers.score_bias(block.offsets)
        block_modifiers = BlockModifiers(modifiers.softcap, block_sink, bias, block.blocks)
        return masked_attention(q[..., :d_k], k, v, scale, band.mask(block), block_modifiers)

    # The sinks are appended to the queries as an extra dimension, so that they are split into blocks with them.
    extended_q = q if sink is None else torch.cat((q, sink), dim=-1)
    return blockwise_attention(extended_q, k, v, band, scale, masked_block).to(q.dtype)


def block_size(window: int) -> int:
    """Queries per block: half a window, which wastes the least arithmetic, but at least 16 and at most 128."""
    return max(16, min(128, window // 2))


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float, attend_block: BlockAttention
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], S ≥ T -> [B, H, T, d_v].

    `attend_block(q, k, v, scale, block)` attends with grouped heads.
    """
    past_keys = k.shape[2] - q.shape[2]
    if past_keys > band.keys_before:  # keys that no query can see
        k, v = k[:, :, past_keys - band.keys_before :], v[:, :, past_keys - band.keys_before :]
        past_keys = band.keys_before
    queries, keys = q.shape[2], k.shape[2]
    size = block_size(band.window)
    blocks_before = -(-band.keys_before // size)  # blocks that cover the window before a query
    blocks_after = -(-band.keys_after // size)
    # Queries whose band would start before key 0.
    edge_queries = min(queries, max(0, blocks_before * size - past_keys))
    interior_blocks = (keys - past_keys - edge_queries - blocks_after * size) // size
    if interior_blocks < 1:
        return _edge(q, k, v, (past_keys, 0), scale, attend_block)
    interior_end = edge_queries + interior_blocks * size
    out = []
    if edge_queries:
        visible = slice(past_keys + edge_queries + band.keys_after)
        out.append(
            _edge(q[:, :, :edge_queries], k[:, :, visible], v[:, :, visible], (past_keys, 0), scale, attend_block)
        )
    first_key = past_keys + edge_queries - blocks_before * size
    spans = [
        slice(first_key + i * size, first_key + (i + interior_blocks) * size)
        for i in range(blocks_before + blocks_after + 1)
    ]
    key_blocks, value_blocks = [k[:, :, span] for span in spans], [v[:, :, span] for span in spans]
    out.append(_interior(q[:, :, edge_queries:interior_end], key_blocks, value_blocks, band, scale, attend_block))
    if interior_end < queries:
        start = max(0, past_keys + interior_end - band.keys_before)
        first_positions = (past_keys + interior_end, start)
        out.append(
            _edge(q[:, :, interior_end:], k[:, :, start:], v[:, :, start:], first_positions, scale, attend_block)
        )
    return torch.cat(out, dim=2)


def _edge(
    q: Tensor, k: Tensor, v: Tensor, first_positions: tuple[int, int], scale: float, attend_block: BlockAttention
) -> Tensor:
    """Attend from a range of queries to a range of keys. `first_positions`: position of the first query, first key."""
    q_positions = torch.arange(first_positions[0], first_positions[0] + q.shape[2], device=q.device)
    k_positions = torch.arange(first_positions[1], first_positions[1] + k.shape[2], device=q.device)
    return attend_block(q, k, v, scale, Block(q_positions[:, None] - k_positions))


def _interior(
    q: Tensor, k: list[Tensor], v: list[Tensor], band: Band, scale: float, attend_block: BlockAttention
) -> Tensor:
    """Attend in the blocks whose whole band of keys exists. k[i] and v[i] are the key blocks, shifted by i blocks."""
    size = block_size(band.window)
    groups, repeats = k[0].shape[1], q.shape[1] // k[0].shape[1]
    num_blocks = q.shape[2] // size
    blocks_before = -(-band.keys_before // size)
    # [B, G·num_blocks, repeats·size, d]: each block becomes a head, and the heads of a group become its queries.
    folded = q.unflatten(1, (groups, repeats)).unflatten(3, (num_blocks, size)).transpose(2, 3)
    folded = folded.flatten(1, 2).flatten(2, 3)
    wide_k = torch.cat([x.unflatten(2, (num_blocks, size)) for x in k], dim=3).flatten(1, 2)
    wide_v = torch.cat([x.unflatten(2, (num_blocks, size)) for x in v], dim=3).flatten(1, 2)
    q_positions = torch.arange(blocks_before * size, (blocks_before + 1) * size, device=q.device)
    k_positions = torch.arange(wide_k.shape[2], device=q.device)
    block = Block(q_positions[:, None] - k_positions, num_blocks, repeats)
    y = attend_block(folded, wide_k, wide_v, scale, block)
    blocks: Tensor = y.unflatten(1, (groups, num_blocks)).unflatten(3, (repeats, size))
    return blocks.transpose(2, 3).flatten(1, 2).flatten(2, 3)
