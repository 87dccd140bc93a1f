"""The parameters of an `attention` mixer by head, and the maps of a head's dims that leave the layer as it was."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.conversion.weights import LayerActivations
from heddle.model.initialization import set_parameter
from heddle.numerics.attention.observer import Observation, observing_attention
from heddle.parts.build import BuildContext
from heddle.parts.layout import Layout
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.norms import NormConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions import RotationConfig
from heddle.parts.positions.axial_rope import AxialRopeConfig
from heddle.parts.positions.rope import RopeConfig

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True)
class HeadFreedom:
    """The maps M of a head's d dims that commute with whatever stands between a head and its reader.

    A key M k with the query M⁻ᵀ q gives the same scores; a value M v with the output W_o M⁻¹ the same output.
    pairs: int64 [P, 2], dims that a rotary embedding rotates together. A pair is multiplied by a complex number.
    phases: bool [P], whether that may be any number; else it is 1 or −1. groups: dims among which M may be any matrix.
    All other dims stay. scales: whether M may change lengths; else it is orthogonal.
    """

    dim: int
    pairs: Tensor
    phases: Tensor
    groups: tuple[Tensor, ...]
    scales: bool


def head_sizes(config: AttentionConfig) -> tuple[int, int, int]:
    """kv_heads, head_dim and value_dim of a resolved config."""
    assert config.kv_heads is not None
    assert config.head_dim is not None
    assert config.value_dim is not None
    return config.kv_heads, config.head_dim, config.value_dim


def state_elements(config: AttentionConfig) -> int:
    """Elements of state per token of a resolved attention layer."""
    kv_heads, head_dim, value_dim = head_sizes(config)
    return kv_heads * (head_dim + value_dim)


def rotary_pairs(position: RotationConfig, head_dim: int) -> Tensor | None:
    """The dims that are rotated together, int64 [P, 2]; None for an unknown rotation."""
    if not isinstance(position, RopeConfig | AxialRopeConfig):
        return None
    rotary_dim = position.rotary_dim or head_dim
    axes = 2 if isinstance(position, AxialRopeConfig) else 1
    dims = torch.arange(rotary_dim).view(axes, -1)
    pairs = dims.view(axes, 2, -1).mT if position.layout == "half" else dims.view(axes, -1, 2)
    return pairs.reshape(-1, 2)


def key_freedom(config: AttentionConfig, layer: Parameters, norm: NormConfig) -> HeadFreedom:
    """The freedom of keys: RoPE allows rotations of its pairs, query-key norms only those that commute with γ."""
    _, dim, _ = head_sizes(config)
    pairs: Tensor | None = torch.zeros(0, 2, dtype=torch.int64)
    if isinstance(config.position, RotationConfig):
        pairs = rotary_pairs(config.position, dim)
    if pairs is None or config.qkv_clip is not None or (config.qk_norm is not None and not isinstance(norm, RMSConfig)):
        empty = torch.zeros(0, 2, dtype=torch.int64)
        return HeadFreedom(dim, empty, torch.zeros(0, dtype=torch.bool), (), scales=False)
    is_rotated = torch.zeros(dim, dtype=torch.bool)
    is_rotated[pairs.flatten()] = True
    rest = (~is_rotated).nonzero().flatten()
    if config.qk_norm is None:
        phases = torch.ones(len(pairs), dtype=torch.bool)
        return HeadFreedom(dim, pairs, phases, (rest,) if len(rest) else (), scales=True)
    weights = [layer.get(f"mixer.{name}.weight") for name in ("q_norm", "k_norm")]
    gains = torch.cat(
        [torch.ones(1, dim) if each is None else each.double().cpu().reshape(-1, dim) for each in weights]
    )
    phases = (gains[:, pairs[:, 0]] == gains[:, pairs[:, 1]]).all(0)
    return HeadFreedom(dim, pairs, phases, _equal_columns(gains, rest), scales=False)


def value_freedom(config: AttentionConfig) -> HeadFreedom:
    """The freedom of values: any map, unless a gate multiplies each channel; then each channel stays by itself.

    Exclusive heads remove a component that depends on angles, so only orthogonal maps are free there. With a bound on
    the values only their signs are free.
    """
    _, _, value_dim = head_sizes(config)
    dims = torch.arange(value_dim)
    clipped = config.qkv_clip is not None
    groups = tuple(dims.split(1)) if config.gate == "channel" or clipped else (dims,)
    empty = torch.zeros(0, 2, dtype=torch.int64)
    scales = not (config.exclusive or clipped)
    return HeadFreedom(value_dim, empty, torch.zeros(0, dtype=torch.bool), groups, scales)


def _equal_columns(gains: Tensor, dims: Tensor) -> tuple[Tensor, ...]:
    """Dims in groups with equal gains in every head."""
    groups: dict[tuple[float, ...], list[int]] = {}
    for dim in dims.tolist():
        groups.setdefault(tuple(gains[:, dim].tolist()), []).append(dim)
    return tuple(torch.tensor(group) for group in groups.values())


def select_heads(layer: Parameters, config: AttentionConfig, key_heads: Sequence[int]) -> dict[str, Tensor]:
    """The parameters with some key heads only, in this order, each together with the query heads that read it."""
    kv_heads, *_ = head_sizes(config)
    size = config.heads // kv_heads
    queries = [head * size + each for head in key_heads for each in range(size)]
    result = dict(layer)
    for name, value in layer.items():
        dim, is_key = _heads_of(name, config)
        if dim is not None:
            heads, chosen = (kv_heads, key_heads) if is_key else (config.heads, queries)
            result[name] = _take(value, dim, heads, chosen)
    return result


def repeat_key_heads(layer: Parameters, config: AttentionConfig, repeats: int) -> dict[str, Tensor]:
    """The parameters with each key and value head repeated, as neighbors."""
    kv_heads, *_ = head_sizes(config)
    chosen = [head for head in range(kv_heads) for _ in range(repeats)]
    result = dict(layer)
    for name, value in layer.items():
        dim, is_key = _heads_of(name, config)
        if dim is not None and is_key:
            result[name] = _take(value, dim, kv_heads, chosen)
    return result


def _take(value: Tensor, dim: int, heads: int, chosen: Sequence[int]) -> Tensor:
    index = torch.tensor(list(chosen), device=value.device)
    result: Tensor = value.unflatten(dim, (heads, -1)).index_select(dim, index).flatten(dim, dim + 1)
    return result


def _heads_of(name: str, config: AttentionConfig) -> tuple[int | None, bool]:
    """The dim of a parameter that runs over heads (None: none), and whether they are key heads."""
    if name == "mixer.out.weight":
        return 1, False
    module = name.removeprefix("mixer.").partition(".")[0]
    if not name.startswith("mixer.") or module in ("out", "relative_logits"):
        return None, False
    if module in ("q_norm", "k_norm"):
        return None if config.qk_norm == "head" else 0, module == "k_norm"
    return 0, module in ("k", "v")


def head_maps(layer: Parameters, name: str, heads: int) -> Tensor:
    """[W, b] of a projection by head, float64 [heads, rows, inputs + 1]; without a bias the last column is 0."""
    weight = layer[f"{name}.weight"].double()
    bias = layer.get(f"{name}.bias")
    column = weight.new_zeros(len(weight), 1) if bias is None else bias.double()[:, None]
    maps: Tensor = torch.cat((weight, column), dim=1).unflatten(0, (heads, -1))
    return maps


def set_head_maps(layer: dict[str, Tensor], name: str, maps: Tensor) -> None:
    """Write [W, b] by head, [heads, rows, inputs + 1], to a projection."""
    rows = maps.flatten(0, 1)
    layer[f"{name}.weight"] = rows[:, :-1]
    if f"{name}.bias" in layer:
        layer[f"{name}.bias"] = rows[:, -1]


def output_maps(layer: Parameters, heads: int) -> Tensor:
    """W_o by query head, float64 [heads, width, value_dim]."""
    maps: Tensor = layer["mixer.out.weight"].double().unflatten(1, (heads, -1))
    return maps.transpose(0, 1)


def set_output_maps(layer: dict[str, Tensor], maps: Tensor) -> None:
    """Write W_o by query head, [heads, width, value_dim]."""
    layer["mixer.out.weight"] = maps.transpose(0, 1).flatten(1)


# What decides which heads of an attention layer are alike, and what an error of each costs: on weights, or on a text.
#
# An error δs of the score of query i and key j changes a head's output by p_ij δs W_o (v_j − o_i), to first order, with
# p the attention weights and o_i their mean of v. So the squared change of the layer's output is w_ij δs² with
# w_ij = p_ij² |W_o (v_j − o_i)|². A value's error δv changes it by W_o Σ_j p_ij δv_j.


@dataclass(frozen=True)
class HeadStatistics:
    """Second moments of a layer with U key heads of d dims, H query heads and D = width.

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
        """The statistics of some key heads."""
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
    """The statistics for independent inputs of variance 1."""
    queries = head_maps(layer, "mixer.q", config.heads)
    metrics = (queries @ queries.mT).unflatten(0, (head_sizes(config)[0], -1)).sum(1)
    return _statistics(layer, config, (None, None), metrics)


@torch.no_grad()
def text_statistics(
    layer: Parameters, config: AttentionConfig, context: BuildContext, activations: LayerActivations
) -> HeadStatistics:
    """The statistics for the inputs of the layer's mixer on a text."""
    width = layer["mixer.q.weight"].shape[1]
    example = layer["mixer.q.weight"].double()
    inputs, attended = example.new_zeros(width + 1, width + 1), example.new_zeros(width + 1, width + 1)
    key_heads, dim, _ = head_sizes(config)
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
    grouped = metrics.unflatten(0, (key_heads, -1)).sum(1)
    return _statistics(layer, config, (inputs / tokens, attended / tokens), grouped / tokens)


def _statistics(
    layer: Parameters, config: AttentionConfig, covariances: tuple[Tensor | None, Tensor | None], key_metrics: Tensor
) -> HeadStatistics:
    key_heads, *_ = head_sizes(config)
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
        set_parameter(mixer, name, layer[f"mixer.{name}"].double(), requires_grad=False)
    return mixer


def batches(activations: LayerActivations, limit: int | None = None) -> Iterator[tuple[Tensor, Layout]]:
    """The mixer's inputs [B, T, width] in float64, with their layouts; whole rows of at most about `limit` tokens."""
    for x, layout in zip(activations.mixer_inputs, activations.layouts, strict=True):
        if limit is None:
            yield x.double(), layout
            continue
        count = min(len(x), -(-limit // x.shape[1]))
        if count:
            yield x[:count].double(), rows_of(layout, slice(0, count))
        limit -= count * x.shape[1]


def _rows(activations: LayerActivations) -> Iterator[tuple[Tensor, Layout]]:
    """The same row by row, [1, T, width] each."""
    for x, layout in batches(activations):
        for row in range(len(x)):
            yield x[row : row + 1], rows_of(layout, slice(row, row + 1))


def rows_of(layout: Layout, rows: slice) -> Layout:
    """The layout of some rows."""
    return layout.map_tensors(lambda tensor: tensor[rows])


def _attention_weights(mixer: Attention, x: Tensor, layout: Layout) -> Tensor:
    """Attention weights [H, T, T] of one row."""
    seen: list[Observation] = []
    with observing_attention(seen.append):
        mixer(x, layout)
    return seen[0].weights[0].double()


def _query_metrics(mixer: Attention, layer: Parameters, config: AttentionConfig, x: Tensor, weights: Tensor) -> Tensor:
    """Σ_ij w_ij q_i q_iᵀ of each query head [H, d, d], before rotation, on one row [x ; 1] [T, D+1]."""
    key_heads, *_ = head_sizes(config)
    size = config.heads // key_heads
    q = mixer.q(x[:, :-1])
    if mixer.q_norm is not None and config.qk_norm == "projection":
        q = mixer.q_norm(q)
    q = q.unflatten(-1, (config.heads, -1))
    if mixer.q_norm is not None and config.qk_norm != "projection":
        q = mixer.q_norm(q)
    out = output_maps(layer, config.heads)
    values = torch.einsum("uad,td->uta", head_maps(layer, "mixer.v", key_heads), x)
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
