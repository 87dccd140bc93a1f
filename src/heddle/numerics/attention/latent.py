"""Attention over latents (MLA, DeepSeek-V2 §2.1, eqs. 9–19): every head's keys and values are made of one latent c.

    k = [W_uk c ; k_rope],   v = W_uv c,   q·k = q_nope·(W_uk c) + q_rope·k_rope = [W_ukᵀ q_nope ; q_rope]·[c ; k_rope]

q_nope [B, H, T, d_n], q_rope [B, H, T, d_r], latents [B, 1, S, r + d_r] = [c ; k_rope], k_up [H·d_n, r],
v_up [H·d_v, r] -> [B, H, T, d_v]. Expanded, each head has its own keys and values. Absorbed, queries are taken to
the latents, which are keys and values of all heads: dearer a pair, but nothing is made of the tokens before.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics.attention import softmax as plain
from heddle.numerics.attention.softmax import attention
from heddle.numerics.attention.visibility import Visibility, pairs
from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation, device_of
from heddle.numerics.linear import linear
from heddle.numerics.norms import at_least_float32

WEIGHTS = 2**20  # weights, or elements of keys, that a tile makes: 4 MB in float32, which a cache holds
EXPANDED = 2**22  # elements that the keys and values of a state may be expanded to without tiles
LEAST = 64  # queries and keys of a tile, at least

Ups = tuple[Tensor, Tensor]


class Facts(NamedTuple):
    """What decides the form: lengths, widths of a head, and the elements of all keys and values expanded."""

    queries: int
    keys: int
    rank: int
    nope: int
    rope: int
    value: int
    expanded: int


def expanded_flops(queries: int, keys: int, facts: Facts) -> int:
    """Operations a head and row that expand `keys` latents and attend to them with `queries`, the last of them."""
    seen = pairs(queries, keys, None, True)
    up = keys * facts.rank * (facts.nope + facts.value)
    return 2 * up + plain.flops(seen, 1, 1, facts.nope + facts.rope + facts.value)


def absorbed_flops(queries: int, keys: int, facts: Facts) -> int:
    """Operations a head and row that take `queries` to the latents, attend to `keys` of them and go back to values."""
    seen = pairs(queries, keys, None, True)
    up = queries * facts.rank * (facts.nope + facts.value)
    return 2 * up + plain.flops(seen, 1, 1, 2 * facts.rank + facts.rope)


def reference(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, seen: Visibility, scale: float
) -> Tensor:
    """Expanded by einsum, attended by the grouped einsum."""
    (batch, heads, queries, _), keys, rank = q_nope.shape, latents.shape[2], k_up.shape[1]
    c, k_rope = latents[:, 0, :, :rank], latents[..., rank:].expand(-1, heads, -1, -1)
    k_nope, v = (torch.einsum("bsr,hdr->bhsd", c, up.unflatten(0, (heads, -1))) for up in (k_up, v_up))
    count(batch * heads * expanded_flops(queries, keys, facts_of(q_nope, q_rope, latents, k_up, v_up)))
    return plain.reference(torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v, seen, scale)


def expand(latents: Tensor, ups: Ups, heads: int) -> tuple[Tensor, Tensor]:
    """Latents [B, 1, S, r + d_r] -> keys [B, H, S, d_n + d_r], values [B, H, S, d_v]."""
    rank = ups[0].shape[1]
    c = latents[:, 0, :, :rank]
    k, v = (linear(c, up).unflatten(-1, (heads, -1)).transpose(1, 2) for up in ups)
    return torch.cat((k, latents[..., rank:].expand(-1, heads, -1, -1)), dim=-1), v


def _expanded(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, seen: Visibility, scale: float
) -> Tensor:
    k, v = expand(latents, (k_up, v_up), q_nope.shape[1])
    return attention(torch.cat((q_nope, q_rope), dim=-1), k, v, seen, scale)


def _tiled(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, seen: Visibility, scale: float
) -> Tensor:
    """Keys are expanded a tile at a time, and each tile once."""
    (batch, heads, queries, _), keys = q_nope.shape, latents.shape[2]
    facts = facts_of(q_nope, q_rope, latents, k_up, v_up)
    count(plain.flops(pairs(queries, keys, None, True), batch, heads, facts.nope + facts.rope + facts.value))

    def tile(here: slice) -> tuple[Tensor, Tensor]:
        k, v = expand(_held(latents, seen, here), (k_up, v_up), heads)
        return at_least_float32(k), at_least_float32(v)

    some_keys = min(keys, max(LEAST, WEIGHTS * keys // max(1, facts.expanded)))
    some_queries = max(LEAST, WEIGHTS // (batch * heads * max(1, some_keys)))
    y = _streamed(torch.cat((q_nope, q_rope), dim=-1) * scale, tile, seen, (some_queries, some_keys))
    return y.to(q_nope.dtype)


def _absorbed(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, seen: Visibility, scale: float
) -> Tensor:
    (batch, heads, queries, _), keys, rank = q_nope.shape, latents.shape[2], k_up.shape[1]
    count(batch * heads * absorbed_flops(queries, keys, facts_of(q_nope, q_rope, latents, k_up, v_up)))

    def tile(here: slice) -> tuple[Tensor, Tensor]:
        wide = at_least_float32(_held(latents, seen, here))
        return wide, wide[..., :rank]

    q = torch.einsum("bhtd,hdr->bhtr", q_nope, k_up.unflatten(0, (heads, -1)))
    rows = batch * max(heads * queries, latents.shape[3])
    y = _streamed(torch.cat((q, q_rope), dim=-1) * scale, tile, seen, (queries, max(LEAST, WEIGHTS // rows)))
    return torch.einsum("bhtr,hdr->bhtd", y.to(q.dtype), v_up.unflatten(0, (heads, -1)))


def _held(latents: Tensor, seen: Visibility, here: slice) -> Tensor:
    """Some latents; slots that hold no token are zero: 0 · NaN would reach a result through the weights."""
    some = latents[:, :, here]
    return some.masked_fill((seen.k_positions[:, here] < 0)[:, None, :, None], 0.0) if seen.ragged else some


class _Running:
    """The softmax of some queries over keys that come in tiles: the greatest score, sums of weights and of values."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self.top: Tensor | None = None
        self.total, self.out = q.new_zeros(()), q.new_zeros(())

    @torch.autocast("cpu", enabled=False)
    def add(self, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """k [B, G, s, d], v [B, G, s, d_v], hidden bool [B, 1, T, s] (None: all are seen)."""
        (batch, heads, queries, width), groups, keys = self.q.shape, k.shape[1], k.shape[2]
        rows = heads // groups * queries  # the heads of a group are queries of one head
        scores = _product(self.q.reshape(batch, groups, rows, width), k.mT).view(batch, heads, queries, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        top = scores.detach().amax(-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        finite = top.masked_fill(top == float("-inf"), 0.0)  # of queries that saw nothing yet
        weights = scores.sub_(finite).exp_()
        total = weights.sum(-1, keepdim=True)
        out = _product(weights.view(batch, groups, rows, keys), v).view(batch, heads, queries, v.shape[3])
        if self.top is not None:
            faded = (self.top - finite).exp()
            total, out = total + self.total * faded, out + self.out * faded
        self.top, self.total, self.out = top, total, out

    def result(self) -> Tensor:
        """[B, H, T, d_v]; queries that saw nothing give zeros."""
        return self.out / self.total.masked_fill(self.total == 0, 1.0)


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [B, G, m, n] @ y [B, G, n, s]. One product a row where y is a view of latents, which a batched one may copy."""
    if y.shape[1] > 1 or device_of(y) != "cpu":
        return x @ y
    return torch.stack([one @ other for one, other in zip(x[:, 0], y[:, 0], strict=True)])[:, None]


def _streamed(
    q: Tensor, tile: Callable[[slice], tuple[Tensor, Tensor]], seen: Visibility, sizes: tuple[int, int]
) -> Tensor:
    """softmax(Q Kᵀ + mask) V in at least float32. `tile(keys)` gives some K and V; sizes: queries, keys of a tile."""
    queries, keys = q.shape[2], seen.k_positions.shape[1]
    if keys == 0:  # a call without tokens on a state without tokens
        return q.new_zeros(*q.shape[:3], tile(slice(0, 0))[1].shape[-1])
    size = max(1, sizes[0])
    starts = range(0, max(1, queries), size)  # once, too, for a call without tokens
    tiles = [slice(start, min(start + size, queries)) for start in starts]
    running = [_Running(at_least_float32(q[:, :, here])) for here in tiles]
    for start in range(0, keys, sizes[1]):
        there = slice(start, min(start + sizes[1], keys))
        k, v = tile(there)
        for here, softmax in zip(tiles, running, strict=True):
            first = keys - queries + here.start + 1  # keys that the first of these queries sees, if all are in order
            in_order = seen.ordered and seen.causal
            if in_order and there.start >= keys - queries + here.stop:
                continue
            all_seen = seen.everything or (in_order and there.stop <= first)
            softmax.add(k, v, None if all_seen else ~seen.mask(here, there)[:, None])
    return torch.cat([softmax.result() for softmax in running], dim=2)


def _few(facts: Facts) -> str | None:
    """A step of a state never expands what was before it."""
    lengths = facts.queries, facts.keys
    if facts.queries < facts.keys and absorbed_flops(*lengths, facts) <= expanded_flops(*lengths, facts):
        return f"the {facts.keys} keys of a state are not expanded again for so short a call (of {facts.queries})"
    return None


def _not_expanded(facts: Facts) -> str | None:
    if facts.queries < facts.keys and facts.expanded > EXPANDED:
        return f"more than {EXPANDED} elements of a state would be expanded at one time"
    return _few(facts)


LATENT = Operation(
    "latent",
    (
        Form("expanded", _expanded, _not_expanded),
        Form("tiled", _tiled, _few),
        Form("absorbed", _absorbed, lambda facts: None),
        Form("reference", reference, lambda facts: None),
    ),
)


def facts_of(q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor) -> Facts:
    """The facts of one call."""
    batch, heads, queries, nope = q_nope.shape
    keys, rope, value = latents.shape[2], q_rope.shape[3], v_up.shape[0] // heads
    return Facts(queries, keys, k_up.shape[1], nope, rope, value, batch * heads * keys * (nope + rope + value))


def latent_attention(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, seen: Visibility, scale: float
) -> Tensor:
    """Attend; shapes as at the head of this file. `q_rope` and the end of `latents` are turned already."""
    form = LATENT.choose(facts_of(q_nope, q_rope, latents, k_up, v_up))
    y: Tensor = form.run(q_nope, q_rope, latents, k_up, v_up, seen, scale)
    return y
