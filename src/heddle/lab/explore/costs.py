"""Costs of the kinds of parts, and constraints between their fields, as arithmetic over the fields.

A function computes with symbols of the fields of a kind, which `formulas` turns into JavaScript. Your own part may have
such a function, under `@costs_of`, which puts its costs into the explorer. `model/size.py` measures built models
instead, and tests compare the two. `mixer_costs.py` has the mixers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from heddle.numerics.linear import linear_flops

if TYPE_CHECKING:
    from heddle.lab.explore.formulas import Quantities

Number = Any  # a symbol, or a plain number


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

    def __add__(self, other: Costs) -> Costs:
        """The costs of both parts."""
        return Costs(*(mine + its for mine, its in zip(self._values, other._values, strict=True)))

    def scaled(self, count: Number) -> Costs:
        """The costs of `count` such parts; a count of 0 or 1 switches an option."""
        return Costs(*(count * value for value in self._values))

    @property
    def _values(self) -> tuple[Number, ...]:
        return self.parameters, self.inactive, self.flops, self.cached, self.recurrent


CostFunction = Callable[["Quantities"], Costs]
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
    """The function declared for a kind, or else for `*`; None without either: the explorer does not show the kind."""
    return cost_functions.get((slot, kind)) or cost_functions.get((slot, "*"))


# Shared by several kinds


def projection(n: Quantities, inputs: Number, outputs: Number, bias: Number = 0) -> Costs:
    """A projection of every token. bias: 1 or 0."""
    return Costs(parameters=(inputs + bias) * outputs, flops=linear_flops(n.tokens, inputs, outputs))


def check_activation(n: Quantities) -> None:
    """Declare which activations take `limit` and `alpha`."""
    clamped, limited = n.equals("activation", "swiglu_clamped"), n.equals("activation", "swiglu_limited")
    n.refuse((1 - clamped - limited) * n.has("limit"), limit=3.0)
    n.refuse((1 - clamped) * n.has("alpha"), alpha=3.0)


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
    norm = Costs(parameters=n.norm(n.width)).scaled(n.output_norm)
    table = Costs(parameters=n.id_range * n.top_k).scaled(n.has("id_range"))
    shared = shared.scaled(n.has("shared")) + projection(n, n.width, 1).scaled(n.shared_gate)
    return table + router + experts + shared + norm


def _check_mixture(n: Quantities) -> None:
    """Declare which mixtures are rejected."""
    shared, renormalized = n.has("shared"), n.has("renormalize")
    n.refuse(n.above(n.top_k, n.experts), top_k=9)
    n.refuse(n.equals("routing", "topk_softmax") * (1 - renormalized), routing="topk_softmax", renormalize=False)
    not_mixer = 1 - n.equals("routing", "sparse_mixer")
    n.refuse(n.has("router_tolerance") * not_mixer, n.routing, routing="softmax_topk", router_tolerance=0.1)
    eps, softmax = n.has("renormalize_eps"), n.equals("routing", "topk_softmax")
    n.refuse(eps * (1 - renormalized) * (1 - softmax), renormalize=False, renormalize_eps=0.1)
    n.refuse(eps * renormalized * softmax, routing="topk_softmax", renormalize_eps=0.1)
    n.refuse((1 - shared) * n.has("shared_hidden"), shared=None, shared_hidden=40)
    n.refuse((1 - shared) * (1 - n.has("shared_hidden")) * n.shared_gate, shared=None, shared_gate=True)
    n.refuse((1 - shared) * n.has("shared_scale"), shared=None, shared_scale=0.5)
    unlimited, limited = n.is_false("shared_limit"), n.equals("activation", "swiglu_limited")
    n.refuse((1 - shared) * unlimited, shared=None, shared_limit=False, activation="swiglu_limited")
    n.refuse(shared * (1 - limited) * unlimited, shared=1, shared_limit=False, activation="silu")
    n.refuse(n.has("shared_hidden") * n.above(n.shared, 1), shared=3, shared_hidden=40)
    n.refuse((1 - shared) * n.equals("bias", "shared"), shared=None, bias="shared")
    n.refuse(n.has("router_rank") * n.above(2, n.router_rank), router_rank=1)
    for name in ("swiglu_clamped", "swiglu_limited"):
        n.refuse(n.equals("expert", "mlp") * n.equals("activation", name), expert="mlp", activation=name)
    check_activation(n)
    by_group, groups, top_groups = n.equals("routing", "softmax_group_max"), n.has("groups"), n.has("top_groups")
    hashed, tabled = n.equals("selection", "hash"), n.equals("selection", "table")
    n.refuse((1 - hashed) * n.hash_seed, hash_seed=1)
    n.refuse((1 - tabled) * n.has("id_range"), id_range=9)
    n.refuse(tabled * (1 - n.has("id_range")), selection="table")
    one = 1 - n.above(n.least(n.top_k, 2), 1)
    gate_is_one = one * (1 - eps) * (1 - (1 - renormalized) * (1 - softmax))
    for chosen, by in ((hashed, {"selection": "hash"}), (tabled, {"selection": "table", "id_range": 9})):
        n.refuse(chosen * (1 - groups) * n.equals("routing", "sigmoid_logits"), routing="sigmoid_logits", **by)
        n.refuse(chosen * groups, routing="sigmoid", groups=2, top_groups=1, **by)
        n.refuse(chosen * n.has("bias_update"), bias_update=0.1, **by)
        n.refuse(chosen * (1 - n.above(n.experts, n.top_k)), top_k=8, **by)
        n.refuse(chosen * gate_is_one, top_k=1, **by)
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


@costs_of("norms", "dynamic_tanh")
def dynamic_tanh(n: Quantities) -> Costs:
    """A weight and a bias for each element, if there are any, α, and the shift of `erf`."""
    return Costs(parameters=2 * n.width * (1 - n.is_false("weight")) + 1 + n.equals("function", "erf"))


@costs_of("positions", "learned")
def learned(n: Quantities) -> Costs:
    """The table."""
    return Costs(parameters=(n.length + n.offset) * n.width)


@costs_of("positions", "sinusoidal", "rope", "axial_rope", "alibi", "relative_bias")
def without_costs(n: Quantities) -> Costs:
    """Nothing; the tables of a mixer's position are costs of the mixer."""
    return Costs()


@costs_of("scalings", "linear")
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


@costs_of("residuals", "post_norm", "deep_norm", "reordered", "residual_dual")
def residual(n: Quantities) -> Costs:
    """A norm for each branch."""
    return Costs(parameters=n.branches * n.norm(n.width))


@costs_of("residuals", "pre_norm")
def pre_norm(n: Quantities) -> Costs:
    """A norm for each branch, and its gate."""
    n.refuse(n.has("gate_rank") * n.is_false("first_norm"), gate_rank=4, first_norm=False)
    mixtures = n.equals("gated_feedforwards", "mixtures")
    n.refuse((1 - n.has("gate_rank")) * mixtures, gated_feedforwards="mixtures")
    gate = projection(n, n.width, n.gate_rank) + projection(n, n.gate_rank, n.width)
    return residual(n) + gate.scaled((n.branches - mixtures * n.dense) * n.has("gate_rank"))


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
    n.refuse(gated * n.whole_bias, gate_rank=4, mixing=False, whole_bias=True)
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
    """Over the first layers: the sum of the blocks below each layer's own, and how many layers start a block."""
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
