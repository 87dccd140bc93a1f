"""Attention with two softmaxes ("Efficient Attention", Shen et al. 2018): linear in the number of queries and of keys.

    y_t = softmax_d(q_t) · Σ_s softmax_s(k_s) v_sᵀ

q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]. Query head h reads group h // (H/G). The softmax
of the keys runs over the sequence, for each dimension separately, so all keys must be known: it is not causal.
`key_mask` is bool [B, S], True at visible keys, or None if all are. A row without visible keys yields zeros. Everything
is computed in at least float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch import Kernel, Operation, add_flops
from heddle.numerics.norms import at_least_float32


class DoubleSoftmaxFacts(NamedTuple):
    """Sizes of a call. Both kernels support every call."""

    queries: int
    keys: int


def reference(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Quadratic: the weights of every pair [B, H, T, S], softmax_d(Q) softmax_s(K)ᵀ, times V."""
    k, v = _normalize_keys(k, v, key_mask)
    weights = torch.einsum("bgrtd,bgsd->bgrts", _grouped_queries(q, k.shape[1]), k)
    return torch.einsum("bgrts,bgse->bgrte", weights, v).flatten(1, 2).to(q.dtype)


def double_softmax_flops(rows: int, queries: int, keys: int, widths: int) -> int:
    """FLOPs of `queries` (of all heads) and `keys` (of all groups) per row. `widths` is d_k · d_v."""
    return 2 * rows * (queries + keys) * widths


def summarize_keys_values(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    """Σ_s softmax_s(k_s) v_sᵀ, [B, G, d_k, d_v] in at least float32. Queries need nothing else of keys and values."""
    add_flops(double_softmax_flops(k.shape[0], 0, k.shape[1] * k.shape[2], k.shape[3] * v.shape[3]))
    return _summary(k, v, key_mask)


def read_summary(q: Tensor, summary: Tensor) -> Tensor:
    """softmax_d(Q) times the summary: q [B, H, T, d_k], summary [B, G, d_k, d_v] -> [B, H, T, d_v] in q's dtype."""
    add_flops(double_softmax_flops(q.shape[0], q.shape[1] * q.shape[2], 0, q.shape[3] * summary.shape[3]))
    return _read(q, summary)


def _summary(k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    k, v = _normalize_keys(k, v, key_mask)
    return torch.einsum("bgsd,bgse->bgde", k, v)


def _read(q: Tensor, summary: Tensor) -> Tensor:
    return torch.einsum("bgrtd,bgde->bgrte", _grouped_queries(q, summary.shape[1]), summary).flatten(1, 2).to(q.dtype)


def _linear(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
    return _read(q, _summary(k, v, key_mask))


def _grouped_queries(q: Tensor, groups: int) -> Tensor:
    """Softmax over the dimensions of each query, [B, G, H/G, T, d_k]."""
    grouped: Tensor = at_least_float32(q).softmax(-1).unflatten(1, (groups, -1))
    return grouped


def _normalize_keys(k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax of each key dimension over the sequence. Keys and values that are not visible become zero."""
    k, v = at_least_float32(k), at_least_float32(v)
    if key_mask is None:
        return k.softmax(2), v
    hidden = ~key_mask[:, None, :, None]
    # The softmax of a row without visible keys would be NaN: its keys are set equal first, and to zero afterwards.
    empty = ~key_mask.any(1)[:, None, None, None]
    k = k.masked_fill(hidden, float("-inf")).masked_fill(empty, 0.0).softmax(2)
    return k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


DOUBLE_SOFTMAX: Operation[DoubleSoftmaxFacts] = Operation(
    "double_softmax",
    (Kernel("linear", _linear, lambda facts: None), Kernel("reference", reference, lambda facts: None)),
)


def double_softmax(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v], key_mask bool [B, S] or None -> [B, H, T, d_v]."""
    queries, keys = q.shape[1] * q.shape[2], k.shape[1] * k.shape[2]
    add_flops(double_softmax_flops(q.shape[0], queries, keys, q.shape[3] * v.shape[3]))
    kernel = DOUBLE_SOFTMAX.choose(DoubleSoftmaxFacts(q.shape[2], k.shape[2]))
    y: Tensor = kernel.run(q, k, v, key_mask)
    return y
