"""Costs of the kinds of parts, and constraints between their fields, as arithmetic over the fields.

A function computes with numbers that stand for the fields of a kind, so the same lines serve any kind of number:
`formulas` turns them into JavaScript. Your own part may have such a function, under `@costs_of`, which puts its costs
into the explorer. `model/size.py` measures built models instead, and tests compare the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from heddle.numerics.attention.householder import BLOCK, householder_flops
from heddle.numerics.attention.softmax import attention_flops
from heddle.numerics.linear import linear_flops
from heddle.numerics.recurrent.causal_sums import causal_sums_flops
from heddle.numerics.recurrent.convolution import convolution_flops
from heddle.numerics.recurrent.double_softmax import double_softmax_flops
from heddle.numerics.recurrent.gated_delta import delta_rule_flops
from heddle.numerics.recurrent.general_delta import general_delta_flops
from heddle.parts.mixers.linear_attention import MAP_FIELDS
from heddle.parts.mixers.rwkv7 import RANK_FACTORS

Number = Any  # an int, a float or a symbol


class Quantities(Protocol):
    """The fields of a part as numbers, and its surroundings.

    width: of the stream. tokens: of the sequence; an encoder output has as many. branches: per layer. layers,
    all_branches: of the design. count: equal layers in a row, for which the mean is computed; layers_before,
    branches_before: below them. A field is an attribute: a missing or false one counts 0, true counts 1.
    """

    width: Number
    tokens: Number
    branches: Number
    layers: Number
    all_branches: Number
    count: Number
    layers_before: Number
    branches_before: Number

    def __getattr__(self, name: str) -> Number:
        """A field. A field of a part within this one: `position_buckets`. The length of a list: `count_decay`."""

    def default(self, name: str, value: Number) -> Number:
        """A field with `value` as its default."""

    def has(self, name: str) -> Number:
        """1 if a field is given and not false, else 0."""

    def is_false(self, name: str) -> Number:
        """1 if a field is false, else 0."""

    def equals(self, name: str, value: str) -> Number:
        """1 if a field is this word, or a part of this kind, else 0."""

    def least(self, first: Number, second: Number) -> Number:
        """The smaller number."""

    def above(self, number: Number, limit: Number) -> Number:
        """max(number − limit, 0)."""

    def remainder(self, number: Number, divisor: Number) -> Number:
        """number mod divisor. Never a factor: sympy 1.14 prints a · (b mod c) as (a · b) mod c."""

    def norm(self, width: Number, heads: Number = 1) -> Number:
        """The parameters of a norm over `width` elements, or of one for each head."""

    def refuse(self, condition: Number, *shown: Number, **witness: Any) -> None:
        """Declare that the config rejects its fields if `condition` is above 0.

        witness: fields that are rejected for this reason. The config's own error message about them gives the
        reason. shown: the numbers of that message that are neither the field itself nor named (`heads = 8`).
        """


@dataclass(frozen=True)
class Costs:
    """The costs of a part, for one sequence of `tokens` tokens.

    parameters: all. inactive: parameters that a token does not use. flops: of the matrix products of a forward pass; a
    multiply-add is two, and only visible pairs count. cached: elements of the state in the model's dtype. recurrent:
    elements of the state that are float32 at least.
    """

    parameters: Number = 0
    inactive: Number = 0
    flops: Number = 0
    cached: Number = 0
    recurrent: Number = 0

    def __add__(self, other: "Costs") -> "Costs":
        """The costs of both parts."""
        return Costs(*(mine + its for mine, its in zip(self._values, other._values, strict=True)))

    def scaled(self, count: Number) -> "Costs":
        """The costs of `count` such parts; a count of 0 or 1 switches an option."""
        return Costs(*(count * value for value in self._values))

    @property
    def _values(self) -> tuple[Number, ...]:
        return self.parameters, self.inactive, self.flops, self.cached, self.recurrent


CostFunction = Callable[[Quantities], Costs]
F = TypeVar("F", bound=CostFunction)
cost_functions: dict[tuple[str, str], CostFunction] = {}


def costs_of(slot: str, *kinds: str) -> Callable[[F], F]:
    """Declare the costs of kinds of a slot: `@costs_of("mixers", "ema")` above a function of their `Quantities`.

    The slot "final" is the module after the last layer, by kind of residual.
    """

    def declare(function: F) -> F:
        cost_functions.update(dict.fromkeys(((slot, kind) for kind in kinds), function))
        return function

    return declare


def cost_function(slot: str, kind: str) -> CostFunction | None:
    """The function declared for a kind, or for all kinds of its slot; None without either."""
    return cost_functions.get((slot, kind)) or cost_functions.get((slot, "*"))


# Shared by several kinds


def projection(n: Quantities, inputs: Number, outputs: Number, bias: Number = 0) -> Costs:
    """A projection of every token. bias: 1 or 0."""
    return Costs(parameters=(inputs + bias) * outputs, flops=linear_flops(n.tokens, inputs, outputs))


def pair_count(n: Quantities) -> Number:
    """(query, key) pairs that the fields `window` and `causal` leave, as `numerics.attention.mask.visible_pairs`."""
    seen = n.least(n.default("window", n.tokens), n.tokens)
    each_side = n.least(n.default("window", n.tokens), n.tokens - 1)
    causal = seen * (seen + 1) / 2 + (n.tokens - seen) * seen
    both_sides = n.tokens * (2 * each_side + 1) - each_side * (each_side + 1)
    return n.causal * causal + (1 - n.causal) * both_sides


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


def check_norm(n: Quantities, width: Number) -> None:
    """Declare that a norm over the values of a head needs at least two."""
    n.refuse(n.above(2, width), value_dim=1)


def check_activation(n: Quantities) -> None:
    """Declare which activations take `limit` and `alpha`."""
    for name in ("limit", "alpha"):
        n.refuse((1 - n.equals("activation", "swiglu_clamped")) * n.has(name), **{name: 3.0})


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


# Mixers


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
    key_norm, query_norm = has_keys * n.norm(groups * dim), n.norm(n.heads * dim)
    norms = n.equals("qk_norm", "head") * (1 + has_keys) * n.norm(dim)
    norms += (n.equals("qk_norm", "projection") + n.equals("qk_norm", "per_head")) * (key_norm + query_norm)
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
    return read + convolution_costs(n, keys) + own + projection(n, n.heads * value_dim, n.width)


@costs_of("mixers", "latent_attention")
def latent_attention(n: Quantities) -> Costs:
    """Projections down and up, and visible pairs of expanded keys; the cache holds latents."""
    value_dim, dim = n.default("value_dim", n.nope_dim), n.nope_dim + n.rope_dim
    queries, pairs = n.has("query_rank"), n.tokens * (n.tokens + 1) / 2
    rotary, rotates = {"position": {"kind": "rope"}}, n.has("position")
    n.refuse(n.above(n.kv_rank, n.width), n.kv_rank, kv_rank=700)
    n.refuse(n.above(n.query_rank, n.width), n.query_rank, query_rank=700)
    n.refuse(n.has("query_norm") * (1 - queries), query_norm="rms")
    n.refuse(rotates * (1 - n.has("rope_dim")), rope_dim=None, **rotary)
    n.refuse(rotates * n.remainder(n.rope_dim, 2), rope_dim=5, **rotary)
    check_rotation(n, n.rope_dim)
    norms = (1 - n.equals("kv_norm", "none")) * n.kv_rank + (1 - n.equals("query_norm", "none")) * n.query_rank
    own = Costs(
        parameters=norms,
        flops=attention_flops(pairs, 1, n.heads, dim + value_dim),
        cached=n.tokens * (n.kv_rank + n.rope_dim),
    )
    direct = projection(n, n.width, n.heads * dim, n.query_bias)
    by_latent = projection(n, n.width, n.query_rank, n.bias)
    by_latent += projection(n, n.query_rank, n.heads * dim, n.query_bias)
    read = direct.scaled(1 - queries) + by_latent.scaled(queries)
    read += projection(n, n.width, n.kv_rank + n.rope_dim, n.bias)
    read += projection(n, n.kv_rank, n.heads * (n.nope_dim + value_dim))
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
    """Projections, low-rank ones for decay and gate, the convolution and norm, and the delta rule."""
    dim = head_width(n, n.width)
    value_dim, rank = n.default("value_dim", dim), n.default("gate_rank", dim)
    values, keys = n.heads * value_dim, 2 * n.heads * dim
    check_norm(n, value_dim)
    own = Costs(parameters=n.heads * (1 + dim) + n.norm(value_dim)) + delta_rule_costs(n, dim, value_dim)
    gates = n.channel_gates * n.heads * (dim + value_dim) + (1 - n.channel_gates) * n.heads
    read = projection(n, n.width, keys + values + gates + 2 * rank) + preconditioner_costs(n, n.heads, dim)
    read += projection(n, rank, n.heads * dim + values)
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


@costs_of("mixers", "mamba2")
def mamba2(n: Quantities) -> Costs:
    """Projections, the convolution, decay, skip and norm, and the recurrence."""
    groups, dim = head_groups(n, "groups"), head_width(n, 2 * n.width)
    values, keys = n.heads * dim, groups * n.state_size
    without_norm = n.equals("gated_norm", "none")
    n.refuse(without_norm * n.has("norm"), gated_norm="none", norm={"kind": "rms"})
    own = Costs(
        parameters=3 * n.heads + (1 - without_norm) * n.norm(values),
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


# Feed-forwards


@costs_of("feedforwards", "mlp")
def mlp(n: Quantities) -> Costs:
    """Two projections, and the four numbers of a learned activation."""
    activation = Costs(parameters=4 * n.equals("activation", "xielu"))
    return projection(n, n.width, n.hidden, n.bias) + projection(n, n.hidden, n.width, n.bias) + activation


@costs_of("feedforwards", "gated")
def gated(n: Quantities) -> Costs:
    """Three projections."""
    check_activation(n)
    n.refuse(n.has("sparsity") * n.above(2, n.hidden), sparsity=0.5, hidden=1)
    return projection(n, n.width, 2 * n.hidden, n.bias) + projection(n, n.hidden, n.width, n.bias)


@costs_of("feedforwards", "moe")
def moe(n: Quantities) -> Costs:
    """The router, `top_k` of `experts` experts, and the shared one."""
    _check_mixture(n)
    gated, all_biased = 1 - n.equals("expert", "mlp"), n.has("bias") - n.equals("bias", "shared")
    shared_hidden = n.default("shared_hidden", n.shared * n.hidden)
    expert = (2 + gated) * n.width * n.hidden + all_biased * ((1 + gated) * n.hidden + n.width)
    experts = Costs(
        parameters=n.experts * expert,
        inactive=(n.experts - n.top_k) * expert,
        flops=2 * n.tokens * n.top_k * n.width * n.hidden * (2 + gated),
    )
    layered, rank, biases = n.has("router_rank"), n.router_rank, n.router_bias + n.has("bias_update")
    trunk = projection(n, n.width + 2 * rank, rank) + projection(n, rank, n.experts, biases)
    trunk += Costs(parameters=3 * rank + n.norm(rank))
    router = projection(n, n.width, n.experts, biases).scaled(1 - layered) + trunk.scaled(layered)
    shared = projection(n, n.width, (1 + gated) * shared_hidden, n.has("bias"))
    shared += projection(n, shared_hidden, n.width, n.has("bias"))
    return router + experts + shared.scaled(n.has("shared")) + projection(n, n.width, 1).scaled(n.shared_gate)


def _check_mixture(n: Quantities) -> None:
    """Declare which mixtures are rejected."""
    shared, renormalized = n.has("shared"), n.has("renormalize")
    n.refuse(n.above(n.top_k, n.experts), top_k=9)
    n.refuse(n.equals("routing", "topk_softmax") * (1 - renormalized), routing="topk_softmax", renormalize=False)
    eps, softmax = n.has("renormalize_eps"), n.equals("routing", "topk_softmax")
    n.refuse(eps * (1 - renormalized) * (1 - softmax), renormalize=False, renormalize_eps=0.1)
    n.refuse(eps * renormalized * softmax, routing="topk_softmax", renormalize_eps=0.1)
    n.refuse((1 - shared) * n.has("shared_hidden"), shared=None, shared_hidden=40)
    n.refuse((1 - shared) * (1 - n.has("shared_hidden")) * n.shared_gate, shared=None, shared_gate=True)
    n.refuse((1 - shared) * n.has("shared_scale"), shared=None, shared_scale=0.5)
    n.refuse(n.has("shared_hidden") * n.above(n.shared, 1), shared=3, shared_hidden=40)
    n.refuse((1 - shared) * n.equals("bias", "shared"), shared=None, bias="shared")
    n.refuse(n.has("router_rank") * n.above(2, n.router_rank), router_rank=1)
    without_gate = n.equals("expert", "mlp") * n.equals("activation", "swiglu_clamped")
    n.refuse(without_gate, expert="mlp", activation="swiglu_clamped")
    check_activation(n)
    by_group, groups, top_groups = n.equals("routing", "softmax_group_max"), n.has("groups"), n.has("top_groups")
    hashed, one = n.equals("selection", "hash"), 1 - n.above(n.least(n.top_k, 2), 1)
    n.refuse((1 - hashed) * n.hash_seed, hash_seed=1)
    n.refuse(hashed * (1 - groups) * n.equals("routing", "sigmoid_logits"), selection="hash", routing="sigmoid_logits")
    n.refuse(hashed * groups, selection="hash", routing="sigmoid", groups=2, top_groups=1)
    n.refuse(hashed * n.has("bias_update"), selection="hash", bias_update=0.1)
    n.refuse(hashed * (1 - n.above(n.experts, n.top_k)), selection="hash", top_k=8)
    gate_is_one = one * (1 - eps) * (1 - (1 - renormalized) * (1 - softmax))
    n.refuse(hashed * gate_is_one, selection="hash", top_k=1)
    sigmoid = n.equals("routing", "sigmoid")
    others = 1 - sigmoid - by_group
    n.refuse(others * groups, n.routing, routing="softmax_topk", groups=4)
    n.refuse(others * (1 - groups) * top_groups, n.routing, routing="softmax_topk", top_groups=2)
    n.refuse((1 - groups) * (sigmoid * top_groups + by_group), routing="softmax_group_max")
    n.refuse((sigmoid + by_group) * groups * (1 - top_groups), routing="sigmoid", groups=4)
    both, size = (sigmoid + by_group) * groups * top_groups, n.experts / n.default("groups", 1)
    n.refuse(both * n.remainder(n.experts, n.default("groups", 1)), routing="sigmoid", groups=3, top_groups=2)
    n.refuse(both * sigmoid * n.above(2, size), routing="sigmoid", groups=8, top_groups=2)
    n.refuse(both * n.above(n.top_groups, n.groups), routing="sigmoid", groups=4, top_groups=5)
    selectable = n.top_groups * size
    n.refuse(both * n.above(n.top_k, selectable), selectable, routing="sigmoid", groups=4, top_groups=1, top_k=3)


# Norms, positions and scalings


@costs_of("norms", "*")
def norm(n: Quantities) -> Costs:
    """A weight for each element."""
    return Costs(parameters=n.width)


@costs_of("norms", "rms")
def rms(n: Quantities) -> Costs:
    """A weight for each element, if there is one."""
    n.refuse(n.is_false("weight") * n.offset * n.offset, weight=False, offset=1.0)
    n.refuse(n.is_false("weight") * n.equals("cast", "after"), weight=False, cast="after")
    return Costs(parameters=n.width * (1 - n.is_false("weight")))


@costs_of("norms", "layer")
def layer_norm(n: Quantities) -> Costs:
    """A weight and a bias for each element, if there are any."""
    n.refuse(n.is_false("weight") * n.bias, weight=False, bias=True)
    n.refuse(n.is_false("weight") * n.offset * n.offset, weight=False, offset=1.0, bias=False)
    return Costs(parameters=n.width * (1 - n.is_false("weight") + n.bias))


@costs_of("positions", "learned")
def learned(n: Quantities) -> Costs:
    """The table."""
    return Costs(parameters=(n.length + n.offset) * n.width)


@costs_of("positions", "sinusoidal")
def sinusoidal(n: Quantities) -> Costs:
    """Nothing."""
    return Costs()


@costs_of("scalings", "*")
def scaling(n: Quantities) -> Costs:
    """No costs; it needs frequencies to scale. `rotation_base` and `rotation_dims` belong to the enclosing rotation."""
    n.refuse(n.above(1.000001, n.rotation_base), n.rotation_base, rotation={"base": 0.5})
    return Costs()


@costs_of("scalings", "ntk")
def ntk(n: Quantities) -> Costs:
    """Nothing."""
    n.refuse(n.above(3, n.rotation_dims), rotation={"rotary_dim": 2})
    return scaling(n)


@costs_of("scalings", "llama3")
def llama3(n: Quantities) -> Costs:
    """Nothing."""
    low = n.low_freq_factor
    n.refuse(1 - n.least(n.above(n.high_freq_factor, low) * 1e9, 1), high_freq_factor=3.0, low_freq_factor=5.0)
    return scaling(n)


@costs_of("scalings", "yarn")
def yarn(n: Quantities) -> Costs:
    """Nothing."""
    strength, all_dim = n.has("mscale"), n.has("mscale_all_dim")
    n.refuse(n.above(n.beta_slow, n.beta_fast), beta_fast=3.0, beta_slow=5.0)
    n.refuse(strength * (1 - all_dim), mscale=0.7)
    n.refuse(all_dim * (1 - strength), mscale_all_dim=0.7)
    n.refuse(strength * all_dim * n.has("attention_factor"), mscale=0.7, mscale_all_dim=0.7, attention_factor=1.5)
    return scaling(n)


@costs_of("scalings", "proportional")
def proportional(n: Quantities) -> Costs:
    """Nothing."""
    few = n.above(1, n.rotated_share * n.rotation_dims / 2)
    n.refuse(few, rotated_share=0.5, rotation={"rotary_dim": 2})
    return scaling(n)


@costs_of("scalings", "longrope")
def longrope(n: Quantities) -> Costs:
    """Nothing."""
    factor, own = n.has("factor"), n.has("attention_factor")
    pairs = n.rotation_dims / 2
    n.refuse((1 - factor) * (1 - own), factor=None)
    n.refuse(factor * own, factor=32.0, attention_factor=1.5)
    n.refuse(factor * (1 - own) * n.above(n.factor, 1) * n.above(2, n.original_length), factor=32.0, original_length=1)
    for name, other in (("short_factor", "long_factor"), ("long_factor", "short_factor")):
        count = getattr(n, f"count_{name}")
        differs = n.above(count, pairs) + n.above(pairs, count)
        n.refuse(differs, count, n.rotation_dims, pairs, **{name: [1.0] * 5, other: [1.0] * 30})
    return scaling(n)


# Residuals: a layer's blocks, and the module after the last layer


@costs_of("residuals", "*")
def residual(n: Quantities) -> Costs:
    """A norm for each branch."""
    return Costs(parameters=n.branches * n.norm(n.width))


@costs_of("residuals", "pre_norm")
def pre_norm(n: Quantities) -> Costs:
    """A norm for each branch, and its gate."""
    n.refuse(n.has("gate_rank") * n.is_false("first_norm"), gate_rank=4, first_norm=False)
    gate = projection(n, n.width, n.gate_rank) + projection(n, n.gate_rank, n.width)
    return residual(n) + gate.scaled(n.branches * n.has("gate_rank"))


@costs_of("residuals", "sandwich")
def sandwich(n: Quantities) -> Costs:
    """Two norms for each branch; the learned residual of the first, two projections and a norm; the maps of AltUp."""
    rank = n.laurel_rank
    laurel = projection(n, n.width, rank) + projection(n, rank, n.width) + Costs(parameters=n.norm(n.width))
    streams = n.altup_streams
    maps = projection(n, n.width, streams) + projection(n, streams, streams**2) + projection(n, streams, streams)
    maps += Costs(parameters=n.norm(n.width), flops=2 * n.tokens * n.width * streams * (1 + streams))
    return residual(n).scaled(2) + laurel.scaled(n.has("laurel_rank")) + maps.scaled(n.has("altup_streams"))


@costs_of("residuals", "parallel")
def parallel(n: Quantities) -> Costs:
    """One norm, or one for each branch."""
    n.refuse(n.above(n.norms, 1) * n.above(2, n.branches), norms=2, branches=1)
    return Costs(parameters=n.norms * n.norm(n.width))


@costs_of("residuals", "hyper_connections")
def hyper_connections(n: Quantities) -> Costs:
    """For each branch a norm and its maps, which read all streams; mixing reads and writes them."""
    gated, mixed, streams = n.has("gate_rank"), 1 - n.is_false("mixing"), n.streams * n.width
    n.refuse(gated * mixed, gate_rank=4)
    n.refuse(gated * n.eps, gate_rank=4, mixing=False, eps=0.1)
    n.refuse((1 - mixed) * (n.above(n.iterations, 20) + n.above(20, n.iterations)), mixing=False, iterations=4)
    each = n.streams * (2 + n.streams * mixed)
    maps = projection(n, streams, each, 1) + Costs(parameters=2 + mixed) + _norm_of_streams(n)
    mixing = Costs(flops=2 * n.tokens * streams * (1 + n.streams * mixed))
    gates = _gates(n) + projection(n, streams, n.streams)
    return (residual(n) + (maps + mixing).scaled(n.branches)).scaled(1 - gated) + gates.scaled(n.branches * gated)


def _norm_of_streams(n: Quantities) -> Costs:
    """A norm of all streams together, unless it has no weight."""
    return Costs(parameters=(1 - n.is_false("norm_weight")) * n.norm(n.streams * n.width))


def _gates(n: Quantities) -> Costs:
    """A norm of each stream, and two projections."""
    streams = n.streams * n.width
    gates = projection(n, streams, n.gate_rank) + projection(n, n.gate_rank, streams)
    return gates + Costs(parameters=(1 - n.is_false("norm_weight")) * n.norm(n.width, n.streams))


@costs_of("final", "hyper_connections")
def collapse(n: Quantities) -> Costs:
    """A norm; weights of the streams, or gates in the place of both."""
    weighted, gated, streams = n.equals("collapse", "weighted"), n.has("gate_rank"), n.streams * n.width
    weights = projection(n, streams, n.streams, 1) + Costs(parameters=1, flops=2 * n.tokens * streams)
    weights = final_norm(n) + (weights + _norm_of_streams(n)).scaled(weighted)
    return weights.scaled(1 - weighted * gated) + _gates(n).scaled(weighted * gated)


@costs_of("residuals", "attention_residuals")
def attention_residuals(n: Quantities) -> Costs:
    """A norm and a query for each branch, and products with all sources of its mix."""
    n.refuse(n.above(n.block_size, n.layers), block_size=2)
    n.refuse(n.has("block_size") * n.above(2, n.block_size) * n.above(2, n.branches), block_size=1, branches=1)
    branches, after = n.count * n.branches, n.layers_before + n.count
    in_full = branches * (n.branches_before + 1 + (branches - 1) / 2)
    below, starts = (_blocks(n, after)[i] - _blocks(n, n.layers_before)[i] for i in range(2))
    in_blocks = n.branches * (below + 2 * n.count) - starts
    sources = in_full + n.has("block_size") * (in_blocks - in_full)
    return residual(n) + Costs(parameters=n.branches * n.width) + _mixes(n, sources / n.count)


def _mixes(n: Quantities, sources: Number) -> Costs:
    """Scores and sums over `sources` sources."""
    return Costs(flops=4 * n.tokens * n.width * sources)


def _blocks(n: Quantities, layers: Number) -> tuple[Number, Number]:
    """Over the first layers: the sum of the blocks below each one's own, and how many layers start a block."""
    size = n.block_size + 1 - n.has("block_size")
    rest = n.remainder(layers, size)  # not a factor below: sympy 1.14 prints a · (b mod c) as (a · b) mod c
    whole = (layers - rest) / size
    return whole * layers - size * whole * (whole + 1) / 2, whole + n.least(rest, 1)


@costs_of("final", "attention_residuals")
def last_mix(n: Quantities) -> Costs:
    """A norm, and a query in place of the first branch's, which reads the embedding without a mix."""
    in_blocks = 1 + _blocks(n, n.layers)[1]
    sources = n.all_branches + 1 + n.has("block_size") * (in_blocks - n.all_branches - 1)
    return final_norm(n) + _mixes(n, sources - 1)


@costs_of("final", "*")
def final_norm(n: Quantities) -> Costs:
    """A norm."""
    return Costs(parameters=n.norm(n.width))


@costs_of("final", "sandwich")
def sandwich_final(n: Quantities) -> Costs:
    """A norm, unless it is left out, and AltUp's projections of all streams but one, at both ends."""
    projections = projection(n, n.width, n.width).scaled(2 * (n.altup_streams - 1))
    return optional_final_norm(n) + projections.scaled(n.has("altup_streams"))


@costs_of("final", "reordered", "parallel")
def optional_final_norm(n: Quantities) -> Costs:
    """A norm, unless it is left out."""
    return Costs(parameters=(1 - n.is_false("final_norm")) * n.norm(n.width))


@costs_of("final", "post_norm", "deep_norm")
def no_final_norm(n: Quantities) -> Costs:
    """No costs: the last layer ends in a norm."""
    return Costs()


@costs_of("final", "pre_norm")
def pre_norm_final(n: Quantities) -> Costs:
    """A norm, unless it is left out, less the one that the first layer may lack."""
    return Costs(parameters=(1 - n.is_false("first_norm") - n.is_false("final_norm")) * n.norm(n.width))
