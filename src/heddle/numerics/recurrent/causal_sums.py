"""Sums over earlier tokens that decay: `S_t = γ S_{t−1} + k_t v_tᵀ`, `y_t = q_tᵀ S_t`, in three equal forms.

    reference   y_i = Σ_{j ≤ i} γ^{n_i − n_j} (q_i·k_j) v_j            (Katharopoulos et al. 2020; Sun et al. 2023)
    recurrent   one token after the other
    chunked     pairs within a chunk, sums from chunk to chunk

q, k [B, H, T, d_k], v [B, H, T, d_v] -> y [B, H, T, d_v] and S [B, H, d_k, d_v], in at least float32. n counts real
tokens: padding neither decays nor adds (its k is to be zero). A new document starts from S = 0. Powers of γ ≤ 1 are
of differences that are never negative, so nothing overflows however long the text. A mean is a sum divided by that of
the weights: `y_t = q_tᵀ S_t / q_tᵀ z_t`, z_t = Σ k_j, zero where there is nothing to divide by.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.recurrent.chunked_sums import Places, chunked, inverse, of_chunk, times, weights


class SumFacts(NamedTuple):
    """What decides the form."""

    tokens: int
    gradients: bool
    carried: bool


def flops(tokens: int, batch: int, heads: int, widths: tuple[int, int]) -> int:
    """Operations of the recurrence: each token is added to S and reads it; `widths` are d_k and d_v."""
    return 4 * batch * heads * tokens * widths[0] * widths[1]


def nothing_summed(q: Tensor, width: int) -> Tensor:
    """A state before any token [B, H, d_k, width]."""
    return torch.zeros(*q.shape[:2], q.shape[3], width, dtype=at_least_float32(q[:0]).dtype, device=q.device)


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The quadratic form: every pair of tokens. Returns y and the state after the last token."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    if q.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), state
    by = weights(places, slice(0, q.shape[2]), q.shape[2], log_decay, state)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * by.inside[:, :, 0]
    earlier = times(torch.einsum("bhtd,bhde->bhte", q, state), of_chunk(by.before, 0))
    added = torch.einsum("bhtd,bhte->bhde", times(k, of_chunk(by.into, 0)), v)
    return torch.einsum("bhts,bhsd->bhtd", scores, v) + earlier, times(state, of_chunk(by.keep, 0)) + added


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    keep = _keep(places, q.shape[2], log_decay, state)
    out = [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
    for token in range(q.shape[2]):
        here = slice(token, token + 1)
        state = times(state, of_chunk(keep, token)) + k[:, :, here].mT * v[:, :, here]
        out.append(q[:, :, here] @ state)
    return torch.cat(out, dim=2), state


def _keep(places: Places, length: int, log_decay: Tensor | None, like: Tensor) -> Tensor | None:
    """What the state before each token counts in that after it, [B|1, H|1, T|1, 1, 1]."""
    if places.arrived is None and places.segments is None:  # the usual step, made of as few operations as can be
        return None if log_decay is None else log_decay.exp()[None, :, None, None, None]
    return weights(places, slice(0, length), 1, log_decay, like).keep


def _no_chunks(facts: SumFacts) -> str | None:
    if facts.tokens < 2:
        return "one token is one step of the recurrence"
    return "gradients do not pass through a state here" if facts.carried and facts.gradients else None


CAUSAL_SUMS = Operation(
    "causal_sums",
    (
        Form("chunked", chunked, _no_chunks),
        Form("recurrent", _recurrent, lambda facts: None),
        Form("reference", reference, lambda facts: None),
    ),
)


def _facts(inputs: tuple[Tensor | None, ...], state: Tensor | None) -> SumFacts:
    gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, state))
    assert inputs[0] is not None
    return SumFacts(inputs[0].shape[2], gradients, state is not None)


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, H, T, d_k], v [B, H, T, d_v], log γ [H] (None: 0), state [B, H, d_k, d_v] (None: zero) -> y, new state.

    y [B, H, T, d_v] is in at least float32. Without a state there is none to return. k is zero at padding.
    """
    count(flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3])))
    form = CAUSAL_SUMS.choose(_facts((q, k, v, log_decay), state))
    with without_autocast(q):
        y, after = form.run(q, k, v, log_decay, places, nothing_summed(q, v.shape[3]) if state is None else state)
    return y, None if state is None else after


def quotient(sums: Tensor) -> Tensor:
    """Sums [..., d_v + 1], of the weights in the last column -> means [..., d_v]."""
    return sums[..., :-1] * inverse(sums[..., -1:])


def with_ones(v: Tensor) -> Tensor:
    """v [..., d_v] -> [..., d_v + 1], in at least float32: what sums to the weights themselves."""
    return functional.pad(at_least_float32(v), (0, 1), value=1.0)


def _means_of_sums(
    q: Tensor, k: Tensor, v: Tensor, places: Places, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    sums, after = causal_sums(q, k, with_ones(v), None, places, state)
    return quotient(sums), after


def _chunked_means(q: Tensor, k: Tensor, v: Tensor, places: Places, state: Tensor | None) -> tuple[Tensor, Tensor]:
    count(flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3] + 1)))
    with without_autocast(q):
        return chunked(q, k, v, None, places, nothing_summed(q, v.shape[3] + 1) if state is None else state)


CAUSAL_MEANS = Operation(
    "causal_means",
    (Form("chunked", _chunked_means, _no_chunks), Form("reference", _means_of_sums, lambda facts: None)),
)


def causal_means(
    q: Tensor, k: Tensor, v: Tensor, places: Places, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """q, k ≥ 0 [B, H, T, d_k], v [B, H, T, d_v], state [B, H, d_k, d_v + 1] -> y [B, H, T, d_v], new state.

    The last column of a state is z. As `causal_sums` otherwise, without decay.
    """
    y, after = CAUSAL_MEANS.choose(_facts((q, k, v), state)).run(q, k, v, places, state)
    return y, None if state is None else after
