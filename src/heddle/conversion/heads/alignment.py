"""How several heads share one: each is mapped to the shared head's dims, and the shared head is their mean.

With maps D_u and U_u of head u the shared head is k̂ = Σ_u D_u k_u, and k_u ≈ U_u k̂. Queries q_u become U_uᵀ q_u, and an
output projection W_o becomes W_o U_u, so nothing is lost where k_u = U_u k̂.

    mean            D_u = I/n,    U_u = I                                  (Ainslie et al. 2023)
    first           D_u = I for the first head, else 0,    U_u = I
    aligned         D_u = R_u/n,  U_u = R_uᵀ, with orthogonal R_u that make R_u k_u as equal as possible
                    (generalized Procrustes alignment, Gower 1975): Σ_uv E |R_u k_u − R_v k_v|² is least
    least-squares   D, U of rank d that make Σ_u E (k_u − U_u k̂)ᵀ M_u (k_u − U_u k̂) least, M_u what an error costs

R_u, D_u and U_u are of the form that `HeadFreedom` allows. Expectations enter as Gram matrices E k_u k_vᵀ.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.conversion.heads.parameters import HeadFreedom

ALIGNMENT_STEPS = 30  # of the iteration after the spectral start, which is exact where heads are equal up to rotation


@dataclass(frozen=True)
class SharedHead:
    """down: D_u, up: U_u, [n, d, d] each."""

    down: Tensor
    up: Tensor


def mean_head(weights: Tensor, dim: int) -> SharedHead:
    """The weighted mean of heads; weights [n] sum to 1."""
    eye = torch.eye(dim, dtype=torch.float64, device=weights.device).expand(len(weights), dim, dim)
    return SharedHead(eye * weights[:, None, None], eye)


def aligned_head(gram: Tensor, freedom: HeadFreedom, weights: Tensor) -> SharedHead:
    """The weighted mean of aligned heads. gram: [n, n, d, d]; weights [n] sum to 1."""
    rotations = align(gram, freedom)
    return SharedHead(rotations * weights[:, None, None], rotations.mT.contiguous())


def align(gram: Tensor, freedom: HeadFreedom) -> Tensor:
    """The orthogonal R_u, [n, d, d], of a Gram matrix [n, n, d, d]."""
    heads = len(gram)
    rotations = torch.eye(freedom.dim, dtype=torch.float64, device=gram.device).repeat(heads, 1, 1)
    if len(freedom.pairs):
        z = complex_gram(gram, freedom.pairs)
        signs = _iterate(z.real, _leading(z.real).sign(), torch.sign)
        phases = _iterate(z, _phase(_leading(z)), _phase)
        turned = torch.where(freedom.phases.to(z.device)[:, None], phases, signs.to(phases.dtype))
        _insert_pairs(rotations, freedom.pairs, turned.conj())
    for group in freedom.groups:
        _insert_group(rotations, group, _procrustes(_block(gram, group)))
    return rotations


def least_squares_head(gram: Tensor, freedom: HeadFreedom, metrics: Tensor) -> SharedHead:
    """The best shared head of rank d. gram: [n, n, d, d]; metrics: M_u [n, d, d]."""
    heads, dim = len(gram), freedom.dim
    down = torch.eye(dim, dtype=torch.float64, device=gram.device).repeat(heads, 1, 1) / heads
    up = torch.eye(dim, dtype=torch.float64, device=gram.device).repeat(heads, 1, 1)
    if len(freedom.pairs):
        z = complex_gram(gram, freedom.pairs)
        root = _pair_energy(metrics, freedom.pairs).clamp_min(0.0).sqrt()  # [P, n]
        leading = _leading(root[:, :, None] * z * root[:, None, :])
        pair_down = leading.conj() * root
        _, pair_up, pair_down = _regress_pairs(z, pair_down)
        _insert_pairs(down, freedom.pairs, pair_down)
        _insert_pairs(up, freedom.pairs, pair_up)
    for group in freedom.groups:
        group_down, group_up = _principal_maps(_block(gram, group), metrics[:, group][:, :, group])
        _insert_group(down, group, group_down)
        _insert_group(up, group, group_up)
    return SharedHead(down, up)


def complex_gram(gram: Tensor, pairs: Tensor) -> Tensor:
    """E z_u conj(z_v) [P, n, n] of the pairs z = k_a + i k_b."""
    a, b = pairs.T
    real = gram[:, :, a, a] + gram[:, :, b, b]
    imag = gram[:, :, b, a] - gram[:, :, a, b]
    return torch.complex(real, imag).permute(2, 0, 1)


def similarity(gram: Tensor, freedom: HeadFreedom | None) -> Tensor:
    """E k_uᵀ R k_v of every two heads, [n, n], over the best R that the freedom allows, or R = I without one."""
    trace = gram.diagonal(dim1=-2, dim2=-1)
    if freedom is None:
        return trace.sum(-1)
    aligned = torch.ones(freedom.dim, dtype=torch.bool)
    total = torch.zeros_like(trace[..., 0])
    if len(freedom.pairs):
        z = complex_gram(gram, freedom.pairs)
        phases = freedom.phases.to(z.device)[:, None, None]
        total = total + torch.where(phases, z.abs(), z.real.abs()).sum(0)
        aligned[freedom.pairs.flatten()] = False
    for group in freedom.groups:
        total = total + torch.linalg.svdvals(_block(gram, group)).sum(-1)
        aligned[group] = False
    return total + trace[..., aligned].sum(-1)


def _block(gram: Tensor, group: Tensor) -> Tensor:
    return gram[:, :, group][:, :, :, group]


def _leading(z: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue, [P, n], of Hermitian matrices [P, n, n]; its first entry ≥ 0."""
    vector = torch.linalg.eigh(z).eigenvectors[..., -1]
    turned: Tensor = vector * _phase(vector[:, :1]).conj()
    return turned


def _phase(z: Tensor) -> Tensor:
    """z/|z|, and 1 for 0."""
    size = z.abs()
    return torch.where(size > 0, z / size.clamp_min(torch.finfo(torch.float64).tiny), torch.ones_like(z))


def _iterate(z: Tensor, start: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
    """Numbers of size 1, [P, n], with the largest Σ_uv conj(c_u) z_uv c_v that an iteration from `start` reaches."""
    numbers = torch.where(start == 0, torch.ones_like(start), start)
    for _ in range(ALIGNMENT_STEPS):
        new = project((z @ numbers[..., None])[..., 0])
        numbers = torch.where(new == 0, numbers, new)
    return numbers


def _procrustes(gram: Tensor) -> Tensor:
    """Orthogonal R_u [n, g, g] with the largest Σ_uv tr(R_u gram_uv R_vᵀ) that an iteration reaches."""
    heads, size = gram.shape[0], gram.shape[2]
    joint = gram.transpose(1, 2).reshape(heads * size, heads * size)
    vectors = torch.linalg.eigh(joint).eigenvectors[:, -size:]
    rotations = _polar(vectors.view(heads, size, size).mT)
    for _ in range(ALIGNMENT_STEPS):
        target = torch.einsum("vab,vubc->uac", rotations, gram)  # Σ_v R_v gram_vu
        rotations = _polar(target)
    return rotations[0].T @ rotations  # in the dims of the first head


def _polar(x: Tensor) -> Tensor:
    """The orthogonal matrix nearest to x."""
    u, _, vh = torch.linalg.svd(x)
    result: Tensor = u @ vh
    return result


def _pair_energy(metrics: Tensor, pairs: Tensor) -> Tensor:
    """M_aa + M_bb, [P, n]."""
    a, b = pairs.T
    return (metrics[:, a, a] + metrics[:, b, b]).T


def _regress_pairs(z: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(E |k̂|², U, D) [P, n] of pairs: U by least squares, D scaled so that k̂ is as large as the heads are."""
    tiny = torch.finfo(torch.float64).tiny
    cross = (z @ down.conj()[..., None])[..., 0]  # E k_u conj(k̂)
    energy = (down * cross).sum(-1, keepdim=True).real
    size = z.diagonal(dim1=-2, dim2=-1).real.mean(-1, keepdim=True)
    scale = (size / energy.clamp_min(tiny)).sqrt()
    up = cross / energy.clamp_min(tiny) / scale.clamp_min(tiny)
    return energy, up, down * scale


def _principal_maps(gram: Tensor, metrics: Tensor) -> tuple[Tensor, Tensor]:
    """D and U [n, g, g] of a free group of dims: principal components of M_u^½ k_u over all heads."""
    heads, size = gram.shape[0], gram.shape[2]
    values, vectors = torch.linalg.eigh(metrics)
    roots = (vectors * values.clamp_min(0.0).sqrt()[:, None]) @ vectors.mT
    weighted = torch.einsum("uab,uvbc,vcd->uvad", roots, gram, roots)
    joint = weighted.transpose(1, 2).reshape(heads * size, heads * size)
    leading = torch.linalg.eigh(joint).eigenvectors[:, -size:].view(heads, size, size)
    down = leading.mT @ roots  # k̂ = Σ_u D_u k_u
    cross = torch.einsum("uvab,vcb->uac", gram, down)  # E k_u k̂ᵀ
    covariance = torch.einsum("uca,uab->cb", down, cross)  # E k̂ k̂ᵀ
    return _balanced(down, cross, covariance, gram)


def _balanced(down: Tensor, cross: Tensor, covariance: Tensor, gram: Tensor) -> tuple[Tensor, Tensor]:
    """Maps whose shared head has uncorrelated dims, each as large as those of the heads are on average."""
    energies, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    size = gram.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).mean().clamp_min(0.0).sqrt()
    floor = energies.max().clamp_min(0.0) * 1e-13
    inverse = torch.where(energies > floor, energies.clamp_min(1e-300).rsqrt(), torch.zeros_like(energies))
    whiten = (vectors * inverse).T  # rows: directions of k̂ with variance 1
    return size * whiten @ down, cross @ whiten.T / size.clamp_min(1e-300)


def _insert_pairs(maps: Tensor, pairs: Tensor, numbers: Tensor) -> None:
    """Write complex numbers [P, n] as 2 × 2 blocks of real maps [n, d, d]."""
    a, b = pairs.T
    real, imag = numbers.real.T, numbers.imag.T
    maps[:, a, a] = maps[:, b, b] = real
    maps[:, a, b], maps[:, b, a] = -imag, imag


def _insert_group(maps: Tensor, group: Tensor, blocks: Tensor) -> None:
    """Write blocks [n, g, g] to the dims of a group in maps [n, d, d]."""
    maps[:, group[:, None], group] = blocks
