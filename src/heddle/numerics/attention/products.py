"""Attention of few queries by plain products: all their weights are in memory at one time.

    P = softmax(cap · tanh(Q Kᵀ · scale / cap) + bias ; sink),   Y = P V

On a CPU this is the fastest way for float32 queries that see every key. On CUDA it serves the decoding of a token with
any mask and any modifier: sizes may change with every token, as no kernel plans for them, and a few launches do it.
"""

import torch
from torch import Tensor

from heddle.numerics.attention.mask import AttentionMask
from heddle.numerics.attention.score_modifiers import ScoreModifiers
from heddle.numerics.attention.sdpa import in_autocast_dtype
from heddle.numerics.norms import at_least_float32, without_autocast

KEY_BLOCK = 64  # products run over whole blocks of keys, so that their sizes repeat from token to token


def unmasked_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """Attention of few queries that see every key: K qᵀ, softmax, P V. Keys are read in memory order.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. bias [B or 1, H, T, S] is added to scores.
    Products run over whole blocks of keys, and the remaining keys are summed elementwise: for each new length oneDNN
    sets up a new primitive, which costs a decoding step more than its products.
    """
    folded = (q * scale).reshape(k.shape[0] * k.shape[1], -1, q.shape[3])
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    aligned = k.shape[1] - k.shape[1] % KEY_BLOCK
    scores = torch.bmm(k[:, :aligned], folded.transpose(1, 2)).transpose(1, 2)
    scores = torch.cat((scores, (folded[:, :, None] * k[:, None, aligned:]).sum(-1)), dim=2)
    if bias is not None:
        scores = scores + bias.expand(q.shape[0], -1, -1, -1).reshape(scores.shape)
    weights = scores.softmax(-1)
    remainder = (weights[:, :, aligned:, None] * v[:, None, aligned:]).sum(2)
    return (torch.bmm(weights[:, :, :aligned], v[:, :aligned]) + remainder).view(*q.shape[:3], v.shape[2])


def masked_products(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, modifiers: ScoreModifiers
) -> Tensor:
    """Attention of few queries with any mask and modifiers. Scores and weighted sums are not rounded before the end.

    q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v].
    """
    q, k, v = in_autocast_dtype(q, k, v)
    with without_autocast(q):
        rows, queries = k.shape[0] * k.shape[1], q.shape[1] // k.shape[1] * q.shape[2]  # of groups, of each group
        folded = q.reshape(rows, queries, q.shape[3])
        scores = wide_product(folded, k.flatten(0, 1).mT).mul_(scale).view(*q.shape[:3], k.shape[2])
        if modifiers.softcap is not None:
            scores = scores.div_(modifiers.softcap).tanh_().mul_(modifiers.softcap)
        bias = modifiers.bias(mask)
        if bias is not None:
            scores = scores + bias
        empty = None
        if not mask.all_visible:
            hidden, empty = mask.cached("hidden", lambda: hidden_keys(mask))
            scores = scores.masked_fill(hidden, float("-inf"))  # also the NaN of a slot without a token
        sink = modifiers.sink_per_query(q)
        if sink is not None:
            scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
        if mask.may_have_padding:  # NaN in a slot without a token would reach the sum, as 0 · NaN is NaN
            v = v.masked_fill((mask.k_positions < 0)[:, None, :, None], 0.0)
        y = wide_product(weights.reshape(rows, queries, k.shape[2]), v.flatten(0, 1))
        y = y.view(*q.shape[:3], v.shape[3]).to(q.dtype)
        return y if empty is None else y.masked_fill(empty, 0.0)


def hidden_keys(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """The keys that a query does not see, bool [B, 1, T, S], and the queries that see none, bool [B, 1, T, 1].

    For such a query no key is hidden: its softmax would be NaN.
    """
    hidden = ~mask.materialize()[:, None]
    empty = hidden.all(-1, keepdim=True)
    return hidden & ~empty, empty


def wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x [N, m, n] @ y [N, n, s] in at least float32. CUDA's product of narrow numbers writes float32 at no cost."""
    if x.dtype in (torch.float32, torch.float64) or x.device.type == "cpu":
        return torch.bmm(at_least_float32(x), at_least_float32(y))
    return torch.bmm(x, y, out_dtype=torch.float32)
