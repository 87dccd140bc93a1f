"""Costs of the mixers, and what several of them share, as arithmetic over their fields (`costs.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from heddle.lab.explore.costs import Costs, Number, costs_of, projection
from heddle.numerics.attention.householder import BLOCK, householder_flops
from heddle.numerics.attention.indexer import indexer_flops
from heddle.numerics.attention.softmax import attention_flops
from heddle.numerics.linear import linear_flops
from heddle.numerics.recurrent.causal_sums import causal_sums_flops
from heddle.numerics.recurrent.convolution import convolution_flops
from heddle.numerics.recurrent.double_softmax import double_softmax_flops
from heddle.numerics.recurrent.gated_delta import delta_rule_flops
from heddle.numerics.recurrent.general_delta import general_delta_flops
from heddle.parts.mixers.compressed_attention import SHARE
from heddle.parts.mixers.linear_attention import MAP_FIELDS
from heddle.parts.mixers.mamba import EXPANSION, WIDTH_OF_RANK
from heddle.parts.mixers.rwkv7 import RANK_FACTORS

if TYPE_CHECKING:
    from heddle.lab.explore.formulas import Quantities


def pair_count(n: Quantities) -> Number:
    """(query, key) pairs that the fields `window` and `causal` leave, as `numerics.attention.mask.visible_pairs`."""
    window = n.default("window", n.tokens)
    each_side = n.least(window, n.tokens - 1)
    both_sides = n.tokens * (2 * each_side + 1) - each_side * (each_side + 1)
    return n.causal * window_pairs(n, window) + (1 - n.causal) * both_sides


def chunk_pair_count(n: Quantities) -> Number:
    """The same pairs where the window is a chunk."""
    width = n.default("window", n.tokens)
    last = n.remainder(n.tokens, width)
    chunks = (n.tokens - last) / width
    causal = chunks * width * (width + 1) / 2 + last * (last + 1) / 2
    return n.causal * causal + (1 - n.causal) * (chunks * width * width + last * last)


def cached_tokens(n: Quantities) -> Number:
    """Tokens with keys and values in the cache: none if the mixer is bidirectional."""
    return n.causal * n.least(n.default("window", n.tokens), n.tokens)


def head_width(n: Quantities, whole: Number) -> Number:
    """`head_dim`, by default `whole` / heads, which must be an integer."""
    no_groups = dict.fromkeys(("kv_heads", "key_heads", "groups"))
    n.refuse((1 - n.has("head_dim")) * n.remainder(whole, n.heads), n.heads, whole, heads=7, **no_groups)
    return n.default("head_dim", whole / n.heads)


def head_groups(n: Quantities, name: str) -> Number:
    """A number of groups of heads, by default one for each head; it must divide the heads."""
    groups = n.default(name, n.heads)
    n.refuse(n.remainder(n.heads, groups), **{name: 3})
    return groups


def check_rotation(n: Quantities, dims: Number) -> None:
    """Declare which rotations of `dims` dims the field `position` allows."""
    partial = n.has("position_rotary_dim")
    rotated = partial * n.position_rotary_dim + (1 - partial) * dims
    for kind, multiple in (("rope", 2), ("axial_rope", 4)):
        refused = n.remainder(rotated, multiple) + n.above(rotated, dims)
        n.refuse(n.equals("position", kind) * refused, rotated, dims, position={"kind": kind, "rotary_dim": 5})


def check_position(n: Quantities, dims: Number) -> None:
    """Declare which rotations and score biases the field `position` allows, in a mixer with the field `causal`."""
    check_rotation(n, dims)
    biased, buckets, later = n.equals("position", "relative_bias"), n.position_buckets, 1 - n.causal
    one_way = n.causal * buckets + later * (buckets - n.remainder(buckets, 2)) / 2
    single = (one_way - n.remainder(one_way, 2)) / 2
    halved = n.above(4, buckets) + n.remainder(buckets, 2)
    few, far = {"kind": "relative_bias", "buckets": 1}, {"kind": "relative_bias", "buckets": 32, "max_distance": 7}
    n.refuse(biased * n.causal * n.above(2, buckets), position=few)
    n.refuse(biased * later * halved, position=few, causal=False)
    is_within = biased * n.above(single + 1, n.position_max_distance) * (1 - n.above(2, one_way))
    n.refuse(is_within, single, position=far)


def check_norm(n: Quantities, width: Number, field: str = "value_dim") -> None:
    """Declare that a norm over the values of a head needs at least two."""
    n.refuse(n.above(2, width), **{field: 1})


def convolution_costs(n: Quantities, channels: Number, bias: Number = 0) -> Costs:
    """A short convolution; its state is its last inputs."""
    return Costs(
        parameters=channels * (n.conv_kernel + bias),
        flops=convolution_flops(n.tokens, channels, n.conv_kernel),
        cached=(n.conv_kernel - 1) * channels,
    )


def delta_rule_costs(n: Quantities, dim: Number, value_dim: Number, steps: Number = 1) -> Costs:
    """The delta rule with keys of `dim` elements and this many steps per token."""
    flops = delta_rule_flops(n.tokens * steps, n.heads, dim, value_dim)
    return Costs(flops=flops, recurrent=n.heads * dim * value_dim)


def preconditioner_costs(n: Quantities, heads: Number, dim: Number) -> Costs:
    """A preconditioner of these heads of keys: two projections, the sums of squares, and three numbers per head."""
    n.refuse(n.preconditioned * n.negative_eigenvalues, preconditioned=True, negative_eigenvalues=True)
    sums = Costs(3 * heads, flops=causal_sums_flops(n.tokens, 1, heads, (1, dim)), recurrent=heads * dim)
    return (projection(n, n.width, 2 * heads) + sums).scaled(n.preconditioned)


@costs_of("mixers", "attention")
def attention(n: Quantities) -> Costs:
    """Projections, sinks, norms of q and k, and visible pairs."""
    groups, dim = head_groups(n, "kv_heads"), head_width(n, n.width)
    value_dim = n.default("value_dim", dim)
    check_position(n, dim)
    beta, length = n.has("temperature_beta"), n.has("temperature_length")
    n.refuse(beta * (1 - length), temperature_beta=0.1)
    n.refuse(length * (1 - beta), temperature_length=100)
    for growth in ("smooth", "stepwise_from_one"):
        n.refuse(n.equals("temperature_growth", growth) * (1 - beta), temperature_growth=growth)
    own_token = n.exclusive * n.causal * n.has("window") * (1 - n.above(n.least(n.window, 2), 1))
    n.refuse(own_token, exclusive=True, window=1)
    n.refuse(n.exclusive * n.above(2, value_dim), exclusive=True, value_dim=1)
    n.refuse(n.chunked * (1 - n.has("window") * n.above(n.least(n.window, 2), 1)), chunked=True)
    n.refuse(n.equals("gate_activation", "softplus") * (1 - n.has("gate")), gate_activation="softplus")
    n.refuse((1 - n.has("qk_norm_weight")) * (1 - n.has("qk_norm")), qk_norm_weight=False)
    n.refuse((1 - n.has("qk_norm_weight")) * n.equals("qk_norm", "per_head"), qk_norm_weight=False, qk_norm="per_head")
    rotates = n.has("qk_norm") * (n.equals("position", "rope") + n.equals("position", "axial_rope"))
    n.refuse(n.norm_after_rotation * (1 - rotates), norm_after_rotation=True)
    bias, values = n.has("bias") - n.equals("bias", "out"), n.heads * value_dim
    has_keys = 1 - n.shared_kv
    relative, extent = n.has("relative_dim"), n.has("relative_extent")
    n.refuse(relative * (1 - extent), relative_dim=8)
    n.refuse(extent * (1 - relative), relative_extent=8)
    single = n.has("window") * (1 - n.above(n.least(n.window, 2), 1))
    for is_there, fields in ((n.forget, {"forget": True}), (relative, {"relative_dim": 8, "relative_extent": 8})):
        n.refuse(is_there * (1 - n.causal), causal=False, **fields)
        n.refuse(is_there * single, window=1, **fields)
    norms = n.equals("qk_norm", "head") * (1 + has_keys) * n.norm(dim)
    norms += n.equals("qk_norm", "projection") * (has_keys * n.norm(groups * dim) + n.norm(n.heads * dim))
    norms += n.equals("qk_norm", "per_head") * (has_keys * n.norm(dim, groups) + n.norm(dim, n.heads))
    norms *= n.has("qk_norm_weight")
    pairs = n.chunked * chunk_pair_count(n) + (1 - n.chunked) * pair_count(n)
    gate = projection(n, n.width, n.heads, bias).scaled(n.equals("gate", "head"))
    gate += projection(n, n.width, values, bias).scaled(n.equals("gate", "channel"))
    own = Costs(
        parameters=n.heads * (n.sink + n.position_buckets) + 2 * n.equals("value_residual", "learned") + norms,
        flops=attention_flops(pairs, 1, n.heads, dim + value_dim),
        cached=has_keys * cached_tokens(n) * groups * (dim + value_dim),
    )
    n.refuse(n.value_norm * n.above(2, value_dim), value_norm=True, value_dim=1)
    logits = Costs(
        n.relative_dim * n.relative_extent, flops=linear_flops(n.tokens * n.heads, n.relative_dim, n.relative_extent)
    )
    by_tokens = (projection(n, n.width, n.heads * n.relative_dim) + logits).scaled(relative)
    by_tokens += (projection(n, n.width, n.heads, 1) + Costs(recurrent=cached_tokens(n) * n.heads)).scaled(n.forget)
    projected = groups * (dim + (1 - n.k_eq_v) * value_dim)
    read = projection(n, n.width, n.heads * dim + has_keys * projected, bias)
    return read + gate + own + by_tokens + projection(n, values, n.width, n.has("bias") - n.equals("bias", "qkv"))


@costs_of("mixers", "differential_attention")
def differential_attention(n: Quantities) -> Costs:
    """Projections, the vectors of λ, the norm, and visible pairs of both maps."""
    groups, dim = head_groups(n, "kv_heads"), head_width(n, n.width / 2)
    value_dim = n.default("value_dim", 2 * dim)
    check_position(n, dim)
    check_norm(n, value_dim)
    own = Costs(
        parameters=4 * dim + n.norm(value_dim) + n.heads * n.position_buckets,
        flops=2 * attention_flops(pair_count(n), 1, n.heads, dim + value_dim),
        cached=cached_tokens(n) * groups * (2 * dim + value_dim),
    )
    read = projection(n, n.width, 2 * n.heads * dim + groups * (2 * dim + value_dim), n.bias)
    return read + own + projection(n, n.heads * value_dim, n.width, n.bias)


@costs_of("mixers", "path_attention")
def path_attention(n: Quantities) -> Costs:
    """Projections, the convolution of w, products of its matrices, and visible pairs; the cache has w and β as well."""
    groups, dim = head_groups(n, "kv_heads"), head_width(n, n.width)
    value_dim, keys = n.default("value_dim", dim), groups * dim
    block, pairs = n.least(BLOCK, n.tokens), n.tokens * (n.tokens + 1) / 2
    own = Costs(
        flops=attention_flops(pairs, 1, n.heads, dim + value_dim)
        + householder_flops(pairs, n.tokens, n.heads, groups, dim, block),
        cached=n.tokens * groups * (2 * dim + value_dim),
        recurrent=n.tokens * groups,
    )
    read = projection(n, n.width, n.heads * dim + groups * (dim + value_dim) + n.vector_rank)
    read += projection(n, n.width, groups, 1) + projection(n, n.vector_rank, keys)
    read += (projection(n, n.width, n.heads, 1) + Costs(recurrent=n.tokens * n.heads)).scaled(n.forget)
    return read + convolution_costs(n, keys) + own + projection(n, n.heads * value_dim, n.width)


def whole(n: Quantities, number: Number, divisor: Number) -> Number:
    """How many times the divisor is in the number."""
    return (number - n.remainder(number, divisor)) / divisor


def window_pairs(n: Quantities, window: Number) -> Number:
    """Visible pairs of a causal window."""
    seen = n.least(window, n.tokens)
    return seen * (seen + 1) / 2 + (n.tokens - seen) * seen


def entry_pairs(n: Quantities, ratio: Number, most: Number) -> Number:
    """Pairs of a query and an entry of a finished block that it sees, at most this many for each query."""
    blocks = whole(n, n.tokens, ratio)
    seen = n.least(most, blocks)
    return ratio * (seen * (seen - 1) / 2 + (blocks - seen) * seen) + (n.tokens - ratio * blocks + 1) * seen


@costs_of("mixers", "compressed_attention")
def compressed_attention(n: Quantities) -> Costs:
    """Projections, pools of blocks, an index over them, and pairs in the window and of the entries that are seen."""
    dim, has_blocks, has_groups, chooses = head_width(n, n.width), *map(n.has, ("compress_ratio", "groups", "top_k"))
    ratio, groups = n.compress_ratio + 1 - has_blocks, n.groups + 1 - has_groups  # 1 where there are none
    index_heads = n.default("index_heads", 1 + n.above(whole(n, n.heads, SHARE), 1))
    index_dim, rope_dim = n.default("index_head_dim", dim), n.default("rope_dim", dim)
    rank = n.default("out_rank", 1 + n.above(whole(n, n.heads / groups * dim, SHARE), 1))
    check_norm(n, dim, "head_dim")
    n.refuse(n.remainder(n.heads, groups), groups=3)
    n.refuse(n.has("out_rank") * (1 - has_groups), out_rank=3)
    for name in ("index_heads", "index_head_dim", "index_loss"):
        n.refuse(n.has(name) * (1 - chooses), **{name: 3})
    n.refuse(n.overlap * (1 - has_blocks), overlap=True)
    n.refuse(chooses * (1 - has_blocks), top_k=3)
    n.refuse(n.above(n.compress_ratio - 1, n.window), n.compress_ratio, n.compress_ratio - 1, compress_ratio=200)
    n.refuse(n.above(n.query_rank, n.width), n.query_rank, query_rank=700)
    rotates = n.has("position")
    n.refuse(n.has("rope_dim") * (1 - rotates), rope_dim=4)
    rotary: dict[str, Any] = {"position": {"kind": "rope"}}
    index = {"compress_ratio": 4, "top_k": 3}
    n.refuse(rotates * n.above(rope_dim, dim), dim, rope_dim=62, **rotary)
    n.refuse(rotates * chooses * n.above(rope_dim, index_dim), index_head_dim=6, **index, **rotary)
    n.refuse(chooses * n.above(2, index_dim), index_head_dim=1, **index)
    check_rotation(n, rope_dim)
    dynamic = n.equals("position_scaling", "longrope")
    dynamic += n.equals("position_scaling", "ntk") * n.has("position_scaling_original_length")
    n.refuse(n.equals("position", "axial_rope") + dynamic, position={"kind": "axial_rope"})
    series = 1 + n.overlap
    entries = chooses * n.default("top_k", n.tokens) + (1 - chooses) * n.tokens
    pairs = window_pairs(n, n.window) + has_blocks * entry_pairs(n, ratio, entries)
    stored = has_blocks * (dim + chooses * index_dim)
    blocks = whole(n, n.tokens - 1, ratio) + 1
    own = Costs(
        parameters=n.heads * n.sink + n.norm(dim),
        flops=attention_flops(pairs, 1, n.heads, 2 * dim),
        cached=n.least(n.window, n.tokens) * dim + stored * (blocks + (series * ratio - 1) * 2 * series),
    )
    pools = Costs(parameters=series * ratio * stored + has_blocks * (n.norm(dim) + chooses * n.norm(index_dim)))
    pools += projection(n, n.width, 2 * series * stored)
    has_rank = n.has("query_rank")
    query_width = has_rank * n.query_rank + (1 - has_rank) * n.width
    queries = (projection(n, n.width, n.query_rank) + Costs(parameters=n.norm(n.query_rank))).scaled(has_rank)
    selects = n.least(1, n.above(blocks, n.top_k))
    scores = indexer_flops(entry_pairs(n, ratio, n.tokens), 1, index_heads, index_dim)
    indexes = projection(n, query_width, index_heads * index_dim) + projection(n, n.width, index_heads)
    indexes += Costs(flops=selects * scores)
    values = n.heads * dim
    out = projection(n, values, n.width).scaled(1 - has_groups)
    out += (projection(n, values, rank) + projection(n, groups * rank, n.width)).scaled(has_groups)
    read = projection(n, n.width, dim) + queries + projection(n, query_width, values)
    return read + pools + indexes.scaled(chooses) + own + out


@costs_of("mixers", "native_sparse_attention")
def native_sparse_attention(n: Quantities) -> Costs:
    """Projections, gates, scores of all keys, and pairs of three branches; the cache has means of blocks, too."""
    groups, dim = head_groups(n, "kv_heads"), head_width(n, n.width)
    value_dim, taken = n.default("value_dim", dim), n.local + n.first
    check_rotation(n, dim)
    n.refuse(n.above(taken + 1, n.top_k), taken + 1, top_k=2)
    pairs = entry_pairs(n, n.block, n.tokens) + window_pairs(n, n.top_k * n.block) + window_pairs(n, n.window)
    selects = n.least(1, n.above(whole(n, n.tokens + n.block - 2, n.block) + 1, n.top_k))
    scores = indexer_flops(window_pairs(n, n.tokens), 1, n.heads, dim, False)
    blocks = whole(n, n.tokens - 1, n.block) + 1
    own = Costs(
        flops=attention_flops(pairs, 1, n.heads, dim + value_dim) + selects * scores,
        cached=(n.tokens + blocks + n.block - 1) * groups * (dim + value_dim),
    )
    read = projection(n, n.width, n.heads * (dim + 3) + groups * (dim + value_dim))
    return read + own + projection(n, n.heads * value_dim, n.width)


@costs_of("mixers", "latent_attention")
def latent_attention(n: Quantities) -> Costs:
    """Projections down and up, and visible pairs of expanded keys; the cache holds latents."""
    value_dim, dim = n.default("value_dim", n.nope_dim), n.nope_dim + n.rope_dim
    queries, pairs = n.has("query_rank"), n.tokens * (n.tokens + 1) / 2
    rotary, rotates = {"position": {"kind": "rope"}}, n.has("position")
    n.refuse(n.above(n.kv_rank, n.width), n.kv_rank, kv_rank=700)
    n.refuse(n.above(n.query_rank, n.width), n.query_rank, query_rank=700)
    n.refuse(n.has("query_norm") * (1 - queries), query_norm="rms")
    of_queries = n.equals("gate_input", "queries")
    n.refuse(of_queries * (1 - n.has("gate")), gate_input="queries", query_rank=60)
    n.refuse(of_queries * n.has("gate") * (1 - queries), gate_input="queries", gate="head", query_rank=None)
    normless = n.equals("kv_norm", "none") * (1 - queries * (1 - n.equals("query_norm", "none")))
    n.refuse(n.has("norm_eps") * normless, norm_eps=1e-5, kv_norm="none")
    n.refuse(rotates * (1 - n.has("rope_dim")), rope_dim=None, **rotary)
    n.refuse(rotates * n.remainder(n.rope_dim, 2), rope_dim=5, **rotary)
    check_rotation(n, n.rope_dim)
    norms = (1 - n.equals("kv_norm", "none")) * n.kv_rank + (1 - n.equals("query_norm", "none")) * n.query_rank
    own = Costs(
        parameters=norms + n.heads * n.sink,
        flops=attention_flops(pairs, 1, n.heads, dim + value_dim),
        cached=n.tokens * (n.kv_rank + n.rope_dim),
    )
    direct = projection(n, n.width, n.heads * dim, n.query_bias)
    by_latent = projection(n, n.width, n.query_rank, n.bias)
    query_input = n.query_rank * (1 + n.equals("query_norm", "beside"))
    by_latent += projection(n, query_input, n.heads * dim, n.query_bias)
    read = direct.scaled(1 - queries) + by_latent.scaled(queries)
    read += projection(n, n.width, n.kv_rank + n.rope_dim, n.bias)
    read += projection(n, n.kv_rank, n.heads * (n.nope_dim + value_dim))
    gates = n.equals("gate", "head") * n.heads + n.equals("gate", "channel") * n.heads * value_dim
    read += projection(n, n.width, gates).scaled(1 - of_queries) + projection(n, query_input, gates).scaled(of_queries)
    return read + own + projection(n, n.heads * value_dim, n.width, n.bias)


@costs_of("mixers", "cross_attention")
def cross_attention(n: Quantities) -> Costs:
    """Projections of both sequences, and all pairs; double softmax keeps one matrix for each group."""
    groups, dim = head_groups(n, "kv_heads"), head_width(n, n.width)
    value_dim, encoder_width = n.default("value_dim", dim), n.default("encoder_width", n.width)
    bias, double = n.has("bias"), n.equals("normalization", "double_softmax")
    n.refuse(double * n.has("scale"), scale=0.1, normalization="double_softmax")
    n.refuse(double * (1 - n.above(n.least(dim, 2), 1)), head_dim=1, normalization="double_softmax")
    pairs = n.tokens * n.tokens
    softmax_flops = attention_flops(pairs, 1, n.heads, dim + value_dim)
    double_flops = double_softmax_flops(1, n.heads * n.tokens, groups * n.tokens, dim * value_dim)
    own = Costs(
        flops=(1 - double) * softmax_flops + double * double_flops,
        cached=(1 - double) * n.tokens * groups * (dim + value_dim),
        recurrent=double * groups * dim * value_dim,
    )
    read = projection(n, n.width, n.heads * dim, bias)
    read += projection(n, encoder_width, groups * (dim + value_dim), bias)
    return read + own + projection(n, n.heads * value_dim, n.width, bias - n.equals("bias", "qkv"))


@costs_of("mixers", "linear_attention")
def linear_attention(n: Quantities) -> Costs:
    """Projections, learned feature maps, and the sums; double softmax has no denominator."""
    dim = head_width(n, n.width)
    value_dim, double = n.default("value_dim", dim), n.equals("normalization", "double_softmax")
    learned, key_learned = n.equals("feature_map", "learned"), n.equals("key_feature_map", "learned")
    both_sides: dict[str, Any] = {"normalization": "double_softmax", "causal": False}
    n.refuse(double * n.causal, normalization="double_softmax")
    n.refuse(double * (1 - n.above(n.least(dim, 2), 1)), head_dim=1, **both_sides)
    for name in (*MAP_FIELDS, "position"):
        n.refuse(double * n.has(name), **both_sides, **{name: {"kind": "rope"} if name == "position" else "elu"})
    given, key_given = n.has("feature_map"), n.has("key_feature_map")
    differs = (1 - double) * key_given * (learned + key_learned - 2 * learned * key_learned)
    maps_given = n.key_feature_map, n.feature_map
    n.refuse(differs * given, *maps_given, feature_map="learned", key_feature_map="relu")
    n.refuse(differs * (1 - given), key_feature_map="learned")
    n.refuse(n.has("position_cast"), position={"kind": "rope", "cast": "after"})
    features = dim * (1 + learned)
    check_rotation(n, features)
    maps = Costs(parameters=2 * n.heads * dim * dim, flops=4 * n.tokens * n.heads * dim * dim).scaled(learned)
    own = Costs(
        flops=causal_sums_flops(n.tokens, 1, n.heads, (features, value_dim + 1 - double)),
        recurrent=n.causal * n.heads * features * (value_dim + 1),
    )
    read = projection(n, n.width, 2 * n.heads * dim + n.heads * value_dim)
    return read + maps + own + projection(n, n.heads * value_dim, n.width)


@costs_of("mixers", "retention")
def retention(n: Quantities) -> Costs:
    """Projections, a norm for each head or for all of them, and the recurrence."""
    dim = head_width(n, n.width)
    value_dim = n.default("value_dim", dim)
    check_rotation(n, dim)
    check_norm(n, value_dim)
    together = n.equals("output_norm", "projection")
    norms = together * n.norm(n.heads * value_dim) + (1 - together) * n.norm(value_dim, n.heads)
    own = Costs(
        parameters=norms + n.equals("decay", "learned") * n.heads,
        flops=causal_sums_flops(n.tokens, 1, n.heads, (dim, value_dim)),
        recurrent=n.heads * dim * value_dim,
    )
    values = n.heads * value_dim
    read = projection(n, n.width, 2 * n.heads * dim + values + n.has("gate") * values)
    return read + own + projection(n, values, n.width)


@costs_of("mixers", "gated_delta")
def gated_delta(n: Quantities) -> Costs:
    """Projections, the convolution, decay and norm, and the delta rule."""
    key_heads, dim = head_groups(n, "key_heads"), head_width(n, n.width)
    value_dim = n.default("value_dim", dim)
    values, keys = n.heads * value_dim, (1 + n.steps) * key_heads * dim
    check_norm(n, value_dim)
    own = Costs(parameters=2 * n.heads + n.norm(value_dim)) + delta_rule_costs(n, dim, value_dim, n.steps)
    read = projection(n, n.width, keys + (1 + n.steps) * (values + n.heads))
    n.refuse(n.preconditioned * n.above(n.steps, 1), preconditioned=True, steps=2)
    read += preconditioner_costs(n, key_heads, dim)
    return read + convolution_costs(n, keys + n.steps * values) + own + projection(n, values, n.width)


@costs_of("mixers", "kda")
def kda(n: Quantities) -> Costs:
    """Projections, low-rank or whole ones for decay and gate, the convolution and norm, and the delta rule."""
    dim = head_width(n, n.width)
    value_dim, rank = n.default("value_dim", dim), n.default("gate_rank", dim)
    values, keys = n.heads * value_dim, 2 * n.heads * dim
    check_norm(n, value_dim)
    own = Costs(parameters=n.heads * (1 + dim) + n.norm(value_dim)) + delta_rule_costs(n, dim, value_dim)
    gates = n.channel_gates * n.heads * (dim + value_dim) + (1 - n.channel_gates) * n.heads
    n.refuse(n.full_gates * n.has("gate_rank"), full_gates=True, gate_rank=3)
    read = projection(n, n.width, keys + values + gates) + preconditioner_costs(n, n.heads, dim)
    low_rank = projection(n, n.width, 2 * rank) + projection(n, rank, n.heads * dim + values)
    whole = projection(n, n.width, n.heads * dim + values)
    read += low_rank.scaled(1 - n.full_gates) + whole.scaled(n.full_gates)
    return read + convolution_costs(n, keys + values) + own + projection(n, values, n.width)


@costs_of("mixers", "rwkv7")
def rwkv7(n: Quantities) -> Costs:
    """Projections, low-rank ones, vectors, the norm of each head, and the generalized delta rule."""
    dim = head_width(n, n.width)
    value_dim = n.default("value_dim", dim)
    keys, values = n.heads * dim, n.heads * value_dim
    decay, rate, gate, value = (
        n.default(name, default_rank(n, factor * n.width**0.5)) for name, factor in RANK_FACTORS.items()
    )
    check_norm(n, value_dim)
    n.refuse(n.has("value_rank") * (1 - n.value_residual), value_rank=3)
    own = Costs(
        parameters=6 * n.width + 5 * keys + n.norm(value_dim, n.heads),
        flops=general_delta_flops(n.tokens, n.heads, dim, value_dim),
        cached=n.width,
        recurrent=n.heads * dim * value_dim,
    )
    residual = projection(n, n.width, value) + projection(n, value, values) + Costs(parameters=values)
    read = projection(n, n.width, 2 * keys + values + decay + rate + gate) + residual.scaled(n.value_residual)
    read += projection(n, decay + rate, keys) + projection(n, gate, values)
    return read + own + projection(n, values, n.width)


def default_rank(n: Quantities, near: Number) -> Number:
    """The multiple of 32 nearest to a number, at least 32; in a tie the smaller one."""
    below = 1024.5 - near / 32
    return 32 * (1 + n.above(1024 - (below - n.remainder(below, 1)), 1))


@costs_of("mixers", "mamba")
def mamba(n: Quantities) -> Costs:
    """Projections, the convolution, A, b, D and norms, and a state for each channel."""
    hidden, above = n.default("hidden", EXPANSION * n.width), (n.width + WIDTH_OF_RANK - 1) / WIDTH_OF_RANK
    rank = n.default("time_step_rank", above - n.remainder(above, 1))
    for field, width in (("time_step_rank", rank), ("state_size", n.state_size)):
        n.refuse(n.has("norm") * n.above(2, width), norm={"kind": "rms"}, **{field: 1})
    own = Costs(
        parameters=hidden * (n.state_size + 2) + n.has("norm") * (n.norm(rank) + 2 * n.norm(n.state_size)),
        flops=causal_sums_flops(n.tokens, 1, hidden, (n.state_size, 1)),
        recurrent=hidden * n.state_size,
    )
    read = projection(n, n.width, 2 * hidden, n.bias) + convolution_costs(n, hidden, n.conv_bias)
    read += projection(n, hidden, rank + 2 * n.state_size) + projection(n, rank, hidden)
    return read + own + projection(n, hidden, n.width, n.bias)


@costs_of("mixers", "rg_lru")
def rg_lru(n: Quantities) -> Costs:
    """Projections, the convolution, two gates of blocks, Λ, and a state of one number for each channel."""
    hidden = n.default("hidden", n.width)
    n.refuse(n.remainder(hidden, n.heads), n.heads, hidden, heads=7)
    own = Costs(parameters=hidden, flops=2 * n.tokens * hidden, recurrent=hidden)
    gates = projection(n, hidden, 2 * hidden / n.heads) + Costs(parameters=2 * hidden)
    read = projection(n, n.width, 2 * hidden, n.bias) + convolution_costs(n, hidden, 1)
    return read + gates + own + projection(n, hidden, n.width, n.bias)


@costs_of("mixers", "mamba2")
def mamba2(n: Quantities) -> Costs:
    """Projections, the convolution, decay, skip and norm, and the recurrence."""
    groups, dim = head_groups(n, "groups"), head_width(n, 2 * n.width)
    values, keys = n.heads * dim, groups * n.state_size
    without_norm = n.equals("gated_norm", "none")
    n.refuse(without_norm * n.has("norm"), gated_norm="none", norm={"kind": "rms"})
    own = Costs(
        parameters=3 * n.heads + (1 - without_norm) * n.norm(values / groups, groups),
        flops=causal_sums_flops(n.tokens, 1, n.heads, (n.state_size, dim)),
        recurrent=n.heads * n.state_size * dim,
    )
    read = projection(n, n.width, 2 * (values + keys) + n.heads, n.bias)
    convolution = convolution_costs(n, values + 2 * keys, n.conv_bias)
    return read + convolution + own + projection(n, values, n.width, n.bias)


@costs_of("mixers", "short_conv")
def short_conv(n: Quantities) -> Costs:
    """Four projections and the convolution."""
    read = projection(n, n.width, 3 * n.width, n.bias)
    return read + convolution_costs(n, n.width, n.conv_bias) + projection(n, n.width, n.width, n.bias)


@costs_of("mixers", "pair")
def pair(n: Quantities) -> Costs:
    """Nothing beside the costs of both mixers."""
    first, second = n.is_false("first_causal"), n.is_false("second_causal")
    both_sides = {"kind": "attention", "heads": 8, "causal": False}
    n.refuse(first + second - 2 * first * second, second=both_sides)
    return Costs()
