"""Decaying sums over earlier tokens: `S_t = γ S_{t−1} + k_t v_tᵀ`, `y_t = q_tᵀ S_t`, by equivalent kernels.

    reference   y_i = Σ_{j ≤ i} γ^{n_i − n_j} (q_i·k_j) v_j            (Katharopoulos et al. 2020; Sun et al. 2023)
    recurrent   token by token
    chunked     pairs within a chunk, a state from chunk to chunk
    batched     all chunks at once; fla: the library's version of it

q, k [B, H, T, d_k], v [B, H, T, d_v] -> y [B, H, T, d_v] and S [B, H, d_k, d_v], in at least float32. n counts tokens
without padding: padding neither decays nor adds (its k must be zero). A new document starts from S = 0. γ ≤ 1 is only
raised to powers ≥ 0, so nothing overflows at any length. `causal_means` divides the sums by the sum of the weights:
`y_t = q_tᵀ S_t / q_tᵀ z_t`, z_t = Σ k_j. The mean is zero where the weights are zero.
"""

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch import Kernel, Operation, add_flops, device_type, optional_nondeterministic
from heddle.numerics.norms import at_least_float32, without_autocast
from heddle.numerics.recurrent import fla
from heddle.numerics.recurrent.batched_chunks import batched_sums
from heddle.numerics.recurrent.chunked_sums import (
    CallLayout,
    chunk_weight,
    chunked_sums,
    decay_weights,
    safe_quotient,
    scale_by,
    token_log_decays,
)
from heddle.numerics.recurrent.recurrence import RecurrenceFacts, loop_unsupported


def causal_sums_flops(tokens: int, batch: int, heads: int, widths: tuple[int, int]) -> int:
    """FLOPs of the recurrence: each token is added to S and reads it. `widths` are d_k and d_v."""
    return 4 * batch * heads * tokens * widths[0] * widths[1]


def zero_state(q: Tensor, width: int) -> Tensor:
    """The state before the first token, zeros [B, H, d_k, width]."""
    return torch.zeros(*q.shape[:2], q.shape[3], width, dtype=at_least_float32(q[:0]).dtype, device=q.device)


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Quadratic in T: every pair of tokens. Returns y and the state after the last token."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    if q.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), state
    decay = decay_weights(layout, slice(0, q.shape[2]), q.shape[2], log_decay, state)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * decay.within_chunk[:, :, 0]
    from_state = scale_by(torch.einsum("bhtd,bhde->bhte", q, state), chunk_weight(decay.from_state, 0))
    added = torch.einsum("bhtd,bhte->bhde", scale_by(k, chunk_weight(decay.into_state, 0)), v)
    new_state = scale_by(state, chunk_weight(decay.state_decay, 0)) + added
    return torch.einsum("bhts,bhsd->bhtd", scores, v) + from_state, new_state


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    state_decay = _state_decay(layout, q.shape[2], log_decay, state)
    out = [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
    for token in range(q.shape[2]):
        token_slice = slice(token, token + 1)
        state = scale_by(state, chunk_weight(state_decay, token)) + k[:, :, token_slice].mT * v[:, :, token_slice]
        out.append(q[:, :, token_slice] @ state)
    return torch.cat(out, dim=2), state


def _state_decay(layout: CallLayout, length: int, log_decay: Tensor | None, like: Tensor) -> Tensor | None:
    """The weight of the state before each token in the state after it, [B|1, H|1, T|1, 1, 1]."""
    if layout.cumulative_tokens is None and layout.call_segment_ids is None:  # the usual decoding step, few operations
        return None if log_decay is None else log_decay.exp()[None, :, None, None, None]
    return decay_weights(layout, slice(0, length), 1, log_decay, like).state_decay


def _batched(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor
) -> tuple[Tensor, Tensor]:
    decays = None if log_decay is None else token_log_decays(log_decay, layout, q.shape[2])
    return batched_sums(q, k, v, decays, layout.call_segment_ids, state)


def _chunked_unsupported(facts: RecurrenceFacts) -> str | None:
    if facts.tokens < 2:
        return "one token is one step of the recurrence"
    if facts.has_state and facts.gradients:
        return "it does not pass gradients through a state"
    return loop_unsupported(facts)


def _recurrent_unsupported(facts: RecurrenceFacts) -> str | None:
    if facts.tokens < 2:
        return None
    return loop_unsupported(facts)


def _batched_unsupported(facts: RecurrenceFacts) -> str | None:
    return None if facts.tokens else "the call has no tokens"


CAUSAL_SUMS = Operation(
    "causal_sums",
    (
        Kernel("chunked", chunked_sums, _chunked_unsupported),
        Kernel("fla", fla.fla_causal_sums, fla.fla_unsupported, nondeterministic=optional_nondeterministic),
        Kernel("recurrent", _recurrent, _recurrent_unsupported),
        Kernel("batched", _batched, _batched_unsupported),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def causal_sum_facts(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor | None
) -> RecurrenceFacts:
    """What decides the kernel of these sums."""
    inputs = (q, k, v, log_decay, state)
    return RecurrenceFacts(
        q.shape[2],
        torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs),
        state is not None,
        device_type(q),
        v.dtype,
        q.shape[3],
        layout.call_segment_ids is not None,
        layout.cu_seqlens is not None,
        log_decay is not None and fla.is_per_token(log_decay, layout),
    )


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, H, T, d_k], v [B, H, T, d_v], log γ [H] (None: 0), state [B, H, d_k, d_v] (None: zero) -> y, new state.

    y [B, H, T, d_v] is in at least float32. The new state is None if `state` is None. k must be zero at padding.
    """
    add_flops(causal_sums_flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3])))
    kernel = CAUSAL_SUMS.choose(causal_sum_facts(q, k, v, log_decay, layout, state))
    with without_autocast(q):
        y, new_state = kernel.run(q, k, v, log_decay, layout, zero_state(q, v.shape[3]) if state is None else state)
    return y, None if state is None else new_state


def divide_by_weights(weighted_sums: Tensor) -> Tensor:
    """Divide sums [..., d_v + 1] by their last column, the sum of the weights -> means [..., d_v]."""
    return safe_quotient(weighted_sums[..., :-1], weighted_sums[..., -1:])


def append_ones(v: Tensor) -> Tensor:
    """v [..., d_v] -> [..., d_v + 1] in its dtype. The column of ones sums the weights."""
    return functional.pad(v, (0, 1), value=1.0)


def _means_of_sums(
    q: Tensor, k: Tensor, v: Tensor, layout: CallLayout, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    sums, new_state = causal_sums(q, k, append_ones(v), None, layout, state)
    return divide_by_weights(sums), new_state


def _chunked_means(q: Tensor, k: Tensor, v: Tensor, layout: CallLayout, state: Tensor | None) -> tuple[Tensor, Tensor]:
    add_flops(causal_sums_flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3] + 1)))
    with without_autocast(q):
        return chunked_sums(q, k, v, None, layout, zero_state(q, v.shape[3] + 1) if state is None else state)


def _quotient_unsupported(facts: RecurrenceFacts) -> str | None:
    return "chunks are divided one by one on a CPU" if facts.device == "cpu" else None


CAUSAL_MEANS = Operation(
    "causal_means",
    (
        Kernel("chunked", _chunked_means, _chunked_unsupported),
        Kernel("quotient", _means_of_sums, _quotient_unsupported),
        Kernel("reference", _means_of_sums, lambda facts: None),
    ),
)


def causal_means(
    q: Tensor, k: Tensor, v: Tensor, layout: CallLayout, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """q, k ≥ 0 [B, H, T, d_k], v [B, H, T, d_v], state [B, H, d_k, d_v + 1] -> y [B, H, T, d_v], new state.

    The last column of a state is z. There is no decay. Everything else is as in `causal_sums`.
    """
    y, new_state = CAUSAL_MEANS.choose(causal_sum_facts(q, k, v, None, layout, state)).run(q, k, v, layout, state)
    return y, None if state is None else new_state
