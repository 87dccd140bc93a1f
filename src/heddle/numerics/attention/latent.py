"""Multi-head latent attention (MLA, DeepSeek-V2 §2.1, eqs. 9–19): one latent c gives the keys and values of all heads.

    k = [W_uk c ; k_rope],   v = W_uv c,   q·k = q_nope·(W_uk c) + q_rope·k_rope = [W_ukᵀ q_nope ; q_rope]·[c ; k_rope]

q_nope [B, H, T, d_n], q_rope [B, H, T, d_r], latents [B, 1, S, r + d_r] = [c ; k_rope], k_up [H·d_n, r],
v_up [H·d_v, r] -> [B, H, T, d_v]. Expanded: the latents are projected to keys and values of each head. Absorbed: the
queries are projected to the latent space, and the latents serve as keys and values of all heads. That costs more per
pair of tokens, but nothing has to be computed for earlier tokens. A sink [H] is one more logit of each head, without a
value.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.numerics import native
from heddle.numerics.attention import softmax
from heddle.numerics.attention.mask import AttentionMask, ScoreModifiers, visible_pairs
from heddle.numerics.attention.softmax import attention
from heddle.numerics.dispatch import DeviceSize, Kernel, Operation, add_flops, counts_flops, device_type
from heddle.numerics.linear import linear
from heddle.numerics.norms import at_least_float32, without_autocast

# Attention to keys and values that arrive in tiles, by an online softmax (Milakov & Gimelshein 2018).


class _OnlineSoftmax:
    """Keeps, per query, the greatest score so far, the sum of the weights and the weighted sum of the values."""

    def __init__(self, q: Tensor, sink: Tensor | None) -> None:
        self.q = q
        self.max_score = None if sink is None else sink.detach()
        self.weight_sum = q.new_zeros(()) if sink is None else (sink - sink.detach()).exp()  # 1, with its gradient
        self.value_sum = q.new_zeros(())

    def add(self, k: Tensor, v: Tensor, hidden: Tensor | None) -> None:
        """Add keys k [B, G, s, d], values v [B, G, s, d_v]. hidden: bool [B, 1 or H, T, s], None if all are visible."""
        (batch, heads, queries, width), groups, keys = self.q.shape, k.shape[1], k.shape[2]
        rows = heads // groups * queries  # the heads of a group are folded into the queries
        scores = _matmul(self.q.reshape(batch, groups, rows, width), k.mT).view(batch, heads, queries, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        max_score = scores.detach().amax(-1, keepdim=True)
        if self.max_score is not None:
            max_score = torch.maximum(max_score, self.max_score)
        finite = max_score.masked_fill(max_score == float("-inf"), 0.0)  # for queries without a visible key so far
        weights = scores.sub_(finite).exp_()
        total = weights.sum(-1, keepdim=True)
        out = _matmul(weights.view(batch, groups, rows, keys), v).view(batch, heads, queries, v.shape[3])
        if self.max_score is not None:
            rescale = (self.max_score - finite).exp()
            total, out = total + self.weight_sum * rescale, out + self.value_sum * rescale
        self.max_score, self.weight_sum, self.value_sum = max_score, total, out

    def result(self) -> Tensor:
        """The output [B, H, T, d_v]. Queries that saw no key yield zeros."""
        return self.value_sum / self.weight_sum.masked_fill(self.weight_sum == 0, 1.0)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [B, G, m, n] @ y [B, G, n, s]. With G = 1 on a CPU, one product per row: a batched one may copy y, a view."""
    if y.shape[1] > 1 or device_type(y) != "cpu":
        return x @ y
    return torch.stack([left @ right for left, right in zip(x[:, 0], y[:, 0], strict=True)])[:, None]


def online_attention(
    q: Tensor,
    tile: Callable[[slice], tuple[Tensor, Tensor]],
    mask: AttentionMask,
    sizes: tuple[int, int],
    sink: Tensor | None = None,
) -> Tensor:
    """softmax(Q Kᵀ + mask) V in at least float32. `tile(keys)` returns a range of K and V. sizes: (queries, keys)."""
    queries, keys = q.shape[2], mask.k_positions.shape[1]
    if keys == 0:  # a call without tokens and an empty state
        return q.new_zeros(*q.shape[:3], tile(slice(0, 0))[1].shape[-1])
    tile_size = max(1, sizes[0])
    starts = range(0, max(1, queries), tile_size)  # one empty tile for a call without tokens
    tiles = [slice(start, min(start + tile_size, queries)) for start in starts]
    sink = ScoreModifiers(sink=sink).sink_per_query(q)
    softmaxes = [
        _OnlineSoftmax(at_least_float32(q[:, :, part]), None if sink is None else sink[:, :, part]) for part in tiles
    ]
    for start in range(0, keys, sizes[1]):
        key_range = slice(start, min(start + sizes[1], keys))
        k, v = tile(key_range)
        for query_range, online_softmax in zip(tiles, softmaxes, strict=True):
            in_order = mask.contiguous and mask.causal
            if in_order and key_range.start >= keys - queries + query_range.stop:
                continue
            first_query_sees = keys - queries + query_range.start + 1  # keys, if they are in order
            all_visible = mask.all_visible or (in_order and key_range.stop <= first_query_sees)
            hidden = None if all_visible else ~mask.visible(q.shape[1], query_range, key_range)
            with without_autocast(q):
                online_softmax.add(k, v, hidden)
    return torch.cat([online_softmax.result() for online_softmax in softmaxes], dim=2)


# Weights or key elements of one tile: 4 MB in float32, which fit a CPU's cache, or 1 GB in few launches.
MAX_TILE_ELEMENTS = DeviceSize(2**20, 2**28)
MAX_EXPANDED_ELEMENTS = DeviceSize(2**22, 2**30)  # largest untiled expansion of a state's latents
MAX_SCORES = 2**28  # 1 GB in float32; more scores than this are computed in tiles
MIN_TILE = 64  # least number of queries and of keys in a tile
MAX_NATIVE_QUERIES = 8  # with more, products of many rows are faster

UpProjections = tuple[Tensor, Tensor]


class LatentAttentionFacts(NamedTuple):
    """What decides the kernel: lengths, widths per head, and numbers of elements of all heads and rows.

    native: whether the C++ operator serves these tensors, without gradients.
    """

    queries: int
    keys: int
    latent_rank: int
    nope_width: int
    rope_width: int
    value_width: int
    expanded_elements: int
    max_expanded_elements: int
    scores: int
    device: str
    most_selected: int | None = None
    native: bool = False
    sink: bool = False


def expanded_flops(queries: int, keys: int, facts: LatentAttentionFacts) -> int:
    """FLOPs per head and row to expand `keys` latents and attend to them. The queries are the last tokens."""
    pairs = visible_pairs(queries, keys, None, True, facts.most_selected)
    up_projection = keys * facts.latent_rank * (facts.nope_width + facts.value_width)
    widths = facts.nope_width + facts.rope_width + facts.value_width
    return 2 * up_projection + softmax.attention_flops(pairs, 1, 1, widths)


def absorbed_flops(queries: int, keys: int, facts: LatentAttentionFacts) -> int:
    """FLOPs per head and row to project `queries` to the latent space, attend to `keys` latents and project back."""
    pairs = visible_pairs(queries, keys, None, True, facts.most_selected)
    up_projection = queries * facts.latent_rank * (facts.nope_width + facts.value_width)
    return 2 * up_projection + softmax.attention_flops(pairs, 1, 1, 2 * facts.latent_rank + facts.rope_width)


def reference(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    mask: AttentionMask,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Expand the latents by einsum, then attend by the reference kernel of softmax attention."""
    (batch, heads, queries, _), keys, rank = q_nope.shape, latents.shape[2], k_up.shape[1]
    c, k_rope = latents[:, 0, :, :rank], latents[..., rank:].expand(-1, heads, -1, -1)
    k_nope, v = (torch.einsum("bsr,hdr->bhsd", c, up.unflatten(0, (heads, -1))) for up in (k_up, v_up))
    facts = latent_attention_facts(q_nope, q_rope, latents, k_up, v_up, mask.most_selected)
    add_flops(batch * heads * expanded_flops(queries, keys, facts))
    q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
    return softmax.reference(q, k, v, mask, scale, modifiers=ScoreModifiers(sink=sink))


def expand_latents(latents: Tensor, up_projections: UpProjections, heads: int) -> tuple[Tensor, Tensor]:
    """Project latents [B, 1, S, r + d_r] to keys [B, H, S, d_n + d_r] and values [B, H, S, d_v]."""
    rank = up_projections[0].shape[1]
    c, k_rope = latents.split((rank, latents.shape[-1] - rank), dim=-1)  # one launch of the backward pass joins both
    k, v = (linear(c.squeeze(1), up).unflatten(-1, (heads, -1)).transpose(1, 2) for up in up_projections)
    return torch.cat((k, k_rope.expand(-1, heads, -1, -1)), dim=-1), v


def _expanded(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    mask: AttentionMask,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    k, v = expand_latents(latents, (k_up, v_up), q_nope.shape[1])
    return attention(torch.cat((q_nope, q_rope), dim=-1), k, v, mask, scale, modifiers=ScoreModifiers(sink=sink))


def _expanded_tiles(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    mask: AttentionMask,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Expand one tile of keys and values at a time, each tile once."""
    (batch, heads, queries, _), keys = q_nope.shape, latents.shape[2]
    facts = latent_attention_facts(q_nope, q_rope, latents, k_up, v_up, mask.most_selected)
    widths = facts.nope_width + facts.rope_width + facts.value_width
    add_flops(softmax.attention_flops(mask.pairs(queries, keys), batch, heads, widths))

    def tile(key_range: slice) -> tuple[Tensor, Tensor]:
        k, v = expand_latents(_latent_tile(latents, mask, key_range), (k_up, v_up), heads)
        return at_least_float32(k), at_least_float32(v)

    max_elements = MAX_TILE_ELEMENTS.on(latents)
    tile_keys = min(keys, max(MIN_TILE, max_elements * keys // max(1, facts.expanded_elements)))
    tile_queries = max(MIN_TILE, max_elements // (batch * heads * max(1, tile_keys)))
    y = online_attention(torch.cat((q_nope, q_rope), dim=-1) * scale, tile, mask, (tile_queries, tile_keys), sink)
    return y.to(q_nope.dtype)


def _absorbed(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    mask: AttentionMask,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend to one tile of latents at a time."""
    (batch, heads, queries, _), rank = q_nope.shape, k_up.shape[1]

    def tile(key_range: slice) -> tuple[Tensor, Tensor]:
        wide = at_least_float32(_latent_tile(latents, mask, key_range))
        return wide, wide[..., :rank]

    q = _absorbed_queries(q_nope, q_rope, latents, k_up, v_up, mask)
    rows = batch * max(heads * queries, latents.shape[3])
    tile_keys = max(MIN_TILE, MAX_TILE_ELEMENTS.on(latents) // rows)
    y = online_attention(q * scale, tile, mask, (queries, tile_keys), sink)
    return _projected_values(y, v_up, q_nope)


def _absorbed_untiled(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    mask: AttentionMask,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """All scores at once, in about ten launches. For few queries, as in a decode step."""
    (batch, heads, queries, _), rank = q_nope.shape, k_up.shape[1]
    q = (_absorbed_queries(q_nope, q_rope, latents, k_up, v_up, mask) * scale).flatten(1, 2)
    c = _factor(_latent_tile(latents, mask, slice(None))[:, 0])
    with without_autocast(latents):
        scores = _wide_product(q, c.mT).view(batch, heads, queries, latents.shape[2])
        hidden = None if mask.all_visible else ~mask.visible(heads)
        scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
        if sink is not None:
            sinks = ScoreModifiers(sink=sink).sink_per_query(q_nope)
            assert sinks is not None
            scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
        weights = scores.softmax(-1)[..., : latents.shape[2]]
        if hidden is not None:  # a query without a visible key gets NaN
            weights = weights.masked_fill(hidden, 0.0)
        y = _wide_product(weights.flatten(1, 2), c[..., :rank]).view(batch, heads, queries, rank)
    return _projected_values(y, v_up, q_nope)


def _native(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, mask: AttentionMask, scale: float
) -> Tensor:
    """One reading of the latents, for few queries."""
    _count_absorbed_flops(q_nope, q_rope, latents, k_up, v_up, mask)
    visible = None if mask.all_visible else mask.materialize()
    y: Tensor = torch.ops.heddle.latent_decode(q_nope, q_rope, latents, k_up, v_up, visible, scale)
    return y


def _factor(y: Tensor) -> Tensor:
    """y in at least float32; on a GPU without gradients y itself, as its products accumulate in float32 anyway."""
    narrow = y.device.type == "cuda" and not torch.is_grad_enabled()
    return y if narrow else at_least_float32(y)


def _wide_product(x: Tensor, y: Tensor) -> Tensor:
    """x [B, m, n] times y [B, n, s] -> [B, m, s] in at least float32.

    With a narrow y, x is rounded to its dtype, as the weights are in every flash kernel and in the reference.
    """
    if y.dtype in (torch.float32, torch.float64):
        return x.to(y.dtype) @ y
    return torch.bmm(x.to(y.dtype), y, out_dtype=torch.float32)


def _absorbed_queries(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, mask: AttentionMask
) -> Tensor:
    """Queries in the latent space, [B, H, T, r + d_r], not scaled, in at least float32. Counts FLOPs of the whole call.

    Rounded here, they would have up to twice the error of expanded keys.
    """
    batch, heads, queries, _ = q_nope.shape
    _count_absorbed_flops(q_nope, q_rope, latents, k_up, v_up, mask)
    with without_autocast(latents):
        q = _wide_product(q_nope.transpose(0, 1).flatten(1, 2), _factor(k_up).unflatten(0, (heads, -1)))
    return torch.cat((q.unflatten(1, (batch, queries)).transpose(0, 1), q_rope), dim=-1)  # promoted to the wider


def _count_absorbed_flops(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, mask: AttentionMask
) -> None:
    if counts_flops():
        facts = latent_attention_facts(q_nope, q_rope, latents, k_up, v_up, mask.most_selected)
        add_flops(q_nope.shape[0] * q_nope.shape[1] * absorbed_flops(facts.queries, facts.keys, facts))


def _projected_values(y: Tensor, v_up: Tensor, like: Tensor) -> Tensor:
    """y [B, H, T, r] in at least float32 -> [B, H, T, d_v] in the dtype of `like`; rounded once, at the end."""
    with without_autocast(v_up):
        values = torch.einsum("bhtr,hdr->bhtd", y, at_least_float32(v_up).unflatten(0, (y.shape[1], -1)))
    return values.to(like.dtype)


def _latent_tile(latents: Tensor, mask: AttentionMask, key_range: slice) -> Tensor:
    """A range of latents. Slots without a token are set to zero: NaN there would reach a result, as 0 · NaN is NaN."""
    tile = latents[:, :, key_range]
    if not mask.may_have_padding:
        return tile
    unused = (mask.k_positions[:, key_range] < 0)[:, None, :, None]
    return tile.masked_fill(unused, 0.0)


def _should_absorb(facts: LatentAttentionFacts) -> str | None:
    """Why a call after a state should absorb: expanding the latents of the state again would cost more FLOPs."""
    lengths = facts.queries, facts.keys
    if facts.queries < facts.keys and absorbed_flops(*lengths, facts) <= expanded_flops(*lengths, facts):
        return f"expanding the {facts.keys} keys again for {facts.queries} queries costs more FLOPs than absorbing"
    return None


def _native_unsupported(facts: LatentAttentionFacts) -> str | None:
    if not facts.native:
        return native.NOT_IN_USE
    if facts.sink:
        return "it takes no sink"
    if facts.most_selected is not None:
        return "it takes no selection of keys"
    if facts.queries > MAX_NATIVE_QUERIES:
        return f"it takes up to {MAX_NATIVE_QUERIES} queries, not {facts.queries}"
    return None if _should_absorb(facts) else "expanding the keys costs no more FLOPs than absorbing"


def _expanded_unsupported(facts: LatentAttentionFacts) -> str | None:
    if facts.queries < facts.keys and facts.expanded_elements > facts.max_expanded_elements:
        return f"expanding the whole state at once would take more than {facts.max_expanded_elements} elements"
    return _should_absorb(facts)


def _absorbed_unsupported(facts: LatentAttentionFacts) -> str | None:
    few = facts.device != "cpu" and facts.scores <= MAX_SCORES
    return "there are few scores, and each tile takes several launches" if few else None


LATENT = Operation(
    "latent",
    (
        Kernel("native", _native, _native_unsupported, traceable=False),
        Kernel("expanded", _expanded, _expanded_unsupported),
        Kernel("tiled", _expanded_tiles, _should_absorb),
        Kernel("absorbed", _absorbed, _absorbed_unsupported),
        Kernel("absorbed_untiled", _absorbed_untiled, lambda facts: None),
        Kernel("reference", reference, lambda facts: None),
    ),
)


def latent_attention_facts(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    most_selected: int | None = None,
    sink: bool = False,
) -> LatentAttentionFacts:
    """The facts of one call of `latent_attention`. most_selected: as in its mask. sink: whether there is one."""
    batch, heads, queries, nope_width = q_nope.shape
    keys, rope_width, value_width = latents.shape[2], q_rope.shape[3], v_up.shape[0] // heads
    return LatentAttentionFacts(
        queries=queries,
        keys=keys,
        latent_rank=k_up.shape[1],
        nope_width=nope_width,
        rope_width=rope_width,
        value_width=value_width,
        expanded_elements=batch * heads * keys * (nope_width + rope_width + value_width),
        max_expanded_elements=MAX_EXPANDED_ELEMENTS.on(latents),
        scores=batch * heads * queries * keys,
        device=device_type(latents),
        most_selected=most_selected,
        native=_native_serves(q_nope, q_rope, latents, k_up, v_up),
        sink=sink,
    )


def _native_serves(*tensors: Tensor) -> bool:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    dtype = tensors[0].dtype
    one_dtype = all(tensor.dtype == dtype for tensor in tensors) and native.unsupported_dtype(dtype) is None
    return one_dtype and native.serves("latent_decode", *tensors)


def latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latents: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    mask: AttentionMask,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend. Shapes as in the module's docstring. `q_rope` and the `k_rope` in `latents` are already rotated."""
    inputs, with_sink = (q_nope, q_rope, latents, k_up, v_up), () if sink is None else (sink,)
    kernel = LATENT.choose(latent_attention_facts(*inputs, mask.most_selected, sink is not None))
    y: Tensor = kernel.run(*inputs, mask, scale, *with_sink)
    return y
