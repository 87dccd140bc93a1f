"""One low-rank latent for the position-free keys and the values of all heads.

A rank-r latent c = W_d x gives k = W_k' c and v = W_v' c. With C the covariance of x, K_g and V_g the maps of group g,
and M_g, S_g what squared errors of its keys and values cost in the layer's output, the loss is least for the first r
eigenvectors E of C^½ (Σ_g K_gᵀ M_g K_g + V_gᵀ S_g V_g) C^½:  W_d = Eᵀ C^-½,  W_k' = K C^½ E,  W_v' = V C^½ E.
So keys and values are balanced by their effect, and the entries of c are uncorrelated, with variance 1. Means need no
rank: a constant key shifts all scores of a query alike, and a constant value is a bias of the output.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.conversion.latent.factors import AttentionFactors
from heddle.conversion.latent.rope import RopeSlots
from heddle.conversion.latent.statistics import LatentStatistics

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
