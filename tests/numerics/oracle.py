"""Attention by plain loops, one query, head and key at a time."""

import math

import torch
from torch import Tensor

from heddle.numerics.attention.mask import NO_MODIFIERS, AttentionMask, ScoreModifiers


def contiguous_positions(batch: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """Positions of queries [B, T] and keys [B, S] when the queries are the last of `keys` consecutive positions."""
    k_positions = torch.arange(keys).expand(batch, keys)
    return k_positions[:, keys - queries :], k_positions


def is_visible(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    """Whether a query sees a key, from positions, segment ids and window only."""
    i, j = int(mask.q_positions[row, query]), int(mask.k_positions[row, key])
    if i < 0 or j < 0:
        return False
    segment_ids = mask.q_segment_ids, mask.k_segment_ids
    if (
        segment_ids[0] is not None
        and segment_ids[1] is not None
        and segment_ids[0][row, query] != segment_ids[1][row, key]
    ):
        return False
    if mask.causal:
        return j <= i and (mask.window is None or i - j < mask.window)
    return mask.window is None or abs(i - j) <= mask.window


def loop_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v], in Python's float64."""
    weights = loop_weights(q, k, mask, scale, modifiers)
    wide = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, h, t, s in weights.nonzero().tolist():
        out[b, h, t] += weights[b, h, t, s] * wide[b, h, s]
    return out


def added(
    modifiers: ScoreModifiers, mask: AttentionMask, place: tuple[int, int, int, int], visible: list[int]
) -> float:
    """What gates and relative logits add to the score of query t and key s."""
    (b, h, t, s), bias, total = place, modifiers.token_bias, 0.0
    assert bias is not None
    keys = mask.k_positions[b]
    if bias.log_forget is not None:
        total += math.fsum(bias.log_forget[b, h, later].item() for later in visible if keys[later] > keys[s])
    if bias.relative is not None:
        offset = int(mask.q_positions[b, t] - keys[s])
        total += bias.relative[b, h, t, offset].item() if offset < bias.relative.shape[3] else 0.0
    return total


def loop_weights(
    q: Tensor, k: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers = NO_MODIFIERS
) -> Tensor:
    """The weights [B, H, T, S]. A sink is one more score, whose weight is dropped."""
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    out = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for t in range(queries):
                visible = [s for s in range(keys) if is_visible(mask, b, t, s)]
                scores = [scale * math.fsum((q[b, h, t] * k[b, g, s]).tolist()) for s in visible]
                if modifiers.softcap is not None:
                    scores = [modifiers.softcap * math.tanh(score / modifiers.softcap) for score in scores]
                if modifiers.score_bias is not None:
                    i, j = mask.q_positions[b, t], mask.k_positions[b]
                    biases = [modifiers.score_bias(i - j[s])[h].item() for s in visible]
                    scores = [score + bias for score, bias in zip(scores, biases, strict=True)]
                if modifiers.token_bias is not None:
                    scores = [
                        score + added(modifiers, mask, (b, h, t, s), visible)
                        for score, s in zip(scores, visible, strict=True)
                    ]
                sinks = [] if modifiers.sink is None else [modifiers.sink[h].item()]
                top = max([*scores, *sinks], default=0.0)
                shares = [math.exp(score - top) for score in scores]
                total = math.fsum([*shares, *(math.exp(sink - top) for sink in sinks)])
                for share, s in zip(shares, visible, strict=True):
                    out[b, h, t, s] = share / total
    return out
