"""The parameters of a latent attention layer, put together from rotated slots and a low-rank latent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.head_parameters import head_sizes, state_elements
from heddle.conversion.latent_factors import (
    AttentionFactors,
    LatentStatistics,
    attention_factors,
    complex_pairs,
    fit_norms,
    latent_statistics,
    real_dims,
)
from heddle.conversion.sensitivity import plan_sizes
from heddle.conversion.weights import LayerActivations
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.positions.rope import Rope, RopeConfig

# Concentrate RoPE into few shared dims by maps over heads that commute with it (after TransMLA, Meng et al. 2025).
#
# The keys of all G heads at frequency θ are G complex numbers per token. RoPE multiplies all of them by exp(i θ m), so
# any complex G×G map commutes with it: the keys are replaced by their principal components, and the queries absorb the
# inverse. A component that is kept becomes a slot: one pair of the shared rotated key, which every query head reads.
#
# The remainder is read without rotation: exp(−i θ Δ) is replaced by its mean ρ under the attention weights, which the
# queries absorb. Slow frequencies lose almost nothing by this, so slots go where λ (1 − |ρ|²) is largest, λ being the
# energy of the scores that a component makes. Neighboring frequencies may be folded into one, which lets one slot keep
# components of all of them; that costs λ (1 − |σ|²), σ the mean of exp(−i (θ_f − θ) Δ).


MIN_WEIGHT = 1e-12  # of a group's queries, relative to the largest: its inverse stands in the queries' weights


@dataclass(frozen=True)
class RopeSlots:
    """A layer's rotated and position-free maps of [x ; 1]. S slots; heads, dims and widths as in `AttentionFactors`.

    frequencies [S]; k complex [S, D+1], q complex [H, S, D+1]: of the slots. k_nope [G, d, D+1], q_nope [H, d, D+1]:
    of the remainder. query_metric [G, d, d]: what an error of k_nope costs, δkᵀ M δk per token. loss: squared error of
    the layer's output per token by dropped and folded rotations.
    """

    frequencies: Tensor
    k: Tensor
    q: Tensor
    k_nope: Tensor
    q_nope: Tensor
    query_metric: Tensor
    loss: float


class RopeComponents:
    """The principal components of a layer's keys at each frequency, or each group of folded frequencies.

    folded_pairs: the pairs of each group, whose first frequency is the group's.
    """

    def __init__(
        self, factors: AttentionFactors, statistics: LatentStatistics, folded_pairs: Sequence[Sequence[int]]
    ) -> None:
        self.factors, self.statistics, self.folded_pairs = factors, statistics, folded_pairs
        heads, groups, pairs = len(factors.q), len(factors.k), factors.pairs
        per_dim = statistics.queries.diagonal(dim1=1, dim2=2)[:, : 2 * pairs]
        by_head = (per_dim[:, :pairs] + per_dim[:, pairs:]) / 2 * factors.scale**2 / statistics.tokens
        weights = by_head.view(groups, heads // groups, pairs).sum(1)
        self.weights = weights.clamp_min(MIN_WEIGHT * float(weights.max()) if weights.numel() else 0.0)
        self.share = by_head / by_head.view(groups, heads // groups, pairs).sum(1).repeat_interleave(
            factors.group_size, 0
        )
        self.keys = complex_pairs(factors.k, pairs)  # [G, P, D+1]
        self.rho = statistics.mean_rotation(factors.frequencies)
        fold_of = torch.zeros(pairs, dtype=torch.long)
        for members in folded_pairs:
            fold_of[list(members)] = members[0]
        self.sigma = statistics.mean_rotation(factors.frequencies - factors.frequencies[fold_of])
        self.spectra = [self._spectrum(members) for members in folded_pairs]

    def _by_group(self, rotation: Tensor) -> Tensor:
        """The mean of |rotation|² over the heads of each group: [H, P] -> [G, P]."""
        squared = (rotation.abs().square() * self.share).nan_to_num()
        return squared.view(len(self.factors.k), self.factors.group_size, self.factors.pairs).sum(1)

    def _weighted_keys(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The roots of the weights of a fold's keys [G · members], and the keys multiplied by them."""
        root = self.weights[:, members].flatten().sqrt()
        return root, self.keys[:, members].flatten(0, 1) * root[:, None]

    def _spectrum(self, members: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For one fold: energies [n], vectors [G · members, n], and what they lose without rotation and folded."""
        _, z = self._weighted_keys(members)
        inputs = (self.statistics.inputs / self.statistics.tokens).to(z.dtype)
        energies, vectors = torch.linalg.eigh(z @ inputs @ z.mH)
        energies, vectors = energies.flip(0).clamp_min(0.0), vectors.flip(1)
        shares = vectors.abs().square().T
        dropped = energies * (1 - shares @ self._by_group(self.rho)[:, members].flatten())
        folded = energies * (1 - shares @ self._by_group(self.sigma)[:, members].flatten())
        return energies, vectors, dropped, folded

    def choose(self, slots: int) -> list[int]:
        """How many components of each fold become slots, so that least is lost."""
        gains = [
            (float(gain), index)
            for index, (_, _, dropped, folded) in enumerate(self.spectra)
            for gain in (dropped - folded)
        ]
        best = sorted(gains, key=lambda pair: -pair[0])[:slots]
        counts = [0] * len(self.folded_pairs)
        for _, index in best:
            counts[index] += 1
        return counts

    def slots(self, counts: Sequence[int]) -> RopeSlots:
        """The maps with `counts` components of each fold as slots."""
        factors, pairs = self.factors, self.factors.pairs
        queries = complex_pairs(factors.q, pairs)
        remainder = self.keys.clone()
        ks, qs, frequencies, loss = [], [], list[Tensor](), 0.0
        for members, count, (_, vectors, dropped, folded) in zip(self.folded_pairs, counts, self.spectra, strict=True):
            members, chosen = list(members), vectors[:, :count]
            root, z = self._weighted_keys(members)
            slot = chosen.mH @ z
            back = chosen / root[:, None]
            remainder[:, members] -= (back @ slot).unflatten(0, (-1, len(members)))
            per_head = back.unflatten(0, (-1, len(members))).repeat_interleave(factors.group_size, 0)
            per_head = per_head * self.sigma[:, members, None]
            qs.append(torch.einsum("hfn,hfs->hsn", queries[:, members], per_head.conj()))
            ks.append(slot)
            frequencies += [factors.frequencies[members[0]]] * count
            loss += float(dropped[count:].sum() + folded[:count].sum())
        width = factors.q.shape[2]
        unrotated = self._unrotated_queries()
        metric = unrotated @ self.statistics.queries @ unrotated.mT * factors.scale**2 / self.statistics.tokens
        return RopeSlots(
            frequencies=torch.stack(frequencies) if frequencies else factors.frequencies[:0],
            k=torch.cat(ks) if ks else queries.new_zeros(0, width),
            q=torch.cat(qs, dim=1) if qs else queries.new_zeros(len(factors.q), 0, width),
            k_nope=torch.cat((real_dims(remainder), factors.k[:, 2 * pairs :]), dim=1),
            q_nope=unrotated @ factors.q,
            query_metric=metric.unflatten(0, (len(factors.k), -1)).sum(1),
            loss=loss,
        )

    def _unrotated_queries(self) -> Tensor:
        """[H, d, d]: multiplies each rotated pair of a query by conj(ρ)."""
        pairs, dim = self.factors.pairs, self.factors.q.shape[1]
        result = torch.eye(dim, dtype=torch.float64, device=self.rho.device).repeat(len(self.rho), 1, 1)
        real, imaginary = torch.arange(pairs), torch.arange(pairs, 2 * pairs)
        result[:, real, real] = result[:, imaginary, imaginary] = self.rho.real
        result[:, real, imaginary], result[:, imaginary, real] = self.rho.imag, -self.rho.imag
        return result


# One low-rank latent for the position-free keys and the values of all heads.
#
# A rank-r latent c = W_d x gives k = W_k' c and v = W_v' c. With C the covariance of x, K_g and V_g the maps of group
# g, and M_g, S_g what squared errors of its keys and values cost in the layer's output, the loss is least for the first
# r eigenvectors E of C^½ (Σ_g K_gᵀ M_g K_g + V_gᵀ S_g V_g) C^½:  W_d = Eᵀ C^-½,  W_k' = K C^½ E,  W_v' = V C^½ E.
# So keys and values are balanced by their effect, and the entries of c are uncorrelated, with variance 1. Means need no
# rank: a constant key shifts all scores of a query alike, and a constant value is a bias of the output.


RIDGE = 1e-9  # of the mean variance of x, added to each direction: a short text leaves some out


@dataclass(frozen=True)
class LatentSpectrum:
    """The eigenvectors of a layer, the largest first. losses[r]: squared error of the output per token at rank r."""

    losses: Tensor
    vectors: Tensor
    root: Tensor
    inverse_root: Tensor

    def down(self, rank: int) -> Tensor:
        """W_d [rank, D]."""
        return self.vectors[:, :rank].T @ self.inverse_root

    def up(self, factor: Tensor, rank: int) -> Tensor:
        """A map of x [..., n, D] as one of the latent [..., n, rank]."""
        return factor @ (self.root @ self.vectors[:, :rank])


def latent_spectrum(factors: AttentionFactors, slots: RopeSlots, statistics: LatentStatistics) -> LatentSpectrum:
    """Find the directions of x in which keys and values matter."""
    out = factors.out.unflatten(0, (len(factors.k), -1))  # [G, H/G, D, d_v]
    weight = (statistics.values / statistics.tokens).view(len(factors.k), -1, 1, 1)
    value_metric = (out.mT @ out * weight).sum(1)
    k, v = slots.k_nope[..., :-1], factors.v[..., :-1]
    cost = (k.mT @ slots.query_metric @ k).sum(0) + (v.mT @ value_metric @ v).sum(0)
    root, inverse_root = _roots(statistics.covariance)
    energies, vectors = torch.linalg.eigh(root @ cost @ root)
    energies = energies.clamp_min(0.0)
    losses = torch.cat((energies.cumsum(0).flip(0), energies.new_zeros(1)))
    return LatentSpectrum(losses, vectors.flip(1), root, inverse_root)


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """C^½ and C^-½ of a covariance with a ridge."""
    values, vectors = torch.linalg.eigh(covariance)
    ridge = RIDGE * float(values.clamp_min(0.0).mean()) + torch.finfo(torch.float64).tiny
    roots = (values.clamp_min(0.0) + ridge).sqrt()
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T


CONSTANT = 64.0  # root mean square of the latent's constant entry, spread over all: the norm divides by nearly that


@dataclass(frozen=True)
class LatentFactors:
    """Maps of a latent attention layer. H heads, G groups, S slots, n position-free dims, rank r.

    k_rope complex [S, D+1], q_rope complex [H, S, D+1]; q_nope [H, n, D+1]; down [r, D], k_up [G, n, r],
    v_up [G, d_v, r]. value_shift [G, d_v]: what values lack on average.
    """

    k_rope: Tensor
    q_rope: Tensor
    q_nope: Tensor
    down: Tensor
    k_up: Tensor
    v_up: Tensor
    value_shift: Tensor


def full_rank_factors(factors: AttentionFactors) -> LatentFactors:
    """The same attention: the slots are the rotated dims of all key heads, the latent their other dims and the values.

    Each query head has zeros in the slots of other groups. Where there are more such dims than inputs, the latent is x.
    """
    pairs, groups, inputs = factors.pairs, len(factors.k), factors.q.shape[2]
    keys, queries = complex_pairs(factors.k, pairs), complex_pairs(factors.q, pairs)
    own = torch.eye(groups, dtype=queries.dtype, device=queries.device).repeat_interleave(factors.group_size, 0)
    k_nope, v = factors.k[:, 2 * pairs :, :-1], factors.v[..., :-1]
    k_rows, v_rows = k_nope.flatten(0, 1), v.flatten(0, 1)
    down = torch.cat((k_rows, v_rows))
    if len(down) > inputs - 1:
        down, k_up, v_up = torch.eye(inputs - 1, dtype=down.dtype, device=down.device), k_nope, v
    else:
        identity = torch.eye(len(down), dtype=down.dtype, device=down.device)
        k_up = identity[: len(k_rows)].unflatten(0, k_nope.shape[:2])
        v_up = identity[len(k_rows) :].unflatten(0, v.shape[:2])
    return LatentFactors(
        k_rope=keys.flatten(0, 1),
        q_rope=torch.einsum("hg,hpn->hgpn", own, queries).flatten(1, 2),
        q_nope=factors.q[:, 2 * pairs :],
        down=down,
        k_up=k_up,
        v_up=v_up,
        value_shift=factors.v[..., -1],
    )


def low_rank_factors(
    factors: AttentionFactors,
    statistics: LatentStatistics,
    folded_pairs: Sequence[Sequence[int]],
    counts: Sequence[int],
    rank: int,
) -> LatentFactors:
    """The rotated components `counts` of each group of folded frequencies, and a latent of this rank."""
    slots = RopeComponents(factors, statistics, folded_pairs).slots(counts)
    spectrum = latent_spectrum(factors, slots, statistics)
    down, v_up = spectrum.down(rank), spectrum.up(factors.v[..., :-1], rank)
    mean = statistics.mean
    return LatentFactors(
        k_rope=slots.k,
        q_rope=slots.q,
        q_nope=slots.q_nope,
        down=down,
        k_up=spectrum.up(slots.k_nope[..., :-1], rank),
        v_up=v_up,
        value_shift=factors.v @ mean - v_up @ down @ mean[:-1],
    )


def latent_parameters(
    factors: AttentionFactors, latent: LatentFactors, config: LatentAttentionConfig
) -> dict[str, Tensor]:
    """The parameters of a resolved latent attention, by their names in the layer, in float64."""
    assert config.scale is not None
    layout = config.position.layout if isinstance(config.position, RopeConfig) else "half"
    down, k_up, v_up, nope = latent.down, latent.k_up, latent.v_up, latent.q_nope
    if nope.shape[1] < config.nope_dim:  # one dim of zeros, since a head cannot have none
        nope = nope.new_zeros(len(nope), config.nope_dim, nope.shape[2])
        k_up = k_up.new_zeros(len(k_up), config.nope_dim, k_up.shape[2])
    q_rope = rope_rows(latent.q_rope, layout)
    q = torch.cat((nope, q_rope), dim=1).flatten(0, 1) * (factors.scale / config.scale)
    k_rope = rope_rows(latent.k_rope, layout)
    shift = latent.value_shift.repeat_interleave(factors.group_size, 0)
    result = {
        "q.weight": q[:, :-1],
        "q.bias": q[:, -1],
        "k_rope.weight": k_rope[:, :-1],
        "k_rope.bias": k_rope[:, -1],
        "kv_down.weight": down,
        "kv_down.bias": down.new_zeros(len(down)),
        "k_up.weight": k_up.repeat_interleave(factors.group_size, 0).flatten(0, 1),
        "v_up.weight": v_up.repeat_interleave(factors.group_size, 0).flatten(0, 1),
        "out.weight": factors.out.transpose(0, 1).flatten(1, 2),
        "out.bias": factors.out_bias + torch.einsum("hov,hv->o", factors.out, shift),
    }
    if config.kv_norm == "rms":
        _add_constant(result)
    if not config.query_bias:
        del result["q.bias"]
    if not config.bias:
        result = {name: value for name, value in result.items() if name == "q.bias" or not name.endswith(".bias")}
    if config.rope_dim is None:
        result = {name: value for name, value in result.items() if not name.startswith("k_rope.")}
    return {f"mixer.{name}": value for name, value in result.items()}


def _add_constant(parameters: dict[str, Tensor]) -> None:
    """Make an RMS norm of the latent all but linear: a large constant entry dominates the root mean square.

    The other entries have variance 1 (see `heddle.conversion.latent_layer`). The norm divides by
    √((c² r + |entries|²) / r) with c = CONSTANT, which their weight undoes for the mean of |entries|²; so its
    relative error is near 1 / (2 c²).
    """
    rank = len(parameters["kv_down.weight"]) + 1
    for name, dim in (("kv_down.weight", 0), ("kv_down.bias", 0), ("k_up.weight", 1), ("v_up.weight", 1)):
        value = parameters[name]
        shape = list(value.shape)
        shape[dim] = 1
        parameters[name] = torch.cat((value, value.new_zeros(shape)), dim=dim)
    parameters["kv_down.bias"][-1] = CONSTANT * rank**0.5
    weight = parameters["kv_down.bias"].new_full((rank,), (CONSTANT**2 + (rank - 1) / rank) ** 0.5)
    parameters["kv_norm.weight"] = weight


def rope_rows(z: Tensor, layout: str) -> Tensor:
    """Complex rows [..., S, n] -> rows of rotated dims [..., 2S, n] in the layout `half` or `interleaved`."""
    if layout == "half":
        return torch.cat((z.real, z.imag), dim=-2)
    return torch.stack((z.real, z.imag), dim=-2).flatten(-3, -2)


# The sizes of each layer's rotated part and latent: as requested, or with the least loss under a budget.


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


def rotary_pair_count(config: AttentionConfig) -> int:
    """The pairs of each head that RoPE rotates."""
    position, (_, head_dim, _) = config.position, head_sizes(config)
    return (position.rotary_dim or head_dim) // 2 if isinstance(position, RopeConfig) else 0


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
        kv_heads, *_ = head_sizes(config)
        dims = [min(max(2, round(state * part / 2) * 2), 2 * pairs * kv_heads) for part in ROPE_SHARES]
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
        raise DesignError("rope_dim", f"{rope_dim} is set, but {path} has no RoPE; leave it out")
    if pairs > 0 and kv_rank is not None and rope_dim is None:
        raise DesignError("rope_dim", f"is missing, but {path} has RoPE; give it, or state_budget instead of both")
    all_rotated = 2 * pairs * head_sizes(config)[0]
    if rope_dim is not None and rope_dim > all_rotated:
        raise DesignError("rope_dim", f"{rope_dim} is more than the {all_rotated} rotated dims of {path}; lower it")
    if plain and rope_dim is not None and plain_position(config, rope_dim) is None:
        fitting = [2 * count for count in range(1, pairs + 1) if plain_position(config, 2 * count) is not None]
        choices = f"choices: {', '.join(map(str, fitting))}" if fitting else "leave out exportable"
        raise DesignError("rope_dim", f"{rope_dim} has frequencies that plain RoPE cannot have in {path}; {choices}")
