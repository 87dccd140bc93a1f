"""The sizes of each layer's rotated part and latent: as requested, or with the least loss under a budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.latent.factors import (
    AttentionFactors,
    LatentStatistics,
    attention_factors,
    fit_norms,
    latent_statistics,
)
from heddle.conversion.latent.layer import RopeComponents, latent_spectrum
from heddle.conversion.sensitivity import plan_sizes
from heddle.conversion.weights import LayerActivations
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.rope import Rope, RopeConfig

ROPE_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of a layer's state, tried for its rotated part
MIN_OUTPUT = 1e-300  # a layer whose output is zero loses nothing
ROUNDING = 1e-9  # shares of a budget are rounded down, but not by the rounding of their product


FoldedPairs = tuple[tuple[int, ...], ...]  # groups of pairs whose frequencies are made one


@dataclass(frozen=True)
class LatentPlan:
    """Sizes of one layer. counts: how many components of each group of folded pairs stay rotated."""

    kv_rank: int
    folded_pairs: FoldedPairs
    counts: tuple[int, ...]
    inv_freq: tuple[float, ...]

    @property
    def rope_dim(self) -> int:
        """Rotated dims of the shared key."""
        return 2 * sum(self.counts)


@dataclass(frozen=True)
class LossCurve:
    """The loss of a layer by the rank of its latent, for one choice of rotated components.

    losses[r]: squared error of the layer's output, relative to its square. constant: 1 if an entry of the latent is
    constant, else 0.
    """

    folded_pairs: FoldedPairs
    counts: tuple[int, ...]
    inv_freq: tuple[float, ...]
    losses: tuple[float, ...]
    constant: int

    def loss(self, state: int) -> float:
        """The loss with `state` elements of state per token; infinite if no latent is left."""
        rank = self.plan(state).kv_rank - self.constant
        return self.losses[rank] if rank > 0 else math.inf

    def plan(self, state: int) -> LatentPlan:
        """The sizes with at most `state` elements of state per token."""
        rank = min(state - 2 * sum(self.counts), len(self.losses) - 1)
        return LatentPlan(rank, self.folded_pairs, self.counts, self.inv_freq)


def state_elements(config: AttentionConfig) -> int:
    """Elements of state per token of a resolved attention layer."""
    assert config.kv_heads is not None
    assert config.head_dim is not None
    assert config.value_dim is not None
    return config.kv_heads * (config.head_dim + config.value_dim)


def rotary_pair_count(config: AttentionConfig) -> int:
    """The pairs of each head that RoPE rotates."""
    position = config.position
    assert config.head_dim is not None
    return (position.rotary_dim or config.head_dim) // 2 if isinstance(position, RopeConfig) else 0


def fold_pairs(pairs: int, fold: int) -> FoldedPairs:
    """Neighboring pairs in groups of `fold`; the last group may be smaller."""
    return tuple(tuple(range(first, min(first + fold, pairs))) for first in range(0, pairs, fold))


def measure_layer(
    config: AttentionConfig, activations: LayerActivations, parameters: Mapping[str, Tensor]
) -> tuple[AttentionFactors, LatentStatistics]:
    """The linear maps of a layer and their statistics on a text, on the text's device."""
    device = activations.mixer_inputs[0].device
    mixer = {name: value.to(device) for name, value in parameters.items() if name.startswith("mixer.")}
    factors = attention_factors(config, mixer)
    if config.qk_norm is not None:
        factors = fit_norms(factors, config, activations)
    return factors, latent_statistics(factors, activations.mixer_inputs, activations.layouts)


def measure_losses(
    factors: AttentionFactors, statistics: LatentStatistics, rope_dims: Sequence[int], fold: int, plain: bool
) -> list[LossCurve]:
    """A curve for each number of rotated dims. plain: frequencies of plain RoPE, and a latent norm."""
    curves = []
    for rope_dim in rope_dims:
        # plain RoPE of rope_dim dims has every n-th frequency, with the n − 1 after it folded into it
        folded_pairs = fold_pairs(factors.pairs, factors.pairs * 2 // rope_dim if plain else fold)
        components = RopeComponents(factors, statistics, folded_pairs)
        counts = [1] * len(folded_pairs) if plain else components.choose(rope_dim // 2)
        slots = components.slots(counts)
        losses = latent_spectrum(factors, slots, statistics).losses + slots.loss
        relative = losses * statistics.tokens / max(statistics.output, MIN_OUTPUT)
        inv_freq = tuple(slots.frequencies.tolist())
        curves.append(LossCurve(folded_pairs, tuple(counts), inv_freq, tuple(relative.tolist()), int(plain)))
    return curves


def rope_dim_choices(config: AttentionConfig, share: float, plain: bool) -> list[int]:
    """Numbers of rotated dims to try for a layer that keeps this share of its state."""
    pairs, state = rotary_pair_count(config), state_elements(config) * share
    if pairs == 0:
        return [0]
    if plain:
        dims = [2 * count for count in range(1, pairs + 1) if plain_position(config, 2 * count) is not None]
    else:
        assert config.kv_heads is not None
        dims = [min(max(2, round(state * part / 2) * 2), 2 * pairs * config.kv_heads) for part in ROPE_SHARES]
    return sorted({dim for dim in dims if dim < state} or {2})


def plan_by_budget(layers: Sequence[Sequence[LossCurve]], states: Sequence[int], share: float) -> list[LatentPlan]:
    """Distribute a share of the layers' total state over the layers. Raises DesignError if it is too small.

    layers: the choices of each.
    """
    budget = int(sum(states) * share + ROUNDING)
    choices = [
        [(size, loss) for size in range(1, budget + 1) if (loss := _least(layer, size)[0]) < math.inf]
        for layer in layers
    ]
    sizes = plan_sizes(choices, budget) if all(choices) else None
    if sizes is None:
        raise DesignError(
            "state_budget",
            f"{share:.3g} of the state per token leaves {budget} elements for {len(states)} layers, too few; raise it",
        )
    return [_least(layer, size)[1].plan(size) for layer, size in zip(layers, sizes, strict=True)]


def _least(layer: Sequence[LossCurve], state: int) -> tuple[float, LossCurve]:
    """The least loss of a layer with `state` elements, and its curve."""
    return min(((curve.loss(state), curve) for curve in layer), key=lambda pair: pair[0])


def plan_uniform(layers: Sequence[Sequence[LossCurve]], states: Sequence[int], share: float) -> list[LatentPlan]:
    """The same sizes for every layer, with the least total loss. Raises DesignError if the budget is too small."""
    state = int(min(states) * share + ROUNDING)
    by_dims = [{2 * sum(curve.counts): curve for curve in layer} for layer in layers]
    common = sorted(set.intersection(*map(set, by_dims)))
    if not common:
        reason = (
            "gives no number of rotated dims that all layers can have; name layers that are alike, or give rope_dim"
        )
        raise DesignError("state_budget", reason)
    best = min(common, key=lambda dims: sum(layer[dims].loss(state) for layer in by_dims))
    if by_dims[0][best].loss(state) == math.inf:
        raise DesignError(
            "state_budget", f"{share:.3g} of the state per token leaves {state} elements a layer; raise it"
        )
    return [layer[best].plan(state) for layer in by_dims]


def plain_position(config: AttentionConfig, rope_dim: int) -> RopeConfig | None:
    """RoPE of rope_dim dims with the source's base and scaling; None unless it has every n-th of its frequencies."""
    position, pairs = config.position, rotary_pair_count(config)
    if not isinstance(position, RopeConfig) or position.inv_freq is not None or pairs * 2 % rope_dim:
        return None
    source, result = Rope(position, 2 * pairs).scaled_frequencies(1), position.replace(rotary_dim=rope_dim)
    plain = Rope(result, rope_dim).scaled_frequencies(1)
    expected = source.inv_freq[:: pairs * 2 // rope_dim]
    is_equal = all(math.isclose(x, y, rel_tol=1e-6) for x, y in zip(plain.inv_freq, expected, strict=True))
    return result if is_equal and plain.attention_factor == plain.score_scale == 1.0 else None


def check_sizes(
    config: AttentionConfig, width: int, sizes: tuple[int | None, int | None], plain: bool, path: str
) -> None:
    """Raises DesignError, with the path of the layer, for sizes (kv_rank, rope_dim) that do not fit it."""
    kv_rank, rope_dim = sizes
    pairs, most = rotary_pair_count(config), min(width, state_elements(config))
    if kv_rank is not None and kv_rank > most:
        raise DesignError(
            "kv_rank", f"{kv_rank} is more than the {most} dims that keys and values of {path} have; lower it"
        )
    if plain and pairs == 0:
        raise DesignError(path, "has no RoPE, but every family with latent attention has; leave out exportable")
    if pairs == 0 and rope_dim is not None:
        raise DesignError("rope_dim", f"{rope_dim} is asked for, but {path} has no RoPE; leave it out")
    if pairs > 0 and kv_rank is not None and rope_dim is None:
        raise DesignError("rope_dim", f"is missing, but {path} has RoPE; give it, or state_budget instead of both")
    assert config.kv_heads is not None
    all_rotated = 2 * pairs * config.kv_heads
    if rope_dim is not None and rope_dim > all_rotated:
        raise DesignError("rope_dim", f"{rope_dim} is more than the {all_rotated} rotated dims of {path}; lower it")
    if plain and rope_dim is not None and plain_position(config, rope_dim) is None:
        fitting = [2 * count for count in range(1, pairs + 1) if plain_position(config, 2 * count) is not None]
        choices = f"choices: {', '.join(map(str, fitting))}" if fitting else "leave out exportable"
        raise DesignError("rope_dim", f"{rope_dim} has frequencies that plain RoPE cannot have in {path}; {choices}")
