"""Attention with two softmaxes (Shen et al. 2018, "Efficient Attention"): linear in both lengths.

    y_t = softmax_d(q_t) · Σ_s softmax_s(k_s) v_sᵀ

q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]; query head h reads group h // (H/G). Keys are
normalised over the sequence, each of their dims by itself, so it is for texts that are seen whole. `mask` is bool
[B, S], True where a key counts, or None for all; without any key the answer is zero. At least float32 within.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation
from heddle.numerics.norms import at_least_float32


class DoubleSoftmaxFacts(NamedTuple):
    """Sizes; no form refuses by them yet."""

    queries: int
    keys: int


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """By the weights of every pair, [B, H, T, S]: softmax_d(Q) softmax_s(K)ᵀ, then times V."""
    k, v = _normalised(k, v, mask)
    weights = torch.einsum("bgrtd,bgsd->bgrts", _grouped(q, k.shape[1]), k)
    return torch.einsum("bgrts,bgse->bgrte", weights, v).flatten(1, 2).to(q.dtype)


def flops(rows: int, queries: int, keys: int, widths: int) -> int:
    """Operations for `queries` (of all heads) and `keys` (of all groups) of each row; `widths` is d_k · d_v."""
    return 2 * rows * (queries + keys) * widths


def summarise(k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Σ_s softmax_s(k_s) v_sᵀ, [B, G, d_k, d_v] in at least float32: all that queries need of keys and values."""
    count(flops(k.shape[0], 0, k.shape[1] * k.shape[2], k.shape[3] * v.shape[3]))
    return _summary(k, v, mask)


def read(q: Tensor, summary: Tensor) -> Tensor:
    """softmax_d(Q) times a summary: q [B, H, T, d_k], summary [B, G, d_k, d_v] -> [B, H, T, d_v] in q's dtype."""
    count(flops(q.shape[0], q.shape[1] * q.shape[2], 0, q.shape[3] * summary.shape[3]))
    return _answer(q, summary)


def _summary(k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = _normalised(k, v, mask)
    return torch.einsum("bgsd,bgse->bgde", k, v)


def _answer(q: Tensor, summary: Tensor) -> Tensor:
    return torch.einsum("bgrtd,bgde->bgrte", _grouped(q, summary.shape[1]), summary).flatten(1, 2).to(q.dtype)


def _linear(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return _answer(q, _summary(k, v, mask))


def _grouped(q: Tensor, groups: int) -> Tensor:
    """softmax over each query's dims, [B, G, H/G, T, d_k]."""
    return at_least_float32(q).softmax(-1).unflatten(1, (groups, -1))


def _normalised(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each dim of the keys softmaxed over the sequence; keys and values that do not count are zero."""
    k, v = at_least_float32(k), at_least_float32(v)
    if mask is None:
        return k.softmax(2), v
    hidden = ~mask[:, None, :, None]
    # A row without keys would be softmax of nothing: its keys count as equal, and then become zero.
    empty = ~mask.any(1)[:, None, None, None]
    k = k.masked_fill(hidden, float("-inf")).masked_fill(empty, 0.0).softmax(2)
    return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


DOUBLE_SOFTMAX: Operation[DoubleSoftmaxFacts] = Operation(
    "double_softmax",
    (Form("linear", _linear, lambda facts: None), Form("reference", reference, lambda facts: None)),
)


def double_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], mask bool [B, S] or None -> [B, H, T, d_v]."""
    queries, keys = q.shape[1] * q.shape[2], k.shape[1] * k.shape[2]
    count(flops(q.shape[0], queries, keys, q.shape[3] * v.shape[3]))
    form = DOUBLE_SOFTMAX.choose(DoubleSoftmaxFacts(q.shape[2], k.shape[2]))
    y: Tensor = form.run(q, k, v, mask)
    return y
