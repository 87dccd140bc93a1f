"""Plain loops that say what attention is, one query, head and key at a time."""

import math

import torch
from torch import Tensor

from heddle.numerics.attention.score_modifiers import PLAIN, Extras
from heddle.numerics.attention.visibility import Visibility


def sees(seen: Visibility, row: int, query: int, key: int) -> bool:
    """Whether a query may see a key, from positions, documents and window alone."""
    i, j = int(seen.q_positions[row, query]), int(seen.k_positions[row, key])
    if i < 0 or j < 0:
        return False
    documents = seen.q_documents, seen.k_documents
    if documents[0] is not None and documents[1] is not None and documents[0][row, query] != documents[1][row, key]:
        return False
    if seen.causal:
        return j <= i and (seen.window is None or i - j < seen.window)
    return seen.window is None or abs(i - j) <= seen.window


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v], in Python's float64."""
    weights = weigh(q, k, seen, scale, extras)
    wide = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b, h, t, s in weights.nonzero().tolist():
        out[b, h, t] += weights[b, h, t, s] * wide[b, h, s]
    return out


def weigh(q: Tensor, k: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    """The weights [B, H, T, S]; a sink is one score more, whose share goes to nobody."""
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    out = torch.zeros(batch, heads, queries, keys, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for t in range(queries):
                visible = [s for s in range(keys) if sees(seen, b, t, s)]
                scores = [scale * math.fsum((q[b, h, t] * k[b, g, s]).tolist()) for s in visible]
                if extras.softcap is not None:
                    scores = [extras.softcap * math.tanh(score / extras.softcap) for score in scores]
                if extras.slopes is not None:
                    near = [abs(int(seen.q_positions[b, t]) - int(seen.k_positions[b, s])) for s in visible]
                    slope = extras.slopes[h].item()
                    scores = [score - slope * far for score, far in zip(scores, near, strict=True)]
                sinks = [] if extras.sink is None else [extras.sink[h].item()]
                top = max([*scores, *sinks], default=0.0)
                shares = [math.exp(score - top) for score in scores]
                total = math.fsum([*shares, *(math.exp(sink - top) for sink in sinks)])
                for share, s in zip(shares, visible, strict=True):
                    out[b, h, t, s] = share / total
    return out
