"""Fewer key and value heads for one attention layer: heads are ordered by groups, and each group becomes one head.

Everything that belongs to a query head moves with it: rows of W_q, biases, sinks, gates, gains, and columns of W_o.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from heddle.conversion.activations import LayerActivations
from heddle.conversion.heads.alignment import SharedHead, aligned_head, least_squares_head, mean_head, similarity
from heddle.conversion.heads.groups import Groups
from heddle.conversion.heads.parameters import (
    Parameters,
    head_maps,
    key_freedom,
    output_maps,
    select_heads,
    set_head_maps,
    set_output_maps,
    value_freedom,
)
from heddle.conversion.heads.statistics import HeadStatistics, batches, build_mixer
from heddle.parts.context.build import BuildContext
from heddle.parts.context.layout import Layout
from heddle.parts.mixers.attention import Attention, AttentionConfig

Merge = Literal["mean", "first", "aligned", "least-squares"]

PAIR_TOKENS = 4096  # of the text on which every two heads are merged to see what that costs


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
        return self._keys(statistics, costs / costs.sum()), least_squares_head(
            statistics.values, values, statistics.value_metrics
        )

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
        """Gains and biases of a key norm with weights of its own for each head: their mean, or the first."""
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
    """What the output projection reads, by query head: [tokens, H, d_v] of the tokens that are no padding."""
    seen: list[Tensor] = []
    handle = mixer.out.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    try:
        mixer(x, layout)
    finally:
        handle.remove()
    outputs: Tensor = seen[0][layout.positions >= 0].unflatten(-1, (mixer.heads, -1))
    return outputs


def _load(mixer: Attention, parameters: Parameters) -> None:
    for name, parameter in mixer.named_parameters():
        parameter.data = parameters[name].double()


def _distances(similarities: Tensor) -> np.ndarray:
    size = similarities.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    result: np.ndarray = (1 - similarities / (size[:, None] * size)).cpu().numpy()
    return result
