"""The linear maps of a softmax attention layer, on which its conversion to latent attention works.

Dims of query and key heads are in the order [real parts ; imaginary parts ; not rotated]: pair f of a head is the
complex number z_f = k_f + i k_{P+f}, and RoPE multiplies it by exp(i θ_f position). Scores are Re(conj(q_f) z_f).
Maps act on [x ; 1]: their last column is the bias.
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.conversion.head_parameters import head_maps, head_sizes
from heddle.conversion.weights import LayerActivations
from heddle.parts.layout import Layout
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.attention import Attention, AttentionConfig
from heddle.parts.positions.rope import Rope, RopeConfig
from heddle.progress import progress_bar


@dataclass(frozen=True)
class AttentionFactors:
    """Float64 maps of one layer. H query heads, G key and value heads, d and d_v dims, D = width, P rotated pairs.

    q [H, d, D+1], k [G, d, D+1], v [G, d_v, D+1]; out [H, D, d_v], out_bias [D]. frequencies [P]: radians per token.
    scale: of the scores.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    out_bias: Tensor
    frequencies: Tensor
    scale: float

    @property
    def pairs(self) -> int:
        """P, the rotated pairs of each head."""
        return len(self.frequencies)

    @property
    def group_size(self) -> int:
        """Query heads per key head."""
        return len(self.q) // len(self.k)


def supported_attention(mixer: MixerConfig | None, path: str) -> AttentionConfig:
    """The mixer, if latent attention can express it. Raises DesignError naming the feature that it cannot express."""
    if not isinstance(mixer, AttentionConfig):
        kind = "no mixer" if mixer is None else f"kind {mixer.kind}"
        raise DesignError(path, f"has {kind}, but only softmax attention becomes latent attention; leave it out")
    position = mixer.position
    scaling = position.scaling if isinstance(position, RopeConfig) else None
    features = {
        "window": mixer.window is not None,
        "causal: false": not mixer.causal,
        "sink": mixer.sink,
        "gate": mixer.gate is not None,
        "softcap": mixer.softcap is not None,
        "temperature_beta": mixer.temperature_beta is not None,
        "exclusive": mixer.exclusive,
        "forget": mixer.forget,
        "relative_dim": mixer.relative_dim is not None,
        "qkv_clip": mixer.qkv_clip is not None,
        "value_scale": mixer.value_scale is not None,
        "dropout": mixer.dropout > 0,
        "norm_after_rotation": mixer.norm_after_rotation,
        f"position {'' if position is None else position.kind}": not (
            position is None or isinstance(position, RopeConfig)
        ),
        f"scaling {'' if scaling is None else scaling.kind}": scaling is not None and scaling.length_dependent,
    }
    for feature, is_there in features.items():
        if is_there:
            reason = f"has {feature}, which latent attention cannot express; convert other layers, or remove it first"
            raise DesignError(path, reason)
    return mixer


def attention_factors(config: AttentionConfig, layer: Mapping[str, Tensor]) -> AttentionFactors:
    """The maps of a resolved layer's parameters, by their names in the layer. Query-key norms are left out."""
    assert config.scale is not None
    kv_heads, *_ = head_sizes(config)
    order, frequencies, factor = head_dims(config, layer["mixer.q.weight"].dtype)
    maps = (("mixer.q", config.heads), ("mixer.k", kv_heads))
    q, k = (head_maps(layer, name, heads)[:, order] for name, heads in maps)
    for x in (q, k):
        x[:, : 2 * len(frequencies)] *= factor
    out = layer["mixer.out.weight"].double()
    bias = layer.get("mixer.out.bias")
    return AttentionFactors(
        q=q,
        k=k,
        v=head_maps(layer, "mixer.v", kv_heads),
        out=out.unflatten(1, (config.heads, -1)).transpose(0, 1),
        out_bias=out.new_zeros(len(out)) if bias is None else bias.double(),
        frequencies=frequencies.to(out.device),
        scale=config.scale,
    )


def head_dims(config: AttentionConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """The order of dims [real ; imaginary ; not rotated] of a head, the frequencies, and the factor of rotated dims.

    dtype: of the model, which computes its frequencies in float64 or in float32.
    """
    position, (_, dim, _) = config.position, head_sizes(config)
    if not isinstance(position, RopeConfig):
        return torch.arange(dim), torch.zeros(0, dtype=torch.float64), 1.0
    rope = Rope(position, position.rotary_dim or dim)
    frequencies = rope.scaled_frequencies(1, torch.float64 if dtype == torch.float64 else torch.float32)
    rotated = torch.arange(rope.dim)
    if position.layout == "interleaved":
        rotated = torch.cat((rotated[0::2], rotated[1::2]))
    order = torch.cat((rotated, torch.arange(rope.dim, dim)))
    return order, torch.tensor(frequencies.inv_freq, dtype=torch.float64), frequencies.attention_factor


def complex_pairs(x: Tensor, pairs: int) -> Tensor:
    """Rotated dims of heads [..., d, n] -> complex numbers [..., P, n]."""
    return torch.complex(x[..., :pairs, :], x[..., pairs : 2 * pairs, :])


def real_dims(z: Tensor) -> Tensor:
    """Complex numbers [..., P, n] -> dims [..., 2P, n], real parts first."""
    return torch.cat((z.real, z.imag), dim=-2)


# What decides which part of keys and values a smaller state should keep, measured on a calibration text.
#
# An error δs of the score of query i and key j changes a head's output by p_ij δs W_o (v_j − o_i), to first order. So
# the squared change of the layer's output is w_ij δs² with w_ij = p_ij² |W_o (v_j − o_i)|², where p are the attention
# weights and o_i their mean of v. An error of a value changes it by p_ij W_o δv_j. Both are in units of the output.


class TextRow(NamedTuple):
    """T tokens: [x ; 1] [T, D+1], positions [T], their angles [T, P], and which keys each query sees [T, T]."""

    x: Tensor
    positions: Tensor
    angles: Tensor
    visible: Tensor


class HeadEffects(NamedTuple):
    """One head's effects: scores [T, T], w_ij; values [T, T], p_ij²; output [T, D]: its part of the layer's output."""

    scores: Tensor
    values: Tensor
    output: Tensor


@dataclass
class LatentStatistics:
    """Sums over a text. H query heads, D = width, N tokens, Δ = i − j up to the longest text.

    inputs [D+1, D+1]: Σ [x ; 1][x ; 1]ᵀ. queries [H, d, d]: Σ w_ij q_i q_iᵀ, before rotation.
    offsets [H, Δ]: Σ of w_ij by offset. values [H]: Σ p_ij². output: Σ |y|², y the layer's output.
    """

    inputs: Tensor
    queries: Tensor
    offsets: Tensor
    values: Tensor
    output: float = 0.0

    @property
    def tokens(self) -> float:
        """N."""
        return float(self.inputs[-1, -1])

    @property
    def mean(self) -> Tensor:
        """The mean of [x ; 1], [D+1]."""
        return self.inputs[-1] / self.tokens

    @property
    def covariance(self) -> Tensor:
        """Of x, [D, D]."""
        mean = self.mean
        return (self.inputs / self.tokens - mean[:, None] * mean)[:-1, :-1]

    def mean_rotation(self, frequencies: Tensor) -> Tensor:
        """The mean of exp(−i θ Δ) under the weights of each head, complex [H, len(frequencies)]."""
        offsets = torch.arange(self.offsets.shape[1], dtype=torch.float64, device=self.offsets.device)
        rotations = torch.exp(-1j * offsets[:, None] * frequencies)
        total = self.offsets.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        return (self.offsets / total).to(rotations.dtype) @ rotations


def latent_statistics(
    factors: AttentionFactors, inputs: Sequence[Tensor], layouts: Sequence[Layout]
) -> LatentStatistics:
    """Measure the statistics of a layer on its mixer's inputs [B, T, D] of each batch."""
    heads, dim, width = factors.q.shape
    device = factors.q.device
    longest = max(int(layout.positions.max()) for layout in layouts) + 1
    result = LatentStatistics(
        inputs=torch.zeros(width, width, dtype=torch.float64, device=device),
        queries=torch.zeros(heads, dim, dim, dtype=torch.float64, device=device),
        offsets=torch.zeros(heads, longest, dtype=torch.float64, device=device),
        values=torch.zeros(heads, dtype=torch.float64, device=device),
    )
    for row in text_rows(factors, inputs, layouts):
        _add_row(result, factors, row)
    return result


def text_rows(factors: AttentionFactors, inputs: Sequence[Tensor], layouts: Sequence[Layout]) -> Iterator[TextRow]:
    """The rows of a text, without padding."""
    with progress_bar("statistics of a layer", sum(map(len, inputs)), "rows") as bar:
        for batch, layout in zip(inputs, layouts, strict=True):
            mask = layout.attention_mask(None, True).materialize()
            for x, positions, visible in zip(batch, layout.positions, mask, strict=True):
                is_token = positions >= 0
                x, positions = x[is_token].double(), positions[is_token]
                x = torch.cat((x, x.new_ones(len(x), 1)), dim=1)
                yield TextRow(
                    x, positions, positions.double()[:, None] * factors.frequencies, visible[is_token][:, is_token]
                )
                bar.advance(1)


def head_effects(factors: AttentionFactors, row: TextRow, head: int, q: Tensor, k: Tensor) -> HeadEffects:
    """What errors of one head's scores and values change, for its queries and keys [T, d] before rotation."""
    v = row.x @ factors.v[head // factors.group_size].T
    scores = rotate_pairs(q, row.angles) @ rotate_pairs(k, row.angles).T * factors.scale
    p = scores.masked_fill(~row.visible, float("-inf")).softmax(dim=-1)
    v, o = v @ factors.out[head].T, p @ v @ factors.out[head].T
    distance = v.square().sum(1) + o.square().sum(1)[:, None] - 2 * o @ v.T
    squared = p.square()
    return HeadEffects(squared * distance.clamp_min(0.0), squared, o)


def _add_row(result: LatentStatistics, factors: AttentionFactors, row: TextRow) -> None:
    """Add one row of tokens. One head at a time: its weights [T, T] are the largest tensor."""
    x = row.x
    result.inputs += x.T @ x
    offsets = (row.positions[:, None] - row.positions).clamp_min(0).flatten()
    y = factors.out_bias.expand(len(x), -1)
    for head in range(len(factors.q)):
        q, k = x @ factors.q[head].T, x @ factors.k[head // factors.group_size].T
        scores, values, output = head_effects(factors, row, head, q, k)
        result.queries[head] += (q * scores.sum(1, keepdim=True)).T @ q
        result.offsets[head].index_add_(0, offsets, scores.flatten())
        result.values[head] += values.sum()
        y = y + output
    result.output += float(y.square().sum())


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate heads [T, d], whose dims are ordered as in `heddle.conversion.latent_factors`, by angles [T, P]."""
    pairs = angles.shape[1]
    z = complex_pairs(x.T, pairs) * torch.exp(1j * angles.T)
    return torch.cat((real_dims(z), x.T[2 * pairs :])).T


# Query-key norms as linear maps: W_q and W_k fitted to the normalized heads on a text.
#
# A norm divides each head by a number that depends on the token, which no map of x does. The least squares fit keeps
# the mean of that number; its variation between tokens is lost. Keys are weighted by what their errors change in the
# layer's output, since a head attends to few tokens.


RIDGE = 1e-9  # of the mean square of [x ; 1]
EVEN_WEIGHT = 0.01  # of all keys, beside their effect: a head may attend to fewer tokens than x has dims


class NormalizedHeads:
    """Queries and keys of a layer as its norms make them, with dims ordered as in `latent.factors`."""

    def __init__(self, config: AttentionConfig, activations: LayerActivations) -> None:
        mixer = copy.deepcopy(activations.layer.mixer)
        assert isinstance(mixer, Attention)
        dtype = mixer.q.weight.dtype
        self.mixer, self.has_bias = mixer.double(), mixer.q.bias is not None
        self.order, frequencies, self.factor = head_dims(config, dtype)
        self.rotary_dim = 2 * len(frequencies)

    @torch.no_grad()
    def heads(self, x: Tensor, name: str) -> Tensor:
        """Queries (`q`) or keys (`k`) [T, heads, d] of tokens [x ; 1] [T, D+1], before rotation."""
        mixer = self.mixer
        projection, norm = (mixer.q, mixer.q_norm) if name == "q" else (mixer.k, mixer.k_norm)
        assert projection is not None
        heads: Tensor = projection(x[:, :-1])
        if mixer.qk_norm != "projection":
            heads = heads.unflatten(-1, (-1, mixer.head_dim))
        if norm is not None:
            heads = norm(heads)
        heads = heads.reshape(len(x), -1, mixer.head_dim)[..., self.order]
        heads[..., : self.rotary_dim] *= self.factor
        return heads


def fit_norms(factors: AttentionFactors, config: AttentionConfig, activations: LayerActivations) -> AttentionFactors:
    """The factors of a layer with the maps of queries and keys that are nearest to its normalized heads.

    Queries of a layer without biases get none, since families with latent attention have none.
    """
    normalized = NormalizedHeads(config, activations)
    inputs = factors.q.shape[2] - (not normalized.has_bias)
    moments, product = factors.q.new_zeros(inputs, inputs), factors.q.new_zeros(factors.q[..., 0].numel(), inputs)
    for row in text_rows(factors, activations.mixer_inputs, activations.layouts):
        x = row.x[:, :inputs]
        moments += x.T @ x
        product += normalized.heads(row.x, "q").flatten(1).T @ x
    q = torch.zeros_like(factors.q)
    q[..., :inputs] = _solve(moments, product).unflatten(0, factors.q.shape[:2])
    keys = [_fit_keys(factors, normalized, activations, group) for group in range(len(factors.k))]
    return dataclasses.replace(factors, q=q, k=torch.stack(keys))


def _fit_keys(
    factors: AttentionFactors, normalized: NormalizedHeads, activations: LayerActivations, group: int
) -> Tensor:
    """The map of one key head, [d, D+1]. One head at a time, since each has its own weights."""
    _, dim, width = factors.k.shape
    moments = factors.k.new_zeros(width, width)
    product = factors.k.new_zeros(dim, width)
    for row in text_rows(factors, activations.mixer_inputs, activations.layouts):
        queries, k = normalized.heads(row.x, "q"), normalized.heads(row.x, "k")[:, group]
        weights = k.new_zeros(len(k))
        for head in range(group * factors.group_size, (group + 1) * factors.group_size):
            q = queries[:, head]
            weights += q.square().sum(1) @ head_effects(factors, row, head, q, k).scores
        weights += EVEN_WEIGHT * weights.mean()
        weighted = row.x * weights[:, None]
        moments += weighted.T @ row.x
        product += k.T @ weighted
    return _solve(moments, product)


def _solve(moments: Tensor, product: Tensor) -> Tensor:
    """The least squares map of inputs with these second moments, from products of outputs and inputs."""
    ridge = RIDGE * moments.diagonal().mean() + torch.finfo(torch.float64).tiny
    moments = moments + ridge * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    solution: Tensor = torch.linalg.solve(moments, product.T)
    return solution.T
