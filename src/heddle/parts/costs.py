"""What a part costs, declared by its kind as plain arithmetic over its fields.

A kind computes with numbers that stand for its fields, so the same lines serve any kind of number: symbols make the
explorer's formulas of them. `model/size.py` measures built models instead; tests compare the two.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from heddle.numerics.linear import linear_flops
from heddle.numerics.recurrent.convolution import convolution_flops
from heddle.numerics.recurrent.gated_delta import delta_rule_flops

Number = Any  # an int, a float or a symbol


class Quantities(Protocol):
    """The fields of a part as numbers, and its surroundings.

    width: of the stream. tokens: of the row; an encoder output has as many. branches: of a layer. A field is an
    attribute: one that is missing or false counts 0, true counts 1.
    """

    width: Number
    tokens: Number
    branches: Number

    def __getattr__(self, name: str) -> Number:
        """A field. A field of a part within this one: `position_buckets`."""

    def default(self, name: str, value: Number) -> Number:
        """A field that is `value` where it is not given."""

    def has(self, name: str) -> Number:
        """1 if a field is given and not false, else 0."""

    def is_false(self, name: str) -> Number:
        """1 if a field is false, else 0."""

    def equals(self, name: str, value: str) -> Number:
        """1 if a field is this word, or a part of this kind, else 0."""

    def least(self, first: Number, second: Number) -> Number:
        """The smaller number."""

    def above(self, number: Number, limit: Number) -> Number:
        """By how much a number is above a limit, else 0."""

    def remainder(self, number: Number, divisor: Number) -> Number:
        """What a division leaves."""

    def norm(self, width: Number, heads: Number = 1) -> Number:
        """The parameters of a norm over `width` elements, or of one for each head."""

    def refuse(self, name: str, condition: Number, reason: str) -> None:
        """State that a field cannot be as it is where `condition` is above 0. reason: ends the field's sentence."""


@dataclass(frozen=True)
class Costs:
    """The costs of a part, for one row of `tokens` tokens.

    parameters: all. inactive: those that a token does not use. flops: of the matrix products of a forward pass; a
    multiply-add is two, and only visible pairs count. cached: elements of the state in the model's dtype. recurrent:
    elements of the state that are float32 at least.
    """

    parameters: Number = 0
    inactive: Number = 0
    flops: Number = 0
    cached: Number = 0
    recurrent: Number = 0

    def __add__(self, other: "Costs") -> "Costs":
        """Both parts."""
        return Costs(*(mine + its for mine, its in zip(self._values, other._values, strict=True)))

    def scaled(self, count: Number) -> "Costs":
        """`count` such parts; 0 or 1 stands for an option."""
        return Costs(*(count * value for value in self._values))

    @property
    def _values(self) -> tuple[Number, ...]:
        return self.parameters, self.inactive, self.flops, self.cached, self.recurrent


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


def cached_tokens(n: Quantities) -> Number:
    """Tokens whose keys and values are in the cache: none if the mixer is bidirectional."""
    return n.causal * n.least(n.default("window", n.tokens), n.tokens)


def head_width(n: Quantities, whole: Number) -> Number:
    """`head_dim`, by default `whole` / heads, which must then be a whole number."""
    missing = 1 - n.has("head_dim")
    n.refuse("heads", missing * n.remainder(whole, n.heads), "do not divide the width; give head_dim")
    return n.default("head_dim", whole / n.heads)


def check_groups(n: Quantities, name: str) -> Number:
    """A number of groups of heads, by default one for each head; it must divide the heads."""
    groups = n.default(name, n.heads)
    n.refuse(name, n.remainder(n.heads, groups), "does not divide heads; choose a divisor of it")
    return groups


def check_rotation(n: Quantities, dims: Number) -> None:
    """State which rotations of `dims` dims the field `position` can be."""
    rope, axial = n.equals("position", "rope"), n.equals("position", "axial_rope")
    partial = n.has("position_rotary_dim")
    rotated = partial * n.position_rotary_dim + (1 - partial) * dims
    n.refuse("position", rope * n.remainder(rotated, 2), "rotates pairs of dims; make their number even")
    n.refuse("position", axial * n.remainder(rotated, 4), "rotates dims in fours; make their number a multiple of 4")
    n.refuse("position", (rope + axial) * n.above(rotated, dims), "rotates more dims than there are; lower rotary_dim")


def check_position(n: Quantities, dims: Number) -> None:
    """State which rotations and which score biases the field `position` can be, in a mixer with the field `causal`."""
    check_rotation(n, dims)
    biased, buckets = n.equals("position", "relative_bias"), n.position_buckets
    one_way = n.causal * buckets + (1 - n.causal) * (buckets - n.remainder(buckets, 2)) / 2
    single = (one_way - n.remainder(one_way, 2)) / 2
    n.refuse("position", biased * n.above(2, one_way), "needs at least 2 buckets in each direction")
    n.refuse("position", biased * (1 - n.causal) * n.remainder(buckets, 2), "needs an even number of buckets")
    n.refuse("position", biased * n.above(single + 1, n.position_max_distance), "needs a larger max_distance")


def check_norm(n: Quantities, width: Number) -> None:
    """State that a norm over the values of a head needs two of them."""
    n.refuse("value_dim", n.above(2, width), "leaves the norm one number; give wider heads")


def convolution_costs(n: Quantities, channels: Number, bias: Number = 0) -> Costs:
    """A short convolution, whose state is its last inputs."""
    return Costs(
        parameters=channels * (n.conv_kernel + bias),
        flops=convolution_flops(n.tokens, channels, n.conv_kernel),
        cached=(n.conv_kernel - 1) * channels,
    )


def delta_rule_costs(n: Quantities, dim: Number, value_dim: Number) -> Costs:
    """The delta rule with keys of `dim` elements."""
    flops = delta_rule_flops(n.tokens, n.heads, dim, value_dim)
    return Costs(flops=flops, recurrent=n.heads * dim * value_dim)
