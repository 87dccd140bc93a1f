"""Sums over earlier tokens that decay: `S_t = γ S_{t−1} + k_t v_tᵀ`, `y_t = q_tᵀ S_t`, in three equal forms.

    quadratic   y_i = Σ_{j ≤ i} γ^{n_i − n_j} (q_i·k_j) v_j            (Katharopoulos et al. 2020; Sun et al. 2023)
    recurrent   one token after the other
    chunked     Y = (Q Kᵀ ⊙ D) V + A Q S within a chunk, S ← g S + (B K)ᵀ V from chunk to chunk

q, k [B, H, T, d_k], v [B, H, T, d_v] -> y [B, H, T, d_v] and S [B, H, d_k, d_v], in at least float32. n counts real
tokens: padding neither decays nor adds (its k is to be zero). A new document starts from S = 0. Powers of γ ≤ 1 are
of differences that are never negative, so nothing overflows however long the text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heddle.numerics.choose import Form, Operation
from heddle.numerics.counting import count
from heddle.numerics.norms import at_least_float32, own_dtype

CHUNK = 64  # tokens whose pairs are weighed at once: d_k and d_v are about as many, so pairs and sums cost alike
SCORES = 2**18  # weights of pairs that exist at one time: 1 MB in float32, which a cache holds


class Places(NamedTuple):
    """Where the tokens of a call stand; each field is None where it would tell nothing.

    arrived: int64 [B, T], real tokens of the call up to this one (None: no padding). segments: int64 [B, T], each
    token's document, 0 that of the state (None: all are of that one).
    """

    arrived: Tensor | None = None
    segments: Tensor | None = None


class SumFacts(NamedTuple):
    """What decides the form."""

    tokens: int
    gradients: bool
    carried: bool


class Weights(NamedTuple):
    """What counts how much in g chunks of C tokens; None where it is 1.

    inside [B|1, H|1, g|1, C, C]: a key for a query of its chunk. before [.., C, 1]: the state before a chunk for its
    queries. into [.., C, 1]: a key for the state after its chunk. keep [.., 1, 1]: the state before for that after.
    """

    inside: Tensor
    before: Tensor | None
    into: Tensor | None
    keep: Tensor | None


def flops(tokens: int, batch: int, heads: int, widths: tuple[int, int]) -> int:
    """Operations of the recurrence: each token is added to S and reads it; `widths` are d_k and d_v."""
    return 4 * batch * heads * tokens * widths[0] * widths[1]


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
        before = _times((arrived * rate).exp()[..., None], before)
        into = _times(((total[..., None] - arrived) * rate).exp()[..., None], into)
        keep = _times((total[..., None] * rate).exp()[..., None], keep)
    return Weights(weighed, before, into, keep)


def _times(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else x * weight


def _chunk(weight: Tensor | None, index: int) -> Tensor | None:
    """The weight of one chunk."""
    return None if weight is None else weight[:, :, index if weight.shape[2] > 1 else 0]


def nothing_summed(q: Tensor, v: Tensor) -> Tensor:
    """A state before any token [B, H, d_k, d_v]."""
    return torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=at_least_float32(q[:0]).dtype, device=q.device)


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The quadratic form: every pair of tokens. Returns y and the state after the last token."""
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    if q.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3]), state
    by = weights(places, slice(0, q.shape[2]), q.shape[2], log_decay, state)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * by.inside[:, :, 0]
    earlier = _times(torch.einsum("bhtd,bhde->bhte", q, state), _chunk(by.before, 0))
    added = torch.einsum("bhtd,bhte->bhde", _times(k, _chunk(by.into, 0)), v)
    return torch.einsum("bhts,bhsd->bhtd", scores, v) + earlier, _times(state, _chunk(by.keep, 0)) + added


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, v = (at_least_float32(x) for x in (q, k, v))
    keep = _keep(places, q.shape[2], log_decay, state)
    out = [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
    for token in range(q.shape[2]):
        here = slice(token, token + 1)
        state = _times(state, _chunk(keep, token)) + k[:, :, here].mT * v[:, :, here]
        out.append(q[:, :, here] @ state)
    return torch.cat(out, dim=2), state


def _keep(places: Places, length: int, log_decay: Tensor | None, like: Tensor) -> Tensor | None:
    """What the state before each token counts in that after it, [B|1, H|1, T|1, 1, 1]."""
    if places.arrived is None and places.segments is None:  # the usual step, made of as few operations as can be
        return None if log_decay is None else log_decay.exp()[None, :, None, None, None]
    return weights(places, slice(0, length), 1, log_decay, like).keep


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor
) -> tuple[Tensor, Tensor]:
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
        state = _times(state, _chunk(keep, chunk)) + added[:, :, chunk]
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
        befores = []
        for span, size in _groups(length, rows * heads):
            some_q, some_k, some_v = (_fold(x, span, size) for x in (q, k, v))
            by = weights(places, span, size, log_decay, state)
            y = (some_q @ some_k.mT).mul_(by.inside) @ some_v
            added = _times(some_k, by.into).mT @ some_v
            before, state = _scan(added, state, by.keep, range(added.shape[2]))
            out[:, :, span] = y.add_(_times(some_q, by.before) @ before).flatten(2, 3)
            if any(ctx.needs_input_grad):
                befores.append(before)
        ctx.save_for_backward(q, k, v, log_decay, *befores)
        ctx.places = places
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with own_dtype(gradients[0]):
            return _slopes(ctx, gradients[0])


def _slopes(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of what `_Chunks.apply` takes, from the last group of chunks to the first."""
    q, k, v, log_decay, *befores = ctx.saved_tensors
    to_q, to_k, to_v = (torch.empty_like(x) for x in (q, k, v))
    to_decay = torch.zeros_like(log_decay) if ctx.needs_input_grad[3] else None
    slope = torch.zeros_like(befores[0][:, :, 0])
    spans = list(_groups(q.shape[2], q.shape[0] * q.shape[1]))
    for (span, size), before in zip(reversed(spans), reversed(befores), strict=True):
        some_q, some_k, some_v, some_g = (_fold(x, span, size) for x in (q, k, v, gradient))
        by = weights(ctx.places, span, size, log_decay, slope)
        added = _times(some_q, by.before).mT @ some_g
        after, slope = _scan(added, slope, by.keep, range(added.shape[2] - 1, -1, -1))
        pairs = (some_g @ some_v.mT).mul_(by.inside)
        for_q = (pairs @ some_k).add_(_times(some_g @ before.mT, by.before))
        for_k = (pairs.mT @ some_q).add_(_times(some_v @ after.mT, by.into))
        pairs = (some_q @ some_k.mT).mul_(by.inside)
        into = _times(some_k, by.into)
        for_v = (pairs.mT @ some_g).add_(into @ after)
        for target, found in ((to_q, for_q), (to_k, for_k), (to_v, for_v)):
            target[:, :, span] = found.flatten(2, 3)
        if to_decay is not None:
            arrived, total = _counts(ctx.places, span, size, slope)
            held = _times(before, by.keep) + into.mT @ some_v
            each = (some_q * for_q - some_k * for_k).sum(-1) * arrived
            whole = (held * after).sum((-1, -2)) * total
            to_decay += each.sum((0, 2, 3)) + whole.sum((0, 2))
    return to_q, to_k, to_v, to_decay, None, None


def _no_chunks(facts: SumFacts) -> str | None:
    if facts.tokens < 2:
        return "one token is one step of the recurrence"
    return "gradients do not pass through a state here" if facts.carried and facts.gradients else None


CAUSAL_SUMS = Operation(
    "causal_sums",
    (
        Form("chunked", _chunked, _no_chunks),
        Form("recurrent", _recurrent, lambda facts: None),
        Form("reference", reference, lambda facts: None),
    ),
)


def causal_sums(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, places: Places, state: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, H, T, d_k], v [B, H, T, d_v], log γ [H] (None: 0), state [B, H, d_k, d_v] (None: zero) -> y, new state.

    y [B, H, T, d_v] is in at least float32. Without a state there is none to return. k is zero at padding.
    """
    count(flops(q.shape[2], q.shape[0], q.shape[1], (q.shape[3], v.shape[3])))
    wanted = [x for x in (q, k, v, log_decay, state) if x is not None]
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in wanted)
    form = CAUSAL_SUMS.choose(SumFacts(q.shape[2], gradients, state is not None))
    with own_dtype(q):
        y, after = form.run(q, k, v, log_decay, places, nothing_summed(q, v) if state is None else state)
    return y, None if state is None else after
