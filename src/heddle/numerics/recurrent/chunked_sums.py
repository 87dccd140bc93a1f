"""Sums over earlier tokens in chunks: pairs of tokens within a chunk, one matrix from chunk to chunk.

    Y = (Q Kᵀ ⊙ D) V + A Q S,   S ← g S + (B K)ᵀ V,   D_ij = γ^{n_i − n_j} for j ≤ i in one document, else 0

Chunks are summed a few at a time, so that what is made between stays in a cache, and the gradient makes it again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.norms import at_least_float32, without_autocast

CHUNK = 64  # tokens whose pairs are weighed at once: d_k and d_v are about as many, so pairs and sums cost alike
SCORES = 2**18  # weights of pairs that exist at one time: 1 MB in float32, which a cache holds


class Places(NamedTuple):
    """Where the tokens of a call stand; each field is None where it would tell nothing.

    arrived: int64 [B, T], real tokens of the call up to this one (None: no padding). segments: int64 [B, T], each
    token's document, 0 that of the state (None: all are of that one).
    """

    arrived: Tensor | None = None
    segments: Tensor | None = None


class Weights(NamedTuple):
    """What counts how much in g chunks of C tokens; None where it is 1.

    inside [B|1, H|1, g|1, C, C]: a key for a query of its chunk. before [.., C, 1]: the state before a chunk for its
    queries. into [.., C, 1]: a key for the state after its chunk. keep [.., 1, 1]: the state before for that after.
    """

    inside: Tensor
    before: Tensor | None
    into: Tensor | None
    keep: Tensor | None


def _counts(places: Places, span: slice, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Real tokens of each chunk up to each token [B|1, 1, g|1, size], and of each whole chunk [B|1, 1, g|1]."""
    if places.arrived is None:
        inside = torch.arange(1, size + 1, dtype=like.dtype, device=like.device)[None, None, None]
    else:
        arrived = places.arrived[:, span].unflatten(1, (-1, size))
        inside = (arrived - _earlier(places.arrived, arrived, span)[..., None])[:, None].to(like.dtype)
    return inside, inside[..., -1]


def _earlier(x: Tensor, chunks: Tensor, span: slice) -> Tensor:
    """What x [B, T] tells of the token before each chunk of a span, [B, g]; 0 before the call."""
    first = torch.zeros_like(x[:, :1]) if span.start == 0 else x[:, span.start - 1 : span.start]
    return torch.cat((first, chunks[:, :-1, -1]), dim=1)


def weights(places: Places, span: slice, size: int, log_decay: Tensor | None, like: Tensor) -> Weights:
    """The weights of the chunks of `size` tokens in `span`, differentiable in log γ [H]; like: their dtype, device."""
    inside = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()[None, None, None]
    before = into = keep = None
    if places.segments is not None:
        segments = places.segments[:, span].unflatten(1, (-1, size))
        earlier = _earlier(places.segments, segments, span)
        inside = inside & (segments[..., :, None] == segments[..., None, :])[:, None]
        before = (segments == earlier[..., None])[:, None, ..., None].to(like.dtype)
        into = (segments == segments[..., -1:])[:, None, ..., None].to(like.dtype)
        keep = before[..., -1:, :]
    weighed = inside.to(like.dtype)
    if log_decay is not None:
        arrived, total = _counts(places, span, size, like)
        rate = log_decay[:, None, None]
        weighed = weighed * ((arrived[..., :, None] - arrived[..., None, :]).clamp(min=0) * rate[..., None]).exp()
        before = times((arrived * rate).exp()[..., None], before)
        into = times(((total[..., None] - arrived) * rate).exp()[..., None], into)
        keep = times((total[..., None] * rate).exp()[..., None], keep)
    return Weights(weighed, before, into, keep)


def times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def of_chunk(weight: Tensor | None, index: int) -> Tensor | None:
    """The weight of one chunk."""
    return None if weight is None else weight[:, :, index if weight.shape[2] > 1 else 0]


def inverse(x: Tensor) -> Tensor:
    """1 / x for x ≥ 0, and 0 where x is too small to divide by."""
    nothing = x <= torch.finfo(x.dtype).tiny
    return x.masked_fill(nothing, 1.0).reciprocal().masked_fill(nothing, 0.0)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
) -> tuple[Tensor, Tensor]:
    """y [B, H, T, d_v] and the state after the last token, through which no gradient passes.

    A state [B, H, d_k, d_v + 1], wider than v, sums the keys in its last column, and y is divided by `q·Σ k`.
    """
    y, after = _Chunks.apply(q, k, v, log_decay, places, state)
    return y, after


def _groups(length: int, rows: int) -> Iterator[tuple[slice, int]]:
    """(tokens, size of a chunk) of each group of whole chunks; what is left is a chunk of its own."""
    size = min(CHUNK, length)
    step = size * max(1, SCORES // max(1, rows * size * size))
    whole = length // size * size
    for start in range(0, whole, step):
        yield slice(start, min(start + step, whole)), size
    if whole < length:
        yield slice(whole, length), length - whole


def _fold(x: Tensor, span: slice, size: int) -> Tensor:
    """[B, H, T, d] -> the chunks of some tokens [B, H, g, size, d], in at least float32."""
    return at_least_float32(x[:, :, span]).unflatten(2, (-1, size)).contiguous()


def _scan(added: Tensor, state: Tensor, keep: Tensor | None, order: range) -> tuple[Tensor, Tensor]:
    """The states before each chunk of `added` [B, H, g, d_k, d_v], in an order, and the one after all of them."""
    found = torch.empty_like(added)
    for chunk in order:
        found[:, :, chunk] = state
        state = times(state, of_chunk(keep, chunk)) + added[:, :, chunk]
    return found, state


class _Chunks(torch.autograd.Function):
    """Keeps q, k, v and the state before each chunk; the gradient makes the weights of pairs again.

        dA = dY Vᵀ ⊙ D,  dQ = dA K + A dY Sᵀ,  dK = dAᵀ Q + B V dS'ᵀ,  dV = (Q Kᵀ ⊙ D)ᵀ dY + B K dS'
        dS = g dS' + (A Q)ᵀ dY,   d log γ = Σ_i n_i (q_i·dq_i − k_i·dk_i) + Σ_chunks n ⟨S', dS'⟩

    S is the state before a chunk, S' the one after; n counts from the start of the chunk, so that hardly anything
    cancels. What comes after the last token has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, heads, length, _ = q.shape
        # Laid out as [B, T, H, d], the order in which the next projection reads it.
        out = state.new_empty(rows, length, heads, v.shape[3]).transpose(1, 2)
        # 1 / Σ q·k, where y is to be divided by it.
        scale = state.new_empty(rows, heads, length, 1) if state.shape[3] > v.shape[3] else None
        befores = []
        for span, size in _groups(length, rows * heads):
            some_q, some_k, some_v = (_fold(x, span, size) for x in (q, k, v))
            some_v = functional.pad(some_v, (0, state.shape[3] - v.shape[3]), value=1.0)
            by = weights(places, span, size, log_decay, state)
            y = (some_q @ some_k.mT).mul_(by.inside) @ some_v
            added = times(some_k, by.into).mT @ some_v
            before, state = _scan(added, state, by.keep, range(added.shape[2]))
            y = y.add_(times(some_q, by.before) @ before).flatten(2, 3)
            if scale is not None:
                scale[:, :, span] = inverse(y[..., -1:])
                y = y[..., :-1] * scale[:, :, span]
            out[:, :, span] = y
            if any(ctx.needs_input_grad):
                befores.append(before)
        ctx.save_for_backward(q, k, v, log_decay, scale, None if scale is None else out, *befores)
        ctx.places = places
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradients[0]):
            return _slopes(ctx, gradients[0])


def _slopes(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of what `_Chunks.apply` takes, from the last group of chunks to the first."""
    q, k, v, log_decay, scale, y, *befores = ctx.saved_tensors
    to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
    to_decay = torch.zeros_like(log_decay) if ctx.needs_input_grad[3] else None
    slope = torch.zeros_like(befores[0][:, :, 0])
    spans = list(_groups(q.shape[2], q.shape[0] * q.shape[1]))
    for (span, size), before in zip(reversed(spans), reversed(befores), strict=True):
        some_q, some_k, some_v, some_g = (_fold(x, span, size) for x in (q, k, v, gradient))
        if scale is not None:  # the gradients of the quotient's two sides
            some_v = functional.pad(some_v, (0, 1), value=1.0)
            some_g = some_g * _fold(scale, span, size)
            some_g = torch.cat((some_g, -(some_g * _fold(y, span, size)).sum(-1, keepdim=True)), dim=-1)
        by = weights(ctx.places, span, size, log_decay, slope)
        added = times(some_q, by.before).mT @ some_g
        after, slope = _scan(added, slope, by.keep, range(added.shape[2] - 1, -1, -1))
        pairs = (some_g @ some_v.mT).mul_(by.inside)
        for_q = (pairs @ some_k).add_(times(some_g @ before.mT, by.before))
        for_k = (pairs.mT @ some_q).add_(times(some_v @ after.mT, by.into))
        pairs = (some_q @ some_k.mT).mul_(by.inside)
        into = times(some_k, by.into)
        for_v = (pairs.mT @ some_g).add_(into @ after)
        for target, found in ((to_q, for_q), (to_k, for_k), (to_v, for_v)):
            target[:, :, span] = found[..., : target.shape[3]].flatten(2, 3)
        if to_decay is not None:
            arrived, total = _counts(ctx.places, span, size, slope)
            held = times(before, by.keep) + into.mT @ some_v
            each = (some_q * for_q - some_k * for_k).sum(-1) * arrived
            whole = (held * after).sum((-1, -2)) * total
            to_decay += each.sum((0, 2, 3)) + whole.sum((0, 2))
    return to_q, to_k, to_v, to_decay, None, None
