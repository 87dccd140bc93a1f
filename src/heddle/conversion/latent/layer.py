"""The parameters of a latent attention layer, put together from rotated slots and a low-rank latent."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.conversion.latent.factors import AttentionFactors, complex_pairs
from heddle.conversion.latent.rank import latent_spectrum
from heddle.conversion.latent.rope import RopeComponents
from heddle.conversion.latent.statistics import LatentStatistics
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.positions.rope import RopeConfig

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

    The other entries have variance 1 (see `heddle.conversion.latent.rank`). The norm divides by
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
