"""The gated delta rule, with one state matrix per head.

    S_t = (I − β_t k_t r_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t,   S [d_k, d_v]

The key r_t that reads the state is k_t, which writes it, unless it is given. α_t is one number per head ("Gated Delta
Networks", Yang et al. 2024) or one per channel of the key (Kimi Delta Attention, Kimi Team 2025). Chunked (the authors'
WY representation), with D_ij = α_{j+1} ⋯ α_i and d_i the decay from the chunk's start to token i:

    [U ; W] = (I + tril(β R Kᵀ ⊙ D, −1))⁻¹ β [V ; d ⊙ R],   N = U − W S,   K̃ = K ⊙ D_last
    O = (d ⊙ Q) S + (Q Kᵀ ⊙ D) N,   S' = d_last S + K̃ᵀ N

Q Kᵀ ⊙ D stands for Σ_c q_ic k_jc D_ijc where α is per channel. Only N and S' are computed chunk by chunk; the rest is
one product over all chunks. Everything is in at least float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch import add_flops
from heddle.numerics.norms import at_least_float32
from heddle.numerics.recurrent import batched_chunks, fla
from heddle.numerics.recurrent.batched_chunks import (
    ChunkDecays,
    channel_decays,
    from_chunks,
    head_decays,
    scan_transitions,
    split_chunks,
    to_chunks,
)
from heddle.numerics.recurrent.recurrence import RecurrenceKernels, recurrence_operation, run_operator, run_recurrence

CHUNK_TOKENS = 32  # a longer chunk costs more arithmetic for pairs, a shorter one a longer recurrence
EPS = 1e-6  # added inside the square root when keys and queries are normalized, as in Qwen3-Next and the authors' code


class DeltaInputs(NamedTuple):
    """Inputs of the rule: q, k [B, G, T, d_k], v [B, H, T, d_v] and beta [B, H, T].

    log_decay: log α, finite, ≤ 0, [B, H, T, 1] or per channel [B, H, T, d_k]. Head h reads keys and queries of group
    h // (H/G). A token with beta and log_decay of 0 leaves the state unchanged.
    call_segment_ids: int64 [B, T], each token's document; 0 continues the state's document. None: all are 0.
    cu_seqlens: where documents end, for libraries (`fla.CuSeqlens`). dtype: of the projections (None: v's).
    read: the key that reads the state, as k (None: k).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    call_segment_ids: Tensor | None = None
    cu_seqlens: fla.CuSeqlens | None = None
    dtype: torch.dtype | None = None
    read: Tensor | None = None

    @property
    def reading_key(self) -> Tensor:
        """`read`, or k without it."""
        return self.k if self.read is None else self.read


def delta_rule_flops(tokens: int, heads: int, d_k: int, d_v: int) -> int:
    """FLOPs of the recurrence: read with the key, write, read with the query."""
    return 6 * tokens * heads * d_k * d_v


def l2_normalize(x: Tensor) -> Tensor:
    """x [..., d] divided by its L2 norm, in at least float32. Zero stays zero."""
    wide = at_least_float32(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def reference(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: state S [B, H, d_k, d_v] -> (o [B, H, T, d_v], the state after the last token)."""
    repeats = inputs.v.shape[1] // inputs.k.shape[1]
    keys = (x.repeat_interleave(repeats, dim=1) for x in (inputs.q, inputs.reading_key, inputs.k))
    tokens = (x.unsqueeze(3).unbind(2) for x in (*keys, inputs.v, inputs.log_decay.exp(), inputs.beta[..., None]))
    out, segment_ids = [inputs.v[:, :, :0]], inputs.v.new_zeros(inputs.v.shape[0], dtype=torch.int64)
    for t, (query, read, key, value, decay, beta) in enumerate(zip(*tokens, strict=True)):
        if inputs.call_segment_ids is not None:
            state = state.masked_fill((inputs.call_segment_ids[:, t] != segment_ids)[:, None, None, None], 0.0)
            segment_ids = inputs.call_segment_ids[:, t]
        state = state * decay.mT
        state = state + key.mT @ ((value - read @ state) * beta)
        out.append(query @ state)
    return torch.cat(out, dim=2), state


def _step(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token without gradients. The state is updated in place."""
    batch, heads, d_k, d_v = state.shape
    keys = (inputs.q, inputs.reading_key, inputs.k)
    q, read, k = (x.expand(batch, x.shape[1], heads // x.shape[1], d_k).reshape(-1, 1, d_k) for x in keys)
    decay = inputs.log_decay.exp().mT
    if inputs.call_segment_ids is not None:  # a new document starts from a zero state
        decay = decay.masked_fill(inputs.call_segment_ids[:, None, :, None] > 0, 0.0)
    flat_state = state.mul_(decay).view(-1, d_k, d_v)
    written = torch.baddbmm(inputs.v.flatten(0, 1), read, flat_state, alpha=-1).mul_(inputs.beta.reshape(-1, 1, 1))
    flat_state.baddbmm_(k.mT, written)
    return torch.bmm(q, flat_state).view(batch, heads, 1, d_v), state


def _chunked(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Solve all chunks at once, then run the recurrence over chunks. Shapes are [B, G, H/G, chunks, tokens, ...]."""
    groups, length, d_v = inputs.k.shape[1], *inputs.v.shape[2:]
    chunks = -(-length // CHUNK_TOKENS)
    q, k, v = (split_chunks(x, groups, chunks) for x in (inputs.q, inputs.k, inputs.v))
    log_decay, beta = (split_chunks(x, groups, chunks) for x in (inputs.log_decay, inputs.beta[..., None]))
    read = k if inputs.read is None else split_chunks(inputs.read, groups, chunks)
    query_pairs, key_pairs, decay = _decayed_pairs((q, read), k, log_decay, inputs.call_segment_ids)
    right_hand_side = torch.cat((v * beta, read * (decay.from_start * beta)), dim=-1)
    solution: Tensor = TriangularSolve.apply(key_pairs * beta, right_hand_side, inverse_by_blocks)
    written, states = [], [state.flatten(0, 1)]
    per_chunk = (solution[..., :d_v], solution[..., d_v:], (k * decay.to_end).mT, decay.whole_chunk)
    steps = (x.flatten(0, 2).unbind(1) for x in per_chunk)
    for values, state_reads, state_writes, decay_factor in zip(*steps, strict=True):
        written.append(torch.baddbmm(values, state_reads, states[-1], alpha=-1))
        states.append(torch.baddbmm(states[-1] * decay_factor, state_writes, written[-1]))
    states_before, written_values = (torch.stack(x, dim=1).unflatten(0, v.shape[:3]) for x in (states[:-1], written))
    out = (q * decay.from_start) @ states_before + query_pairs @ written_values
    return out.flatten(3, 4).flatten(1, 2)[:, :, :length], states[-1].view(state.shape)


def _batched(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """As `_chunked`, but a scan gives the states: S' = (d_last − K̃ᵀ W) S + K̃ᵀ U. W has the opposite sign."""
    groups, length, d_v = inputs.k.shape[1], *inputs.v.shape[2:]
    tensors = (inputs.q, inputs.k, inputs.v, inputs.log_decay, inputs.beta[..., None])
    q, k, v, log_decay, beta = (to_chunks(x, groups, min(batched_chunks.CHUNK_TOKENS, length)) for x in tensors)
    read = k if inputs.read is None else to_chunks(inputs.read, groups, min(batched_chunks.CHUNK_TOKENS, length))
    rows = torch.stack((q, read))
    if log_decay.shape[-1] == 1:
        pair_decay, decay = head_decays(log_decay, inputs.call_segment_ids)
        pairs = (rows @ k.mT) * pair_decay
    elif inputs.read is None:
        pairs, decay = batched_chunks.channel_pairs(rows, k, log_decay, inputs.call_segment_ids)
    else:
        stacked = torch.stack((q, read, k))
        pairs, decay = batched_chunks.channel_pairs(stacked, stacked[2:, None], log_decay, inputs.call_segment_ids)
        pairs = pairs[0]
    (query_pairs, key_pairs), (q, decayed_read) = pairs.unbind(), (rows * decay.from_start).unbind()
    right_hand_side = torch.cat((v, decayed_read.neg()), dim=-1) * beta
    invert = batched_chunks.unit_triangular_inverse
    solution: Tensor = TriangularSolve.apply(key_pairs * beta, right_hand_side, invert)
    widths = (d_v, k.shape[-1])
    added, erased = ((k * decay.to_end).mT @ solution).split(widths, dim=-1)
    unchanged = torch.eye(k.shape[-1], dtype=state.dtype, device=state.device)
    transitions = torch.addcmul(erased, unchanged, decay.whole_chunk)
    before, last = scan_transitions(transitions.flatten(0, 2), added.flatten(0, 2), state.flatten(0, 1))
    before = before.unflatten(0, v.shape[:3])
    values, state_reads = solution.split(widths, dim=-1)
    out = q @ before + query_pairs @ (values + state_reads @ before)
    return from_chunks(out, length), last.view(state.shape)


def _decayed_pairs(
    rows: tuple[Tensor, Tensor], k: Tensor, log_decay: Tensor, call_segment_ids: Tensor | None
) -> tuple[Tensor, Tensor, ChunkDecays]:
    """Q Kᵀ ⊙ D and R Kᵀ ⊙ D of each chunk [..., C, C], and its other decays. rows: Q and R."""
    if log_decay.shape[-1] == 1:
        pair_decay, decay = head_decays(log_decay, call_segment_ids)
        q, read = rows
        return (q @ k.mT) * pair_decay, (read @ k.mT) * pair_decay, decay
    (query_pairs, key_pairs), decay = channel_decays(torch.stack(rows), k, log_decay, call_segment_ids)
    return query_pairs, key_pairs, decay


class TriangularSolve(torch.autograd.Function):
    """(I + tril(A, −1))⁻¹ B by matrix products only, in half the time of torch's triangular solver on a CPU.

    `invert` computes the inverse from A.
    """

    @staticmethod
    def forward(ctx: Any, system: Tensor, right_hand_side: Tensor, invert: Callable[[Tensor], Tensor]) -> Tensor:
        inverse = invert(system)
        solution = inverse @ right_hand_side
        ctx.save_for_backward(inverse, solution)
        return solution

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inverse, solution = ctx.saved_tensors
        grad_right_hand_side = inverse.mT @ gradients[0]
        return (grad_right_hand_side @ solution.mT).tril(-1).neg_(), grad_right_hand_side, None


def inverse_by_blocks(system: Tensor) -> Tensor:
    """(I + tril(A, −1))⁻¹ of A [..., n, n], by inverting diagonal blocks of size 1, 2, 4, …

    Two adjacent blocks [[X, 0], [A', Y]] have the inverse [[X⁻¹, 0], [−Y⁻¹ A' X⁻¹, Y⁻¹]].
    """
    size = 1 << (system.shape[-1] - 1).bit_length()
    padding = size - system.shape[-1]
    system = functional.pad(system, (0, padding, 0, padding))
    inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand(system.shape).clone()
    half = 1
    while half < size:
        off_diagonal = _diagonal_blocks(system, 2 * half)[..., half:, :half]
        blocks = _diagonal_blocks(inverse, 2 * half)
        blocks[..., half:, :half] = -(blocks[..., half:, half:] @ off_diagonal @ blocks[..., :half, :half])
        half *= 2
    return inverse[..., : size - padding, : size - padding]


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """The square blocks on the diagonal of x [..., n, n], as a view [..., n / size, size, size]."""
    blocks: Tensor = x.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _native(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return run_operator("delta", inputs[:4], inputs.beta, inputs.call_segment_ids, state)


DELTA_RULE = recurrence_operation(
    "delta", RecurrenceKernels(_step, _chunked, fla.fla_delta_rule, _batched, reference, _native)
)


def gated_delta_rule(inputs: DeltaInputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """state S [B, H, d_k, d_v] -> (o [B, H, T, d_v], the state after the last token). May update the state in place.

    Without a state the recurrence starts from zeros.
    """
    (batch, heads, tokens, d_v), d_k = inputs.v.shape, inputs.k.shape[3]
    add_flops(delta_rule_flops(batch * tokens, heads, d_k, d_v))
    return run_recurrence(DELTA_RULE, inputs, state)
