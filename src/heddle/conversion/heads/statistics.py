"""What decides which heads of an attention layer are alike, and what an error of each costs: on weights, or on a text.

An error δs of the score of query i and key j changes a head's output by p_ij δs W_o (v_j − o_i), to first order, with
p the attention weights and o_i their mean of v. So the squared change of the layer's output is w_ij δs² with
w_ij = p_ij² |W_o (v_j − o_i)|². A value's error δv changes it by W_o Σ_j p_ij δv_j.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heddle.conversion.activations import LayerActivations
from heddle.conversion.heads.parameters import Parameters, head_maps, output_maps
from heddle.numerics.attention.observer import Observation, observing_attention
from heddle.parts.context.build import BuildContext
from heddle.parts.context.layout import Layout
from heddle.parts.mixers.attention import Attention, AttentionConfig


@dataclass(frozen=True)
class HeadStatistics:
    """Of a layer with U key heads of d dims, H query heads and D = width.

    keys [U, U, d, d]: E k_u k_vᵀ, before the norm and the rotation. values [U, U, d_v, d_v]: E of attended values.
    queries [U, U, d, d]: E q_u q_vᵀ, summed over the query heads of u and v in their order. key_metrics [U, d, d] and
    value_metrics [U, d_v, d_v]: what an error of a head's keys and values costs.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    key_metrics: Tensor
    value_metrics: Tensor

    def select(self, key_heads: Sequence[int]) -> "HeadStatistics":
        """The same of some heads."""
        index = torch.tensor(list(key_heads), device=self.keys.device)
        keys, values, queries = (x[index][:, index] for x in (self.keys, self.values, self.queries))
        return HeadStatistics(keys, values, queries, self.key_metrics[index], self.value_metrics[index])


def gram(maps: Tensor, covariance: Tensor | None) -> Tensor:
    """W_u C W_vᵀ of maps [U, r, D+1], [U, U, r, r]; without a covariance C = I."""
    rows = maps.flatten(0, 1)
    product = rows @ rows.T if covariance is None else rows @ covariance @ rows.T
    blocks: Tensor = product.unflatten(1, (len(maps), -1)).unflatten(0, (len(maps), -1))
    return blocks.transpose(1, 2)


def weight_statistics(layer: Parameters, config: AttentionConfig) -> HeadStatistics:
    """As if inputs had variance 1 and were independent."""
    queries = head_maps(layer, "mixer.q", config.heads)
    metrics = (queries @ queries.mT).unflatten(0, (config.kv_heads or config.heads, -1)).sum(1)
    return _statistics(layer, config, (None, None), metrics)


@torch.no_grad()
def text_statistics(
    layer: Parameters, config: AttentionConfig, context: BuildContext, activations: LayerActivations
) -> HeadStatistics:
    """On the inputs of the layer's mixer on a text."""
    width = layer["mixer.q.weight"].shape[1]
    example = layer["mixer.q.weight"].double()
    inputs, attended = example.new_zeros(width + 1, width + 1), example.new_zeros(width + 1, width + 1)
    dim = config.head_dim or 0
    metrics = example.new_zeros(config.heads, dim, dim)
    mixer, tokens = build_mixer(config, context, layer), 0
    for x, layout in _rows(activations):
        real = layout.positions[0] >= 0
        tokens += int(real.sum())
        weights = _attention_weights(mixer, x, layout)  # [H, T, T]
        x = torch.cat((x[0], x.new_ones(x.shape[1], 1)), dim=1) * real[:, None]
        inputs += x.T @ x
        for head in weights:  # one at a time: [H, T, width] may be large
            mean = head @ x
            attended += mean.T @ mean / len(weights)
        metrics += _query_metrics(mixer, layer, config, x, weights)
    grouped = metrics.unflatten(0, (config.kv_heads or config.heads, -1)).sum(1)
    return _statistics(layer, config, (inputs / tokens, attended / tokens), grouped / tokens)


def _statistics(
    layer: Parameters, config: AttentionConfig, covariances: tuple[Tensor | None, Tensor | None], key_metrics: Tensor
) -> HeadStatistics:
    key_heads = config.kv_heads or config.heads
    inputs, attended = covariances
    queries = head_maps(layer, "mixer.q", config.heads).unflatten(0, (key_heads, -1))  # [U, R, d, D+1]
    out = output_maps(layer, config.heads).unflatten(0, (key_heads, -1))  # [U, R, D, d_v]
    return HeadStatistics(
        keys=gram(head_maps(layer, "mixer.k", key_heads), inputs),
        values=gram(head_maps(layer, "mixer.v", key_heads), attended),
        queries=torch.stack([gram(each, inputs) for each in queries.unbind(1)]).sum(0),
        key_metrics=key_metrics,
        value_metrics=(out.mT @ out).sum(1),
    )


def build_mixer(config: AttentionConfig, context: BuildContext, layer: Parameters) -> Attention:
    """A float64 mixer with the parameters `mixer.…` of a layer."""
    with torch.device("meta"):
        mixer = config.build(context).eval()
    for name, _ in list(mixer.named_parameters()):
        owner, _, attribute = name.rpartition(".")
        value = nn.Parameter(layer[f"mixer.{name}"].double(), requires_grad=False)
        setattr(mixer.get_submodule(owner), attribute, value)
    return mixer


def batches(activations: LayerActivations, limit: int | None = None) -> Iterator[tuple[Tensor, Layout]]:
    """The mixer's inputs [B, T, width] in float64, with their layouts; whole rows of at most about `limit` tokens."""
    for x, layout in zip(activations.mixer_inputs, activations.layouts, strict=True):
        if limit is None:
            yield x.double(), layout
            continue
        count = min(len(x), -(-limit // x.shape[1]))
        if count:
            yield x[:count].double(), _row_layout(layout, slice(0, count))
        limit -= count * x.shape[1]


def _rows(activations: LayerActivations) -> Iterator[tuple[Tensor, Layout]]:
    """The same row by row, [1, T, width] each."""
    for x, layout in batches(activations):
        for row in range(len(x)):
            yield x[row : row + 1], _row_layout(layout, slice(row, row + 1))


def _row_layout(layout: Layout, rows: slice) -> Layout:
    return layout.map_tensors(lambda tensor: tensor[rows])


def _attention_weights(mixer: Attention, x: Tensor, layout: Layout) -> Tensor:
    """Attention weights [H, T, T] of one row."""
    seen: list[Observation] = []
    with observing_attention(seen.append):
        mixer(x, layout)
    return seen[0].weights[0].double()


def _query_metrics(mixer: Attention, layer: Parameters, config: AttentionConfig, x: Tensor, weights: Tensor) -> Tensor:
    """Σ_ij w_ij q_i q_iᵀ of each query head [H, d, d], before rotation, on one row [x ; 1] [T, D+1]."""
    assert config.kv_heads is not None
    size = config.heads // config.kv_heads
    q = mixer.q(x[:, :-1])
    if mixer.q_norm is not None and config.qk_norm == "projection":
        q = mixer.q_norm(q)
    q = q.unflatten(-1, (config.heads, -1))
    if mixer.q_norm is not None and config.qk_norm != "projection":
        q = mixer.q_norm(q)
    out = output_maps(layer, config.heads)
    values = torch.einsum("uad,td->uta", head_maps(layer, "mixer.v", config.kv_heads), x)
    metrics = []
    for head in range(config.heads):
        p, v = weights[head], values[head // size]
        product = out[head].T @ out[head]
        o = p @ v
        v_size, o_size = ((each @ product * each).sum(-1) for each in (v, o))
        distance = v_size + o_size[:, None] - 2 * o @ product @ v.T
        w = (p.square() * distance.clamp_min(0.0)).sum(1)
        metrics.append((q[:, head] * w[:, None]).T @ q[:, head])
    return torch.stack(metrics)
