"""Concentrate RoPE into few shared dims by maps over heads that commute with it (after TransMLA, Meng et al. 2025).

The keys of all G heads at frequency θ are G complex numbers per token. RoPE multiplies all of them by exp(i θ m), so
any complex G×G map commutes with it: the keys are replaced by their principal components, and the queries absorb the
inverse. A component that is kept becomes a slot: one pair of the shared rotated key, which every query head reads.

The remainder is read without rotation: exp(−i θ Δ) is replaced by its mean ρ under the attention weights, which the
queries absorb. Slow frequencies lose almost nothing by this, so slots go where λ (1 − |ρ|²) is largest, λ being the
energy of the scores that a component makes. Neighboring frequencies may be folded into one, which lets one slot keep
components of all of them; that costs λ (1 − |σ|²), σ the mean of exp(−i (θ_f − θ) Δ).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.conversion.latent.factors import AttentionFactors, complex_pairs, real_dims
from heddle.conversion.latent.statistics import LatentStatistics

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

    def _spectrum(self, members: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of one fold: energies [n], vectors [G · members, n], and what they lose without rotation and folded."""
        root = self.weights[:, members].flatten().sqrt()
        z = self.keys[:, members].flatten(0, 1) * root[:, None]
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
            root = self.weights[:, members].flatten().sqrt()
            z = self.keys[:, members].flatten(0, 1) * root[:, None]
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
