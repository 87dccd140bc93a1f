"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks"), one matrix of memory a head.

    S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t,   S [d_k, d_v]

Chunked (the authors' WY form): within a chunk, with D_ij = α_{j+1} ⋯ α_i and d_i the decay since before the chunk,

    [U ; W] = (I + tril(β K Kᵀ ⊙ D, −1))⁻¹ β [V ; d ⊙ K],   N = U − W S,   K̃ = K ⊙ D_last
    O = (d ⊙ Q) S + (Q Kᵀ ⊙ D) N,   S' = d_last S + K̃ᵀ N

so that all but N and S' is one product over all chunks. Everything is computed in at least float32.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation
from heddle.numerics.norms import at_least_float32, without_autocast

CHUNK = 32  # more tokens cost more arithmetic for pairs, fewer a longer recurrence
EPS = 1e-6  # of the length of keys and queries, inside the root, as in Qwen3-Next and the authors' code


class Rule(NamedTuple):
    """What the tokens say: q, k [B, G, T, d_k], v [B, H, T, d_v], log_decay (log α, finite, ≤ 0) and beta [B, H, T].

    Head h reads keys and queries h // (H/G). A token whose beta and log_decay are 0 changes nothing. segments, int64
    [B, T]: documents counted up, 0 goes on with the memory given; None: all of them are 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    segments: Tensor | None = None


class Facts(NamedTuple):
    """What decides the form: tokens, and whether gradients are wanted."""

    length: int
    gradients: bool


def flops(tokens: int, heads: int, d_k: int, d_v: int) -> int:
    """Operations of the recurrence: read by the key, write, read by the query."""
    return 6 * tokens * heads * d_k * d_v


def unit(x: Tensor) -> Tensor:
    """x [..., d] with length one, in at least float32; zero stays zero."""
    wide = at_least_float32(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)


def reference(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token: memory S [B, H, d_k, d_v] -> (o [B, H, T, d_v], the memory after the last token)."""
    q, k = (x.repeat_interleave(rule.v.shape[1] // x.shape[1], dim=1) for x in (rule.q, rule.k))
    rows = (x.unsqueeze(3).unbind(2) for x in (q, k, rule.v, rule.log_decay.exp()[..., None], rule.beta[..., None]))
    out, before = [rule.v[:, :, :0]], rule.v.new_zeros(rule.v.shape[0], dtype=torch.int64)
    for t, (query, key, value, decay, beta) in enumerate(zip(*rows, strict=True)):
        if rule.segments is not None:
            memory = memory.masked_fill((rule.segments[:, t] != before)[:, None, None, None], 0.0)
            before = rule.segments[:, t]
        memory = memory * decay
        memory = memory + key.mT @ ((value - key @ memory) * beta)
        out.append(query @ memory)
    return torch.cat(out, dim=2), memory


def _step(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token without gradients; the memory is changed in place."""
    batch, heads, d_k, d_v = memory.shape
    q, k = (x.expand(batch, x.shape[1], heads // x.shape[1], d_k).reshape(-1, 1, d_k) for x in (rule.q, rule.k))
    decay = rule.log_decay.exp()[..., None]
    if rule.segments is not None:  # a new document starts from nothing
        decay = decay.masked_fill(rule.segments[:, None, :, None] > 0, 0.0)
    held = memory.mul_(decay).view(-1, d_k, d_v)
    news = torch.baddbmm(rule.v.flatten(0, 1), k, held, alpha=-1).mul_(rule.beta.view(-1, 1, 1))
    held.baddbmm_(k.mT, news)
    return torch.bmm(q, held).view(batch, heads, 1, d_v), memory


def _chunked(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """All chunks at once, then a recurrence over them; a chunk's heads are [B, G, H/G, chunks, tokens, ...]."""
    groups, length, d_v = rule.k.shape[1], *rule.v.shape[2:]
    chunks = -(-length // CHUNK)
    q, k, v = (_cut(x, groups, chunks) for x in (rule.q, rule.k, rule.v))
    log_decay, beta = (_cut(x[..., None], groups, chunks) for x in (rule.log_decay, rule.beta))
    decay = _decays(log_decay, rule.segments)
    since, pairs, until, whole = decay[..., :1], decay[..., 1:], decay[..., -1, 1:, None], decay[..., -1, :1]
    wanted = torch.cat((v * beta, k * (since * beta)), dim=-1)
    both: Tensor = _Solve.apply((k @ k.mT) * pairs * beta, wanted)
    news, held = [], [memory.flatten(0, 1)]
    steps = (x.flatten(0, 2).unbind(1) for x in (both[..., :d_v], both[..., d_v:], (k * until).mT, whole[..., None]))
    for values, reads, writes, keep in zip(*steps, strict=True):
        news.append(torch.baddbmm(values, reads, held[-1], alpha=-1))
        held.append(torch.baddbmm(held[-1] * keep, writes, news[-1]))
    kept, written = (torch.stack(x, dim=1).unflatten(0, v.shape[:3]) for x in (held[:-1], news))
    out = (q * since) @ kept + ((q @ k.mT) * pairs) @ written
    return out.flatten(3, 4).flatten(1, 2)[:, :, :length], held[-1].view(memory.shape)


class _Solve(torch.autograd.Function):
    """(I + tril(A, −1))⁻¹ B by products alone, in half the time of torch's triangular solver on a CPU."""

    @staticmethod
    def forward(ctx: Any, system: Tensor, wanted: Tensor) -> Tensor:
        inverse = _inverse(system)
        found = inverse @ wanted
        ctx.save_for_backward(inverse, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        inverse, found = ctx.saved_tensors
        to_wanted = inverse.mT @ gradients[0]
        return (to_wanted @ found.mT).tril(-1).neg_(), to_wanted


def _inverse(system: Tensor) -> Tensor:
    """(I + tril(A, −1))⁻¹ of A [..., n, n], from blocks of one number to larger ones.

    Two neighbours [[X, 0], [A', Y]] have the inverse [[X⁻¹, 0], [−Y⁻¹ A' X⁻¹, Y⁻¹]].
    """
    size = 1 << (system.shape[-1] - 1).bit_length()
    more = size - system.shape[-1]
    system = functional.pad(system, (0, more, 0, more))
    inverse = torch.eye(size, dtype=system.dtype, device=system.device).expand(system.shape).clone()
    half = 1
    while half < size:
        below, here = _diagonal(system, 2 * half)[..., half:, :half], _diagonal(inverse, 2 * half)
        here[..., half:, :half] = -(here[..., half:, half:] @ below @ here[..., :half, :half])
        half *= 2
    return inverse[..., : size - more, : size - more]


def _diagonal(x: Tensor, size: int) -> Tensor:
    """The square blocks on the diagonal of x [..., n, n], a view [..., n / size, size, size]."""
    return x.unflatten(-2, (-1, size)).unflatten(-1, (-1, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _cut(x: Tensor, groups: int, chunks: int) -> Tensor:
    """[B, heads, T, d] -> [B, G, heads/G, chunks, tokens, d], zeros after the last token."""
    x = functional.pad(x, (0, 0, 0, -x.shape[2] % chunks))
    return x.unflatten(2, (chunks, -1)).unflatten(1, (groups, -1))


def _decays(log_decay: Tensor, segments: Tensor | None) -> Tensor:
    """log_decay [B, G, R, chunks, C, 1] -> the decay [..., i, j] from after token j − 1 until after token i.

    Column 0 is since before the chunk; zero where j is later than i, or in another document. Each is the exponential
    of its own sum of numbers that are not positive: nothing can overflow, and no other document comes into it.
    """
    (batch, *_, chunks, size, _), device = log_decay.shape, log_decay.device
    within = torch.ones(size, size + 1, dtype=torch.bool, device=device).tril()
    sums = (log_decay.mT * within[:, :-1]) @ within.to(log_decay.dtype)
    if segments is None:
        return sums.exp().tril(1)
    more = segments[:, -1:].expand(batch, chunks * size - segments.shape[1])
    documents = torch.cat((segments.new_zeros(batch, 1), segments, more), dim=1).unfold(1, size + 1, size)
    together = documents[:, None, None, :, 1:, None] == documents[:, None, None, :, None]
    return sums.exp() * together.tril(1)


def _no_step(facts: Facts) -> str | None:
    if facts.length != 1:
        return f"it takes one token, here are {facts.length}"
    return "gradients are wanted" if facts.gradients else None


def _no_chunks(facts: Facts) -> str | None:
    return None if facts.length else "there is no token"


DELTA = Operation(
    "delta",
    (
        Form("step", _step, _no_step),
        Form("chunked", _chunked, _no_chunks),
        Form("reference", reference, lambda facts: None),
    ),
)


def delta(rule: Rule, memory: Tensor) -> tuple[Tensor, Tensor]:
    """memory S [B, H, d_k, d_v] -> (o [B, H, T, d_v], the memory after the last token, maybe in the same tensor)."""
    batch, heads, length, d_v = rule.v.shape
    count(flops(batch * length, heads, rule.k.shape[3], d_v))
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in rule[:5])
    form = DELTA.choose(Facts(length, gradients))
    with without_autocast(rule.v):
        found: tuple[Tensor, Tensor] = form.run(rule, memory)
    return found
