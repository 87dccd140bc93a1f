"""Softmax attention over grouped heads: `softmax(Q Kᵀ · scale + mask) V` (Vaswani et al. 2017; Ainslie et al. 2023).

q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v]; query head h reads group h // (H/G), and
keys and values are never repeated. A query that sees no key yields zeros, with zero gradients.

Options (see `heddle.numerics.attention.score_modifiers`): scores may be capped, then lose a slope a head for each step of distance, and a
learned logit a head, the sink, may join the softmax's denominator with a value of zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heddle.numerics.attention import sliding_window as local
from heddle.numerics.attention.observer import Observation, observe
from heddle.numerics.attention.score_modifiers import PLAIN, Extras
from heddle.numerics.attention.sdpa import fused
from heddle.numerics.attention.tiled import masked, triangle, unmasked
from heddle.numerics.attention.visibility import Visibility, pairs
from heddle.numerics.dispatch.flop_counter import count
from heddle.numerics.dispatch.operation import Form, Operation, device_of
from heddle.numerics.norms import at_least_float32

TILE = 512  # queries whose mask may exist at one time
FEW = 16  # queries of a group that read all keys fastest by two plain products
SHORT = 1024  # rows up to this length train faster by plain batched products than by torch's fused kernel

BIASES = 2**24  # elements of a bias of distance that exist at one time

NO_CAP = "torch's fused kernel caps no scores"
NO_BIAS = "torch's fused kernel takes a bias of distance only as a mask, which is made one tile of queries at a time"

Weigh = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Facts:
    """What decides the form: sizes and the static facts of the visibility."""

    queries: int
    keys: int
    groups: int
    heads: int
    causal: bool
    window: int | None
    ordered: bool
    everything: bool
    pieces: bool
    dropout: bool
    gradients: bool
    device: str
    wide: bool
    softcap: bool = False
    sink: bool = False
    slopes: bool = False


def flops(seen: int, batch: int, heads: int, widths: int) -> int:
    """Operations for `seen` (query, key) pairs a head; `widths` is d_k + d_v."""
    return 2 * batch * heads * seen * widths


def reference(
    q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, weigh: Weigh | None = None, extras: Extras = PLAIN
) -> Tensor:
    """Grouped einsum. `weigh` maps the weights [B, H, T, S] before they meet the values (dropout)."""
    k, v = _clean(k, v, seen)
    weights = attention_weights(q, k, seen, scale, extras)
    if weigh is not None:
        weights = weigh(weights)
    grouped = weights.to(v.dtype).unflatten(1, (k.shape[1], -1))
    return torch.einsum("bgrts,bgsd->bgrtd", grouped, v).flatten(1, 2)


def attention_weights(q: Tensor, k: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    """The weights themselves, [B, H, T, S], in at least float32; rows that see nothing are zero.

    Each other row sums to 1, or with a sink to less.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bgrtd,bgsd->bgrts", at_least_float32(grouped), at_least_float32(k)) * scale
    if extras.softcap is not None:
        scores = (scores / extras.softcap).tanh() * extras.softcap
    bias = extras.bias(seen)
    if bias is not None:
        scores = scores + bias.unflatten(1, (k.shape[1], -1))
    mask = seen.mask()[:, None, None]
    # A row without keys would be softmax of nothing: it is let see everything and then set to zero.
    empty = ~mask.any(-1, keepdim=True)
    scores = scores.masked_fill(~(mask | empty), float("-inf")).flatten(1, 2)
    sink = extras.columns(q).sink
    if sink is not None:
        scores = torch.cat((scores, sink.to(scores.dtype)), dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]].masked_fill(empty[:, 0], 0.0)


def _clean(k: Tensor, v: Tensor, seen: Visibility) -> tuple[Tensor, Tensor]:
    """Zero the slots that hold no token: 0 · NaN would reach a result through the weights."""
    if not seen.ragged:
        return k, v
    unused = (seen.k_positions < 0)[:, None, :, None]
    return k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)


def _unmasked(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    return unmasked(q, k, v, scale, extras.bias(seen))


def _folded(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    """Every key is seen: the heads of a group become queries of one head, so its keys are read once."""
    if extras.softcap is not None:
        gap = None if extras.slopes is None else seen.distance()[0]
        return masked(q, k, v, scale, None, extras.columns(q, gap))
    sink, bias = extras.columns(q).sink, extras.bias(seen)
    batch = q.shape[0]
    folded = q.reshape(batch, k.shape[1], -1, q.shape[-1])
    if sink is not None:
        sink = sink.reshape(*folded.shape[:3], 1)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], *folded.shape[1:3], k.shape[2])
    return fused(folded, k, v, scale, bias, sink=sink).reshape(*q.shape[:3], v.shape[-1])


def _causal(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    return fused(q, k, v, scale, causal=True, sink=extras.columns(q).sink)


def _triangle(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    return triangle(q, k, v, scale, extras.columns(q))


def _pieces(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    """One call for each piece of each packed row: nothing is spent on pairs across documents."""
    assert seen.pieces is not None
    rows, length = q.shape[0], q.shape[2]
    lengths = [piece for row in seen.pieces for piece in row]
    split = [x.transpose(1, 2).flatten(0, 1).split(lengths) for x in (q, k, v)]
    alone = replace(seen, pieces=None, q_documents=None, k_documents=None, ordered=True)
    out = []
    for one_q, one_k, one_v in zip(*split, strict=True):
        heads_first = [x.transpose(0, 1)[None] for x in (one_q, one_k, one_v)]
        here = torch.arange(one_q.shape[0], device=q.device)[None]
        piece = replace(alone, q_positions=here, k_positions=here, everything=one_q.shape[0] == 1)
        form = ATTENTION.first(facts_of(heads_first[0], heads_first[1], piece, dropout=False, extras=extras))
        out.append(form.run(*heads_first, piece, scale, extras=extras)[0].transpose(0, 1))
    return torch.cat(out).view(rows, length, q.shape[1], v.shape[-1]).transpose(1, 2)


def _blocks(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    assert seen.window is not None
    return local.attend(q, k, v, local.Band(seen.window, seen.causal), scale, extras)


def _tiles(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, extras: Extras = PLAIN) -> Tensor:
    """The predicate as a mask, one tile of queries at a time."""
    k, v = _clean(k, v, seen)
    rows, size, out = seen.alike(), TILE, []
    if extras.slopes is not None:
        size = max(FEW, min(TILE, BIASES // max(1, len(rows.k_positions) * q.shape[1] * k.shape[2])))
    for start in range(0, max(q.shape[2], 1), size):  # once, too, for a text without tokens
        here = slice(start, min(start + size, q.shape[2]))
        if extras.softcap is not None:
            out.append(reference(q[:, :, here], k, v, seen.of(here), scale, extras=extras))
            continue
        mask, bias = rows.mask(here)[:, None], extras.bias(rows.of(here))
        # Kernels differ on rows without keys (zeros here, NaN there): see everything, then become zero.
        empty = ~mask.any(-1, keepdim=True)
        shown = mask | empty if bias is None else bias.masked_fill(~(mask | empty), float("-inf"))
        some_q = q[:, :, here]
        y = fused(some_q, k, v, scale, shown, sink=extras.columns(some_q).sink)
        out.append(y.masked_fill(empty, 0.0))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _no_dropout(refuse: Callable[[Facts], str | None]) -> Callable[[Facts], str | None]:
    def reasons(facts: Facts) -> str | None:
        if facts.dropout:
            return "dropout of weights is keyed by sample, which fused kernels cannot draw"
        return refuse(facts)

    return reasons


def _not_unmasked(facts: Facts) -> str | None:
    rows = facts.queries * facts.heads // facts.groups
    if not facts.everything or facts.softcap or facts.sink or rows > FEW:
        return f"it is for up to {FEW} queries of a group that see every key, without caps and sinks"
    fits = facts.device == "cpu" and facts.wide
    return None if fits else "it is for float32 and float64 on the CPU; a narrow product would round the scores"


def _not_folded(facts: Facts) -> str | None:
    if facts.queries > 1 and (facts.softcap or facts.slopes):
        return NO_CAP if facts.softcap else NO_BIAS
    return None if facts.everything else "some query does not see every key"


def _not_pieces(facts: Facts) -> str | None:
    return None if facts.pieces else "the rows are not packed with known lengths"


def _not_ordered(facts: Facts) -> str | None:
    if not facts.ordered or facts.pieces:
        return "positions are not consecutive in one document"
    if not facts.causal:
        return "attention is bidirectional"
    if facts.window is not None and facts.window < facts.keys:
        return "a window hides distant keys"
    return None


def _not_causal(facts: Facts) -> str | None:
    if facts.queries != facts.keys:
        return "keys of a state precede the queries, and the kernel's causal mask is aligned to the top left"
    if facts.softcap or facts.slopes:
        return NO_CAP if facts.softcap else NO_BIAS
    return _not_ordered(facts)


def _not_triangle(facts: Facts) -> str | None:
    if facts.device != "cpu":
        return "it is for the CPU"
    served = facts.queries == facts.keys and not facts.softcap and not facts.slopes  # by the fused kernel
    if served and (facts.keys > SHORT or not facts.gradients):
        return f"the fused kernel is faster for more than {SHORT} tokens, and without gradients"
    return _not_ordered(facts)


def _not_blocks(facts: Facts) -> str | None:
    if facts.window is None:
        return "there is no window"
    if not facts.ordered or facts.pieces:
        return "positions are not consecutive in one document"
    if facts.keys < 2 * facts.window:
        return "the window covers most keys"
    if not facts.causal and facts.queries != facts.keys:
        return "bidirectional blocks need all queries at once"
    return None


ATTENTION = Operation(
    "attention",
    (
        Form("unmasked", _unmasked, _no_dropout(_not_unmasked)),
        Form("folded", _folded, _no_dropout(_not_folded)),
        Form("triangle", _triangle, _no_dropout(_not_triangle)),
        Form("causal", _causal, _no_dropout(_not_causal)),
        Form("pieces", _pieces, _no_dropout(_not_pieces)),
        Form("blocks", _blocks, _no_dropout(_not_blocks)),
        Form("tiles", _tiles, _no_dropout(lambda facts: None)),
        Form("reference", reference, lambda facts: None),
    ),
)


def facts_of(q: Tensor, k: Tensor, seen: Visibility, dropout: bool, extras: Extras = PLAIN) -> Facts:
    """The facts of one call."""
    return Facts(
        queries=q.shape[2],
        keys=k.shape[2],
        groups=k.shape[1],
        heads=q.shape[1],
        causal=seen.causal,
        window=seen.window,
        ordered=seen.ordered,
        everything=seen.everything,
        pieces=seen.pieces is not None,
        dropout=dropout,
        gradients=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad),
        device=device_of(q),
        wide=q.dtype in (torch.float32, torch.float64),
        softcap=extras.softcap is not None,
        sink=extras.sink is not None,
        slopes=extras.slopes is not None,
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float, weigh: Weigh | None = None, extras: Extras = PLAIN
) -> Tensor:
    """Attend: q [B, H, T, d_k], k [B, G, S, d_k], v [B, G, S, d_v] -> [B, H, T, d_v].

    `weigh` maps the weights before they meet the values (dropout); only the reference form can apply it. Who observes
    is given the weights, which the forms that run need not make.
    """
    seen_pairs = pairs(q.shape[2], k.shape[2], seen.window, seen.causal)
    count(flops(seen_pairs, q.shape[0], q.shape[1], q.shape[3] + v.shape[3]))
    observe(lambda: Observation(attention_weights(q, k, seen, scale, extras), k.shape[1]))
    form = ATTENTION.choose(facts_of(q, k, seen, weigh is not None, extras))
    weighed = () if weigh is None else (weigh,)
    y: Tensor = form.run(q, k, v, seen, scale, *weighed, extras=extras)
    return y
