"""Plain loops that say what attention is, one query, head and key at a time."""

import math

import torch
from torch import Tensor

from heddle.numerics.visibility import Visibility


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


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v], in Python's float64."""
    batch, heads, queries, _ = q.shape
    groups, keys = k.shape[1], k.shape[2]
    out = torch.zeros(batch, heads, queries, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for t in range(queries):
                visible = [s for s in range(keys) if sees(seen, b, t, s)]
                scores = [scale * math.fsum((q[b, h, t] * k[b, g, s]).tolist()) for s in visible]
                top = max(scores, default=0.0)
                weights = [math.exp(score - top) for score in scores]
                for weight, s in zip(weights, visible, strict=True):
                    out[b, h, t] += weight / math.fsum(weights) * v[b, g, s]
    return out
