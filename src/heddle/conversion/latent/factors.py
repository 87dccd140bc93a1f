"""The linear maps of a softmax attention layer, on which its conversion to latent attention works.

Dims of query and key heads are in the order [real parts ; imaginary parts ; not rotated]: pair f of a head is the
complex number z_f = k_f + i k_{P+f}, and RoPE multiplies it by exp(i θ_f position). Scores are Re(conj(q_f) z_f).
Maps act on [x ; 1]: their last column is the bias.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.config import DesignError
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.rope import Rope, RopeConfig


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
    """The mixer, if latent attention can hold it. Raises DesignError that names what it cannot hold."""
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
        "dropout": mixer.dropout > 0,
        "norm_after_rotation": mixer.norm_after_rotation,
        f"position {'' if position is None else position.kind}": not (
            position is None or isinstance(position, RopeConfig)
        ),
        f"scaling {'' if scaling is None else scaling.kind}": scaling is not None and scaling.length_dependent,
    }
    for feature, is_there in features.items():
        if is_there:
            reason = f"has {feature}, which latent attention cannot hold; convert other layers, or remove it first"
            raise DesignError(path, reason)
    return mixer


def attention_factors(config: AttentionConfig, layer: Mapping[str, Tensor]) -> AttentionFactors:
    """The maps of a resolved layer's parameters, by their names in the layer. Query-key norms are left out."""
    assert config.head_dim is not None
    assert config.scale is not None
    assert config.kv_heads is not None
    order, frequencies, factor = head_dims(config, layer["mixer.q.weight"].dtype)
    q, k = (_map(layer, name).unflatten(0, (-1, config.head_dim))[:, order] for name in ("mixer.q", "mixer.k"))
    for x in (q, k):
        x[:, : 2 * len(frequencies)] *= factor
    out = layer["mixer.out.weight"].double()
    bias = layer.get("mixer.out.bias")
    return AttentionFactors(
        q=q,
        k=k,
        v=_map(layer, "mixer.v").unflatten(0, (config.kv_heads, -1)),
        out=out.unflatten(1, (config.heads, -1)).transpose(0, 1),
        out_bias=out.new_zeros(len(out)) if bias is None else bias.double(),
        frequencies=frequencies.to(out.device),
        scale=config.scale,
    )


def _map(layer: Mapping[str, Tensor], name: str) -> Tensor:
    """[W, b] of a projection, in float64."""
    weight = layer[f"{name}.weight"].double()
    bias = layer.get(f"{name}.bias")
    column = weight.new_zeros(len(weight), 1) if bias is None else bias.double()[:, None]
    return torch.cat((weight, column), dim=1)


def head_dims(config: AttentionConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """The order of dims [real ; imaginary ; not rotated] of a head, the frequencies, and the factor of rotated dims.

    dtype: of the model, which computes its frequencies in float64 or in float32.
    """
    position, dim = config.position, config.head_dim
    assert dim is not None
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
