"""The generalized delta rule: a token removes from the state and adds to it with separate vectors.

    S_t = (I − b_t c_tᵀ) Diag(α_t) S_{t−1} + k_t v_tᵀ,   o_t = S_tᵀ q_t,   S [d_k, d_v]

The transition is diagonal plus low rank (RWKV-7, Peng et al. 2025); `gated_delta` is the case b = β k, c = k. Chunked,
with D_ij = α_{j+1} ⋯ α_i for each channel, d_i the decay from the chunk's start to token i, and X Yᵀ ⊙ D standing for
Σ_c x_ic y_jc D_ijc:

    N = −(I + tril(C Bᵀ ⊙ D, −1))⁻¹ ((d ⊙ C) S + tril(C Kᵀ ⊙ D, −1) V)
    O = (d ⊙ Q) S + (Q Bᵀ ⊙ D) N + (Q Kᵀ ⊙ D) V,   S' = d_last S + (B ⊙ D_last)ᵀ N + (K ⊙ D_last)ᵀ V

Everything is in at least float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.dispatch import add_flops
from heddle.numerics.recurrent import batched_chunks
from heddle.numerics.recurrent.batched_chunks import (
    ChunkDecays,
    channel_decays,
    from_chunks,
    scan_transitions,
    split_chunks,
    to_chunks,
)
from heddle.numerics.recurrent.gated_delta import CHUNK_TOKENS, TriangularSolve, inverse_by_blocks
from heddle.numerics.recurrent.recurrence import RecurrenceKernels, recurrence_operation, run_recurrence


class GeneralDeltaInputs(NamedTuple):
    """Inputs of the rule: q, k, b, c and log_decay (log α, finite, ≤ 0) [B, H, T, d_k], v [B, H, T, d_v].

    A token with b, k and log_decay of 0 leaves the state unchanged.
    call_segment_ids: int64 [B, T], each token's document; 0 continues the state's document. None: all are 0.
    cu_seqlens: not read. dtype: of the projections (None: v's).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    b: Tensor
    c: Tensor
    log_decay: Tensor
    call_segment_ids: Tensor | None = None
    cu_seqlens: None = None
    dtype: torch.dtype | None = None


def general_delta_flops(tokens: int, heads: int, d_k: int, d_v: int) -> int:
    """FLOPs of the recurrence: read with c, remove along b, write along k, read with the query."""
    return 8 * tokens * heads * d_k * d_v


def reference(inputs: GeneralDeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: state S [B, H, d_k, d_v] -> (o [B, H, T, d_v], the state after the last token)."""
    tokens = (x.unsqueeze(3).unbind(2) for x in (*inputs[:5], inputs.log_decay.exp()))
    out, segment_ids = [inputs.v[:, :, :0]], inputs.v.new_zeros(inputs.v.shape[0], dtype=torch.int64)
    for t, (query, key, value, removal, read, decay) in enumerate(zip(*tokens, strict=True)):
        if inputs.call_segment_ids is not None:
            state = state.masked_fill((inputs.call_segment_ids[:, t] != segment_ids)[:, None, None, None], 0.0)
            segment_ids = inputs.call_segment_ids[:, t]
        state = state * decay.mT
        state = state - removal.mT @ (read @ state) + key.mT @ value
        out.append(query @ state)
    return torch.cat(out, dim=2), state


def _step(inputs: GeneralDeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token without gradients. The state is updated in place."""
    decay = inputs.log_decay.exp().mT
    if inputs.call_segment_ids is not None:  # a new document starts from a zero state
        decay = decay.masked_fill(inputs.call_segment_ids[:, None, :, None] > 0, 0.0)
    state.mul_(decay)
    written = torch.cat((inputs.c @ state, inputs.v), dim=2)
    state.add_(torch.cat((-inputs.b, inputs.k), dim=2).mT @ written)
    return inputs.q @ state, state


class _Chunks(NamedTuple):
    """What all chunks compute at once, [B, H, 1, chunks, tokens, …].

    q_to_b, q_to_k: Q Bᵀ ⊙ D and Q Kᵀ ⊙ D. q: d ⊙ Q. v: V. added, read: N is `added` − `read` S. b, k: B ⊙ D_last and
    K ⊙ D_last. decay: the chunk's decays.
    """

    q_to_b: Tensor
    q_to_k: Tensor
    q: Tensor
    v: Tensor
    added: Tensor
    read: Tensor
    b: Tensor
    k: Tensor
    decay: ChunkDecays


def _solved(
    split: tuple[Tensor, ...], pairs: Tensor, decay: ChunkDecays, invert: Callable[[Tensor], Tensor]
) -> _Chunks:
    """From q, k, v, b and c of each chunk and the pairs of (b, k) with (q, c) [2, 2, …, C, C]."""
    q, k, v, b, c = split
    (q_to_b, c_to_b), (q_to_k, c_to_k) = (keys.unbind() for keys in pairs.unbind())
    right_hand_side = torch.cat((-(c_to_k.tril(-1) @ v), c * decay.from_start), dim=-1)
    solution: Tensor = TriangularSolve.apply(c_to_b, right_hand_side, invert)
    added, read = solution.split((v.shape[-1], c.shape[-1]), dim=-1)
    return _Chunks(q_to_b, q_to_k, q * decay.from_start, v, added, read, b * decay.to_end, k * decay.to_end, decay)


def _outputs(chunks: _Chunks, before: Tensor, length: int) -> Tensor:
    """The outputs of all tokens, from the state before each chunk."""
    removed = chunks.added - chunks.read @ before
    return from_chunks(chunks.q @ before + chunks.q_to_b @ removed + chunks.q_to_k @ chunks.v, length)


def _chunked(inputs: GeneralDeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Solve all chunks at once, then run the recurrence over chunks."""
    heads, length = inputs.v.shape[1:3]
    count = -(-length // CHUNK_TOKENS)
    *split, log_decay = (split_chunks(x, heads, count) for x in inputs[:6])
    q, k, _, b, c = split
    pairs, decay = channel_decays(torch.stack((q, c)), torch.stack((b, k))[:, None], log_decay, inputs.call_segment_ids)
    chunks = _solved(tuple(split), pairs, decay, inverse_by_blocks)
    keys, states = torch.cat((chunks.b, chunks.k), dim=-2).mT, [state.flatten(0, 1)]
    steps = (x.flatten(0, 2).unbind(1) for x in (chunks.added, chunks.read, chunks.v, keys, decay.whole_chunk))
    for added, read, v, key, whole in zip(*steps, strict=True):
        removed = torch.baddbmm(added, read, states[-1], alpha=-1)
        states.append(torch.baddbmm(states[-1] * whole, key, torch.cat((removed, v), dim=-2)))
    before = torch.stack(states[:-1], dim=1).unflatten(0, chunks.v.shape[:3])
    return _outputs(chunks, before, length), states[-1].view(state.shape)


def _batched(inputs: GeneralDeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `_chunked`, but a scan gives the states: S' = (d_last − B̃ᵀ R) S + B̃ᵀ A + K̃ᵀ V, for N = A − R S."""
    heads, length = inputs.v.shape[1:3]
    *split, log_decay = (to_chunks(x, heads, min(batched_chunks.CHUNK_TOKENS, length)) for x in inputs[:6])
    q, k, v, b, c = split
    rows = torch.stack((q, c, b, k))
    pairs, decay = batched_chunks.channel_pairs(rows, rows[2:, None], log_decay, inputs.call_segment_ids)
    chunks = _solved(tuple(split), pairs, decay, batched_chunks.unit_triangular_inverse)
    erased, added = (chunks.b.mT @ torch.cat((chunks.read, chunks.added), dim=-1)).split(
        (k.shape[-1], v.shape[-1]), dim=-1
    )
    unchanged = torch.eye(k.shape[-1], dtype=state.dtype, device=state.device)
    transitions, added = unchanged * decay.whole_chunk - erased, added + chunks.k.mT @ v
    before, last = scan_transitions(transitions.flatten(0, 2), added.flatten(0, 2), state.flatten(0, 1))
    return _outputs(chunks, before.unflatten(0, v.shape[:3]), length), last.view(state.shape)


GENERAL_DELTA = recurrence_operation("general_delta", RecurrenceKernels(_step, _chunked, None, _batched, reference))


def general_delta_rule(inputs: GeneralDeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """state S [B, H, d_k, d_v] -> (o [B, H, T, d_v], the state after the last token). May update the state in place.

    Without a state the recurrence starts from zeros.
    """
    (batch, heads, tokens, d_v), d_k = inputs.v.shape, inputs.k.shape[3]
    add_flops(general_delta_flops(batch * tokens, heads, d_k, d_v))
    return run_recurrence(GENERAL_DELTA, inputs, state)
