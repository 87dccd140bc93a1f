"""Fewer key and value heads for one attention layer: heads are ordered by groups, and each group becomes one head.

Everything that belongs to a query head moves with it: rows of W_q, biases, sinks, gates, gains, and columns of W_o.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from heddle.conversion.head_parameters import (
    HeadFreedom,
    HeadStatistics,
    Parameters,
    batches,
    build_mixer,
    head_maps,
    key_freedom,
    output_maps,
    select_heads,
    set_head_maps,
    set_output_maps,
    value_freedom,
)
from heddle.conversion.weights import LayerActivations
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.attention import Attention, AttentionConfig

# How several heads share one: each is mapped to the shared head's dims, and the shared head is their mean.
#
# With maps D_u and U_u of head u the shared head is k̂ = Σ_u D_u k_u, and k_u ≈ U_u k̂. Queries q_u become U_uᵀ q_u,
# and an output projection W_o becomes W_o U_u, so nothing is lost where k_u = U_u k̂.
#
#     mean            D_u = I/n,    U_u = I                                  (Ainslie et al. 2023)
#     first           D_u = I for the first head, else 0,    U_u = I
#     aligned         D_u = R_u/n,  U_u = R_uᵀ, with orthogonal R_u that make R_u k_u as equal as possible
#                     (generalized Procrustes alignment, Gower 1975): Σ_uv E |R_u k_u − R_v k_v|² is least
#     least-squares   D, U of rank d that make Σ_u E (k_u − U_u k̂)ᵀ M_u (k_u − U_u k̂) least, M_u what an error costs
#
# R_u, D_u and U_u are of the form that `HeadFreedom` allows. Expectations enter as Gram matrices E k_u k_vᵀ.


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
        pair_up, pair_down = _regress_pairs(z, pair_down)
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


def _regress_pairs(z: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """(U, D) [P, n] of pairs: U by least squares, D scaled so that k̂ is as large as the heads are."""
    tiny = torch.finfo(torch.float64).tiny
    cross = (z @ down.conj()[..., None])[..., 0]  # E k_u conj(k̂)
    energy = (down * cross).sum(-1, keepdim=True).real
    size = z.diagonal(dim1=-2, dim2=-1).real.mean(-1, keepdim=True)
    scale = (size / energy.clamp_min(tiny)).sqrt()
    up = cross / energy.clamp_min(tiny) / scale.clamp_min(tiny)
    return up, down * scale


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
    """Maps to a shared head with uncorrelated dims, each as large as the heads' dims are on average."""
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


# Which heads share one: groups of equal size with the least sum of costs of two heads in the same group.
#
# Exact for up to EXACT_HEADS heads, by dynamic programming over sets of heads: the first head that has no group yet is
# joined with every choice of others. Beyond, a heuristic: groups are filled one after the other, from the cheapest free
# pair on, then two heads of different groups are swapped while that lowers the sum.


EXACT_HEADS = 16

Groups = list[list[int]]


def contiguous_groups(heads: int, groups: int) -> Groups:
    """Neighboring heads."""
    size = heads // groups
    return [list(range(start, start + size)) for start in range(0, heads, size)]


def best_groups(costs: np.ndarray, groups: int) -> Groups:
    """The groups of equal size with the least cost. costs: symmetric [heads, heads]; a group costs its pairs' sum."""
    heads = len(costs)
    if heads == groups:
        return [[head] for head in range(heads)]
    if groups == 1:
        return [list(range(heads))]
    return _exact(costs, groups) if heads <= EXACT_HEADS else _swapped(costs, _greedy(costs, groups))


def grouping_cost(costs: np.ndarray, groups: Groups) -> float:
    """The sum over all pairs within a group."""
    return float(sum(costs[a, b] for group in groups for a, b in combinations(group, 2)))


def _ordered(groups: Groups) -> Groups:
    """Heads within a group, and groups by their first heads, in ascending order."""
    return sorted(sorted(group) for group in groups)


def _exact(costs: np.ndarray, groups: int) -> Groups:
    heads = len(costs)
    size = heads // groups

    @cache
    def group_cost(group: tuple[int, ...]) -> float:
        return grouping_cost(costs, [list(group)])

    @cache
    def best(free: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not free:
            return 0.0, ()
        first, *others = free
        options = []
        for rest in combinations(others, size - 1):
            cost, groups_of_rest = best(tuple(head for head in others if head not in rest))
            options.append((cost + group_cost((first, *rest)), ((first, *rest), *groups_of_rest)))
        return min(options)

    return [list(group) for group in best(tuple(range(heads)))[1]]


def _greedy(costs: np.ndarray, groups: int) -> Groups:
    """Fill one group after the other: the cheapest free pair, then the head that costs least with the group."""
    size, result = len(costs) // groups, []
    of_free_pairs = costs + np.diag(np.full(len(costs), np.inf))
    while np.isfinite(of_free_pairs).any():
        group = [int(head) for head in np.unravel_index(of_free_pairs.argmin(), costs.shape)]
        free = np.isfinite(of_free_pairs).any(1)
        while len(group) < size:
            free[group] = False
            group.append(int(np.where(free, costs[:, group].sum(1), np.inf).argmin()))
        of_free_pairs[group] = of_free_pairs[:, group] = np.inf
        result.append(group)
    return _ordered(result)


def _swapped(costs: np.ndarray, groups: Groups) -> Groups:
    """Swap the two heads of different groups whose swap saves most, until no swap saves anything."""
    label = np.empty(len(costs), dtype=int)
    for number, group in enumerate(groups):
        label[group] = number
    costs = costs - np.diag(np.diag(costs))
    while True:
        member = np.eye(len(groups))[label]
        to_group = costs @ member  # [heads, groups]: with all heads of a group
        own = to_group[np.arange(len(costs)), label]
        change = to_group[:, label] + to_group[:, label].T - own[:, None] - own - 2 * costs
        change[label[:, None] == label] = 0.0
        a, b = np.unravel_index(change.argmin(), change.shape)
        if change[a, b] >= -1e-12 * max(1.0, float(np.abs(costs).max())):
            return _ordered([np.flatnonzero(label == number).tolist() for number in range(len(groups))])
        label[a], label[b] = label[b], label[a]


Merge = Literal["mean", "first", "aligned", "least-squares"]

PAIR_TOKENS = 4096  # of the text on which the cost of merging every two heads is measured


@dataclass(frozen=True)
class MergedHeads:
    """One layer whose key heads are merged. config: resolved, with as many key heads as `layer` has."""

    layer: Parameters
    config: AttentionConfig
    context: BuildContext
    statistics: HeadStatistics
    merge: Merge

    @property
    def heads(self) -> int:
        """The number of key heads."""
        return len(self.statistics.keys)

    def share(self, group: Sequence[int]) -> tuple[SharedHead, SharedHead]:
        """How a group's keys, and its values, become one head."""
        statistics = self.statistics.select(group)
        equal = torch.full((len(group),), 1 / len(group), dtype=torch.float64, device=statistics.keys.device)
        dim, value_dim = statistics.keys.shape[-1], statistics.values.shape[-1]
        values = value_freedom(self.config)
        if self.merge in ("mean", "first"):
            if self.merge == "first":
                equal = torch.zeros_like(equal).index_fill(0, torch.tensor(0, device=equal.device), 1.0)
            return mean_head(equal, dim), mean_head(equal, value_dim)
        if self.merge == "aligned":
            return self._keys(statistics, equal), aligned_head(statistics.values, values, equal)
        costs = statistics.key_metrics.diagonal(dim1=1, dim2=2).sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
        keys = self._keys(statistics, costs / costs.sum())
        if not values.scales:  # of exclusive heads; least squares would change angles
            return keys, aligned_head(statistics.values, values, equal)
        return keys, least_squares_head(statistics.values, values, statistics.value_metrics)

    def _keys(self, statistics: HeadStatistics, weights: Tensor) -> SharedHead:
        """Keys, by alignment or least squares. Under a norm only directions count, so heads get equal lengths first."""
        freedom = key_freedom(self.config, self.layer, self.context.norm)
        if self.config.qk_norm is None:
            if self.merge == "least-squares":
                return least_squares_head(statistics.keys, freedom, statistics.key_metrics)
            return aligned_head(statistics.keys, freedom, weights)
        traces = statistics.keys.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1).sum(-1)
        if self.config.qk_norm == "projection":
            traces = torch.ones_like(traces)
        lengths = traces.sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        normalized = statistics.keys / (lengths[:, None] * lengths)[..., None, None]
        shared = aligned_head(normalized, freedom, weights)
        scale = (weights * lengths).sum() / lengths
        return SharedHead(shared.down * scale[:, None, None], shared.up)

    def merge_groups(self, groups: Groups) -> dict[str, Tensor]:
        """The layer with one key head for each group."""
        layer = select_heads(self.layer, self.config, [head for group in groups for head in group])
        shared = [self.share(group) for group in groups]
        for name, which, query in (("mixer.k", 0, True), ("mixer.v", 1, False)):
            down = torch.stack([each[which].down for each in shared])  # [G, n, d, d]
            up = torch.cat([each[which].up for each in shared])  # [U, d, d]
            maps = head_maps(layer, name, self.heads).unflatten(0, down.shape[:2])
            set_head_maps(layer, name, torch.einsum("gnab,gnbi->gai", down, maps))
            repeated = up.repeat_interleave(self.config.heads // self.heads, dim=0)
            if query:
                queries = head_maps(layer, "mixer.q", self.config.heads)
                set_head_maps(layer, "mixer.q", repeated.mT @ queries)
            else:
                set_output_maps(layer, output_maps(layer, self.config.heads) @ repeated)
        self._merge_gains(layer, len(groups))
        return layer

    def _merge_gains(self, layer: dict[str, Tensor], groups: int) -> None:
        """Merge the per-head gains and biases of a key norm: their mean, or the first head's."""
        for name in ("mixer.k_norm.weight", "mixer.k_norm.bias"):
            if name in layer and self.config.qk_norm != "head":
                gains = layer[name].double()
                by_group = gains.reshape(groups, self.heads // groups, -1)
                merged = by_group[:, 0] if self.merge == "first" else by_group.mean(1)
                layer[name] = merged.reshape(-1, *gains.shape[1:])

    def similar_queries(self) -> np.ndarray:
        """1 − the correlation of the queries of every two key heads, aligned if merging aligns."""
        freedom = key_freedom(self.config, self.layer, self.context.norm) if self._aligns else None
        return _distances(similarity(self.statistics.queries, freedom))

    def similar_keys_values(self) -> np.ndarray:
        """1 − the correlation of keys, and of values, of every two key heads, aligned if merging aligns."""
        keys = key_freedom(self.config, self.layer, self.context.norm) if self._aligns else None
        values = value_freedom(self.config) if self._aligns else None
        distances = _distances(similarity(self.statistics.keys, keys))
        result: np.ndarray = distances + _distances(similarity(self.statistics.values, values))
        return result

    @property
    def _aligns(self) -> bool:
        return self.merge in ("aligned", "least-squares")

    @torch.no_grad()
    def similar_outputs(self, activations: LayerActivations) -> np.ndarray:
        """The squared change of the layer's output per token if two key heads are merged, for every two of them."""
        mixer = build_mixer(self.config, self.context, self.layer)
        out = output_maps(self.layer, self.config.heads).unflatten(0, (self.heads, -1))  # [U, R, D, d_v]
        text = list(batches(activations, PAIR_TOKENS))
        before = [head_outputs(mixer, x, layout) for x, layout in text]
        source = {name: self.layer[f"mixer.{name}"].double() for name, _ in mixer.named_parameters()}
        costs = np.zeros((self.heads, self.heads))
        for pairs in pair_rounds(self.heads):
            _load(mixer, source | self._stand_ins(pairs))
            for (x, layout), y in zip(text, before, strict=True):
                change = (head_outputs(mixer, x, layout) - y).unflatten(1, (self.heads, -1))  # [tokens, U, R, d_v]
                for a, b in pairs:
                    error = torch.einsum("turv,urdv->td", change[:, [a, b]], out[[a, b]])
                    costs[a, b] += float(error.square().sum())
        costs /= sum(len(y) for y in before)
        symmetric: np.ndarray = costs + costs.T
        return symmetric

    def _stand_ins(self, groups: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Keys and values as the heads of each group see them after merging: k_u becomes U_u k̂."""
        layer = dict(self.layer)
        for name, which in (("mixer.k", 0), ("mixer.v", 1)):
            maps = head_maps(layer, name, self.heads).clone()
            for group in groups:
                shared = self.share(group)[which]
                maps[list(group)] = shared.up @ torch.einsum("nab,nbi->ai", shared.down, maps[list(group)])
            set_head_maps(layer, name, maps)
        for name in ("mixer.k_norm.weight", "mixer.k_norm.bias"):
            if name in layer and self.config.qk_norm != "head":
                gains = layer[name].double().reshape(self.heads, -1).clone()
                for group in groups:
                    gains[list(group)] = (
                        gains[group[0]].clone() if self.merge == "first" else gains[list(group)].mean(0)
                    )
                layer[name] = gains.view_as(layer[name])
        prefixes = ("mixer.k", "mixer.v")
        return {name.removeprefix("mixer."): value for name, value in layer.items() if name.startswith(prefixes)}


def pair_rounds(heads: int) -> list[list[tuple[int, int]]]:
    """Every two heads once, in rounds in which no head occurs twice (a round-robin tournament)."""
    players = [*range(heads), *([-1] if heads % 2 else [])]
    rounds = []
    for _ in range(len(players) - 1):
        halves = zip(players[: len(players) // 2], reversed(players[len(players) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in halves if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def head_outputs(mixer: Attention, x: Tensor, layout: Layout) -> Tensor:
    """What the output projection reads, by query head: [tokens, H, d_v] of the tokens that are not padding."""
    seen: list[Tensor] = []
    handle = mixer.out.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    try:
        mixer(x, layout)
    finally:
        handle.remove()
    outputs: Tensor = seen[0][layout.positions >= 0].unflatten(-1, (mixer.heads, -1))
    return outputs


def _load(mixer: Attention, parameters: Parameters) -> None:
    values = {name: parameters[name].double() for name, _ in mixer.named_parameters()}
    mixer.load_state_dict(values, strict=False, assign=True)


def _distances(similarities: Tensor) -> np.ndarray:
    size = similarities.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    result: np.ndarray = (1 - similarities / (size[:, None] * size)).cpu().numpy()
    return result
