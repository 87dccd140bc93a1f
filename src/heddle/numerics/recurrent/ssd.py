"""The state space duality of Mamba-2 (Dao & Gu 2024): sums with a data-dependent decay, one state per head.

    S_t = α_t S_{t−1} + Δ_t k_t v_tᵀ,   y_t = S_tᵀ q_t + D v_t,   S [d_k, d_v]

q, k and v are the paper's C, B and x, D is its skip connection. Chunked (the paper's block decomposition), with
D_ij = α_{j+1} ⋯ α_i for j ≤ i, d_i the decay from the chunk's start to token i, and X = Δ ⊙ V:

    Y = (Q Kᵀ ⊙ D) X + d ⊙ (Q S),   S' = d_last S + Kᵀ (X ⊙ D_last)

Only S' is computed chunk by chunk; the rest is one product over all chunks. Everything is in at least float32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch import Operation, add_flops
from heddle.numerics.norms import without_autocast
from heddle.numerics.recurrent import fla
from heddle.numerics.recurrent.batched_chunks import batched_sums, head_decays, split_chunks
from heddle.numerics.recurrent.causal_sums import causal_sums_flops
from heddle.numerics.recurrent.recurrence import (
    RecurrenceFacts,
    RecurrenceInputs,
    RecurrenceKernels,
    recurrence_operation,
    run_operator,
    run_recurrence,
)

CHUNK_TOKENS = 64  # a longer chunk costs more arithmetic for pairs, a shorter one a longer recurrence


class SSDInputs(NamedTuple):
    """Inputs of the operation: q, k [B, G, T, d_k], v [B, H, T, d_v], skip (D) [H].

    log_decay (log α, finite, ≤ 0) and time_step (Δ) [B, H, T, 1]. Head h reads queries and keys of group h // (H/G). A
    token with log_decay of 0 and k or v of 0 leaves the state unchanged.
    call_segment_ids: int64 [B, T], each token's document; 0 continues the state's document. None: all are 0.
    cu_seqlens: where documents end, for libraries (`fla.CuSeqlens`). dtype: of the projections (None: v's).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    time_step: Tensor
    skip: Tensor
    call_segment_ids: Tensor | None = None
    cu_seqlens: fla.CuSeqlens | None = None
    dtype: torch.dtype | None = None


def reference(inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: state S [B, H, d_k, d_v] -> (S_tᵀ q_t [B, H, T, d_v], the state after the last token)."""
    q, k = (x.repeat_interleave(inputs.v.shape[1] // x.shape[1], dim=1) for x in (inputs.q, inputs.k))
    weighted = inputs.v * inputs.time_step
    tokens = (x.unsqueeze(3).unbind(2) for x in (q, k, weighted, inputs.log_decay.exp()))
    out, segment_ids = [inputs.v[:, :, :0]], inputs.v.new_zeros(inputs.v.shape[0], dtype=torch.int64)
    for t, (query, key, value, decay) in enumerate(zip(*tokens, strict=True)):
        if inputs.call_segment_ids is not None:
            state = state.masked_fill((inputs.call_segment_ids[:, t] != segment_ids)[:, None, None, None], 0.0)
            segment_ids = inputs.call_segment_ids[:, t]
        state = state * decay.mT + key.mT @ value  # a number, or one for each row
        out.append(query @ state)
    return torch.cat(out, dim=2), state


def _step(inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token without gradients. The state is updated in place."""
    batch, heads, d_k, d_v = state.shape
    groups = inputs.k.shape[1]
    decay = inputs.log_decay.exp()
    if inputs.call_segment_ids is not None:  # a new document starts from a zero state
        decay = decay.masked_fill(inputs.call_segment_ids[:, None, :, None] > 0, 0.0)
    by_group = state.mul_(decay).view(batch, groups, -1, d_k, d_v)
    weighted = (inputs.v * inputs.time_step).reshape(batch, groups, -1, 1, d_v)
    by_group.addcmul_(inputs.k.reshape(batch, groups, 1, d_k, 1), weighted)
    return (inputs.q.reshape(batch, groups, 1, 1, d_k) @ by_group).view(batch, heads, 1, d_v), state


def _chunked(inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """All chunks at once, then the recurrence over chunks. Shapes are [B, G, H/G, chunks, tokens, ...]."""
    groups, length = inputs.k.shape[1], inputs.v.shape[2]
    chunks = -(-length // CHUNK_TOKENS)
    weighted = inputs.v * inputs.time_step
    q, k, v = (split_chunks(x, groups, chunks) for x in (inputs.q, inputs.k, weighted))
    pair_decay, decay = head_decays(split_chunks(inputs.log_decay, groups, chunks), inputs.call_segment_ids)
    within_chunk = ((q @ k.mT) * pair_decay) @ v
    added = k.mT @ (v * decay.to_end)
    states = [state.unflatten(1, (groups, -1))]
    for addition, decay_factor in zip(added.unbind(3), decay.whole_chunk.unbind(3), strict=True):
        states.append(torch.addcmul(addition, states[-1], decay_factor))
    states_before = torch.stack(states[:-1], dim=3)
    y = torch.addcmul(within_chunk, q @ states_before, decay.from_start)
    return y.flatten(3, 4).flatten(1, 2)[:, :, :length], states[-1].flatten(1, 2)


def _batched(inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    weighted = inputs.v * inputs.time_step
    return batched_sums(inputs.q, inputs.k, weighted, inputs.log_decay, inputs.call_segment_ids, state)


def _native(inputs: SSDInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    tensors = (inputs.q, inputs.k, inputs.v * inputs.time_step, inputs.log_decay)
    return run_operator("ssd", tensors, None, inputs.call_segment_ids, state)


SSD = recurrence_operation("ssd", RecurrenceKernels(_step, _chunked, fla.fla_ssd, _batched, reference, _native))


def state_space_duality(inputs: SSDInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `run_with_skip`."""
    return run_with_skip(SSD, inputs, inputs.skip, state)


def run_with_skip(
    operation: Operation[RecurrenceFacts], inputs: RecurrenceInputs, skip: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """state S [B, H, d_k, d_v] -> (y [B, H, T, d_v], the state after the last token). May update the state in place.

    Without a state the recurrence starts from zeros. skip (D): [H].
    """
    (batch, heads, tokens, d_v), d_k = inputs.v.shape, inputs.k.shape[3]
    add_flops(causal_sums_flops(tokens, batch, heads, (d_k, d_v)))
    y, new_state = run_recurrence(operation, inputs, state)
    with without_autocast(y):
        return torch.addcmul(y, inputs.v, skip[:, None, None]), new_state
