"""Causal sums in chunks: all pairs of tokens within a chunk, and one state matrix from chunk to chunk.

    Y = (Q Kᵀ ⊙ D) V + A Q S,   S ← g S + (B K)ᵀ V,   D_ij = γ^{n_i − n_j} for j ≤ i in one document, else 0

A few chunks are computed at a time, so that intermediate results fit a CPU cache. The backward pass recomputes them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.norms import at_least_float32, without_autocast

CHUNK_TOKENS = 64  # tokens per chunk: about d_k and d_v, so that pairs and sums cost about the same
MAX_PAIRS = 2**18  # weights of token pairs that exist at one time: 1 MB in float32, which fit a CPU cache


class CallLayout(NamedTuple):
    """Padding and documents of the tokens of a call.

    cumulative_tokens: int64 [B, T], number of tokens up to and including this one, without padding. None: no padding.
    call_segment_ids: int64 [B, T], each token's document; 0 continues the state's document. None: all are 0.
    cu_seqlens: where documents end, for libraries (`fla.CuSeqlens`). None: not known to the host.
    """

    cumulative_tokens: Tensor | None = None
    call_segment_ids: Tensor | None = None
    cu_seqlens: tuple[Tensor, Tensor] | None = None


class DecayWeights(NamedTuple):
    """Weights of keys and states in g chunks of C tokens. None means a weight of 1.

    within_chunk [B|1, H|1, g|1, C, C]: of each key for each query of its chunk.
    from_state [.., C, 1]: of the state before a chunk for each of its queries.
    into_state [.., C, 1]: of each key for the state after its chunk.
    state_decay [.., 1, 1]: of the state before a chunk for the state after it.
    """

    within_chunk: Tensor
    from_state: Tensor | None
    into_state: Tensor | None
    state_decay: Tensor | None


def token_log_decays(log_decay: Tensor, layout: CallLayout, length: int) -> Tensor:
    """log γ [H] for each token, zero at padding, [B|1, H, T, 1]."""
    rates = log_decay[None, :, None, None]
    if layout.cumulative_tokens is None:
        return rates.expand(-1, -1, length, -1)
    is_token = layout.cumulative_tokens.diff(dim=1, prepend=torch.zeros_like(layout.cumulative_tokens[:, :1]))
    return rates * is_token[:, None, :, None]


def _token_counts(layout: CallLayout, span: slice, chunk_tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Number of tokens in a chunk up to each token [B|1, 1, g|1, C], and in each whole chunk [B|1, 1, g|1]."""
    if layout.cumulative_tokens is None:
        within_chunk = torch.arange(1, chunk_tokens + 1, dtype=like.dtype, device=like.device)[None, None, None]
    else:
        cumulative = layout.cumulative_tokens[:, span].unflatten(1, (-1, chunk_tokens))
        before_chunk = _value_before_chunk(layout.cumulative_tokens, cumulative, span)
        within_chunk = (cumulative - before_chunk[..., None])[:, None].to(like.dtype)
    return within_chunk, within_chunk[..., -1]


def _value_before_chunk(values: Tensor, chunks: Tensor, span: slice) -> Tensor:
    """`values` [B, T] of the token before each chunk of a span, [B, g]. It is 0 before the first token of the call."""
    first = torch.zeros_like(values[:, :1]) if span.start == 0 else values[:, span.start - 1 : span.start]
    return torch.cat((first, chunks[:, :-1, -1]), dim=1)


def decay_weights(
    layout: CallLayout, span: slice, chunk_tokens: int, log_decay: Tensor | None, like: Tensor
) -> DecayWeights:
    """The weights of the chunks in `span`, differentiable in log γ [H]. They have the dtype and device of `like`."""
    visible = torch.ones(chunk_tokens, chunk_tokens, dtype=torch.bool, device=like.device).tril()[None, None, None]
    from_state = into_state = state_decay = None
    if layout.call_segment_ids is not None:
        segment_ids = layout.call_segment_ids[:, span].unflatten(1, (-1, chunk_tokens))
        previous_segment_ids = _value_before_chunk(layout.call_segment_ids, segment_ids, span)
        visible = visible & (segment_ids[..., :, None] == segment_ids[..., None, :])[:, None]
        from_state = (segment_ids == previous_segment_ids[..., None])[:, None, ..., None].to(like.dtype)
        into_state = (segment_ids == segment_ids[..., -1:])[:, None, ..., None].to(like.dtype)
        state_decay = from_state[..., -1:, :]
    within_chunk = visible.to(like.dtype)
    if log_decay is not None:
        counts, chunk_counts = _token_counts(layout, span, chunk_tokens, like)
        rate = log_decay[:, None, None]
        distance = (counts[..., :, None] - counts[..., None, :]).clamp(min=0)
        within_chunk = within_chunk * (distance * rate[..., None]).exp()
        from_state = scale_by((counts * rate).exp()[..., None], from_state)
        into_state = scale_by(((chunk_counts[..., None] - counts) * rate).exp()[..., None], into_state)
        state_decay = scale_by((chunk_counts[..., None] * rate).exp()[..., None], state_decay)
    return DecayWeights(within_chunk, from_state, into_state, state_decay)


def scale_by(x: Tensor, weight: Tensor | None) -> Tensor:
    """x times a weight, where None is a weight of 1."""
    return x if weight is None else x * weight


def chunk_weight(weight: Tensor | None, index: int) -> Tensor | None:
    """The weight of one chunk, from weights of all chunks [.., g|1, ..]."""
    return None if weight is None else weight[:, :, index if weight.shape[2] > 1 else 0]


def safe_reciprocal(x: Tensor) -> Tensor:
    """1 / x for x ≥ 0, and 0 where x is too small to divide by."""
    too_small = x <= torch.finfo(x.dtype).tiny
    return x.masked_fill(too_small, 1.0).reciprocal().masked_fill(too_small, 0.0)


def safe_quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator for denominators ≥ 0, and 0 where they are too small to divide by.

    Autograd of a division divides twice; of a product with the reciprocal it would square the reciprocal, which
    overflows for denominators below 1e-19 in float32.
    """
    too_small = denominator <= torch.finfo(denominator.dtype).tiny
    return (numerator / denominator.masked_fill(too_small, 1.0)).masked_fill(too_small, 0.0)


def chunked_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, d_v] and the state after the last token. No gradient flows through the state.

    If the state is one column wider than v, [B, H, d_k, d_v + 1], the last column sums the keys, and y is divided by
    `q·Σ k`.
    """
    y, new_state = _ChunkedSums.apply(q, k, v, log_decay, layout, state)
    return y, new_state


def _chunk_groups(length: int, rows: int) -> Iterator[tuple[slice, int]]:
    """Yield (tokens, chunk size) for each group of whole chunks. The remaining tokens form a last chunk."""
    chunk_tokens = min(CHUNK_TOKENS, length)
    group_tokens = chunk_tokens * max(1, MAX_PAIRS // max(1, rows * chunk_tokens * chunk_tokens))
    aligned = length // chunk_tokens * chunk_tokens
    for start in range(0, aligned, group_tokens):
        yield slice(start, min(start + group_tokens, aligned)), chunk_tokens
    if aligned < length:
        yield slice(aligned, length), length - aligned


def _split_chunks(x: Tensor, span: slice, chunk_tokens: int) -> Tensor:
    """[B, H, T, d] -> the chunks of the tokens in `span`, [B, H, g, C, d], in at least float32."""
    chunks: Tensor = at_least_float32(x[:, :, span]).unflatten(2, (-1, chunk_tokens))
    return chunks.contiguous()


def _states_before_chunks(
    added: Tensor, state: Tensor, state_decay: Tensor | None, order: range
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over `added` [B, H, g, d_k, d_v]: the state before each chunk, and the one after the last."""
    states = torch.empty_like(added)
    for chunk in order:
        states[:, :, chunk] = state
        state = scale_by(state, chunk_weight(state_decay, chunk)) + added[:, :, chunk]
    return states, state


class _ChunkedSums(torch.autograd.Function):
    """Saves q, k, v and the state before each chunk. The backward pass recomputes the weights of pairs.

        dA = dY Vᵀ ⊙ D,  dQ = dA K + A dY Sᵀ,  dK = dAᵀ Q + B V dS'ᵀ,  dV = (Q Kᵀ ⊙ D)ᵀ dY + B K dS'
        dS = g dS' + (A Q)ᵀ dY,   d log γ = Σ_i n_i (q_i·dq_i − k_i·dk_i) + Σ_chunks n ⟨S', dS'⟩

    S is the state before a chunk and S' the state after it. n counts tokens from the start of the chunk, which avoids
    cancellation in d log γ. The state after the last token has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, layout: CallLayout, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch, heads, length, _ = q.shape
        # The memory layout is [B, T, H, d], the order in which the output projection reads it.
        out = state.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
        # 1 / Σ q·k, if y is divided by the sum of the weights.
        reciprocal = state.new_empty(batch, heads, length, 1) if state.shape[3] > v.shape[3] else None
        states = []
        for span, chunk_tokens in _chunk_groups(length, batch * heads):
            chunk_q, chunk_k, chunk_v = (_split_chunks(x, span, chunk_tokens) for x in (q, k, v))
            chunk_v = functional.pad(chunk_v, (0, state.shape[3] - v.shape[3]), value=1.0)
            decay = decay_weights(layout, span, chunk_tokens, log_decay, state)
            y = (chunk_q @ chunk_k.mT).mul_(decay.within_chunk) @ chunk_v
            added = scale_by(chunk_k, decay.into_state).mT @ chunk_v
            states_before, state = _states_before_chunks(added, state, decay.state_decay, range(added.shape[2]))
            y = y.add_(scale_by(chunk_q, decay.from_state) @ states_before).flatten(2, 3)
            if reciprocal is not None:
                reciprocal[:, :, span] = safe_reciprocal(y[..., -1:])
                y = y[..., :-1] * reciprocal[:, :, span]
            out[:, :, span] = y
            if any(ctx.needs_input_grad):
                states.append(states_before)
        ctx.save_for_backward(q, k, v, log_decay, reciprocal, None if reciprocal is None else out, *states)
        ctx.layout = layout
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradients[0]):
            return _gradients(ctx, gradients[0])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs of `_ChunkedSums.apply`, computed from the last group of chunks to the first."""
    q, k, v, log_decay, reciprocal, y, *states = ctx.saved_tensors
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    grad_log_decay = torch.zeros_like(log_decay) if ctx.needs_input_grad[3] else None
    grad_state = torch.zeros_like(states[0][:, :, 0])
    spans = list(_chunk_groups(q.shape[2], q.shape[0] * q.shape[1]))
    for (span, chunk_tokens), states_before in zip(reversed(spans), reversed(states), strict=True):
        chunk_q, chunk_k, chunk_v, chunk_grad = (_split_chunks(x, span, chunk_tokens) for x in (q, k, v, gradient))
        if reciprocal is not None:  # the gradients of the quotient's numerator and denominator
            chunk_v = functional.pad(chunk_v, (0, 1), value=1.0)
            chunk_grad = chunk_grad * _split_chunks(reciprocal, span, chunk_tokens)
            grad_denominator = -(chunk_grad * _split_chunks(y, span, chunk_tokens)).sum(-1, keepdim=True)
            chunk_grad = torch.cat((chunk_grad, grad_denominator), dim=-1)
        decay = decay_weights(ctx.layout, span, chunk_tokens, log_decay, grad_state)
        added = scale_by(chunk_q, decay.from_state).mT @ chunk_grad
        grad_states_after, grad_state = _states_before_chunks(
            added, grad_state, decay.state_decay, range(added.shape[2] - 1, -1, -1)
        )
        pairs = (chunk_grad @ chunk_v.mT).mul_(decay.within_chunk)
        chunk_grad_q = (pairs @ chunk_k).add_(scale_by(chunk_grad @ states_before.mT, decay.from_state))
        chunk_grad_k = (pairs.mT @ chunk_q).add_(scale_by(chunk_v @ grad_states_after.mT, decay.into_state))
        pairs = (chunk_q @ chunk_k.mT).mul_(decay.within_chunk)
        decayed_k = scale_by(chunk_k, decay.into_state)
        chunk_grad_v = (pairs.mT @ chunk_grad).add_(decayed_k @ grad_states_after)
        for target, chunk_gradient in ((grad_q, chunk_grad_q), (grad_k, chunk_grad_k), (grad_v, chunk_grad_v)):
            target[:, :, span] = chunk_gradient[..., : target.shape[3]].flatten(2, 3)
        if grad_log_decay is not None:
            counts, chunk_counts = _token_counts(ctx.layout, span, chunk_tokens, grad_state)
            states_after = scale_by(states_before, decay.state_decay) + decayed_k.mT @ chunk_v
            per_token = (chunk_q * chunk_grad_q - chunk_k * chunk_grad_k).sum(-1) * counts
            per_chunk = (states_after * grad_states_after).sum((-1, -2)) * chunk_counts
            grad_log_decay += per_token.sum((0, 2, 3)) + per_chunk.sum((0, 2))
    return grad_q, grad_k, grad_v, grad_log_decay, None, None
