"""Parts of a design that a family's `write_config` looks up: the first of a kind, or a default if there is none.

`write_config` must work for any design, so none of these functions fails. Designs are resolved: defaults are filled in.
"""

from typing import Any, TypeVar

from heddle.config import Config
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards.gated import GatedConfig
from heddle.parts.feedforwards.mlp import MLPConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.mixers.pair import PairConfig
from heddle.parts.norms.layer import LayerNormConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions.rope import RopeConfig

M = TypeVar("M", bound=MixerConfig)
DENSE, SPARSE = "dense", "sparse"  # in `mlp_layer_types`

HF_ACTIVATIONS = {"relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
HEDDLE_ACTIVATIONS = {hf_name: name for name, hf_name in HF_ACTIVATIONS.items()} | {
    "gelu_new": "gelu_tanh", "gelu_python": "gelu", "gelu_fast": "gelu_tanh", "swish": "silu",
}  # fmt: skip
# The nearest; the families that have them (gpt_oss, apertus) write them themselves.
HF_ACTIVATIONS |= {"swiglu_clamped": "silu", "swiglu_limited": "silu", "xielu": "silu"}


def layers(design: ModelConfig) -> list[LayerConfig]:
    """Every layer, from the first to the last."""
    return [layer for _, layer in design.expand()]


def mixers(design: ModelConfig) -> list[MixerConfig]:
    """The mixers of every layer; a pair's two mixers one after the other."""
    result: list[MixerConfig] = []
    for layer in layers(design):
        if isinstance(layer.mixer, PairConfig):
            result += [layer.mixer.first, layer.mixer.second]
        elif layer.mixer is not None:
            result.append(layer.mixer)
    return result


def first_attention(design: ModelConfig) -> AttentionConfig:
    """The first softmax attention, also of a pair, or a default one."""
    return first_mixer(design, AttentionConfig(heads=1, kv_heads=1, head_dim=design.width, value_dim=design.width))


def first_mixer(design: ModelConfig, default: M) -> M:
    """The first mixer of the kind of `default`, also of a pair, or `default`."""
    return next((mixer for mixer in mixers(design) if isinstance(mixer, type(default))), default)


def first_latent_attention(design: ModelConfig) -> LatentAttentionConfig:
    """The first latent attention, or a default one."""
    default = LatentAttentionConfig(heads=1, kv_rank=design.width, nope_dim=design.width, rope_dim=2, value_dim=1)
    return first_mixer(design, default)


def first_gated_delta(design: ModelConfig) -> GatedDeltaConfig:
    """The first gated delta rule, or a default one."""
    return first_mixer(design, GatedDeltaConfig(heads=1, key_heads=1, head_dim=design.width, value_dim=design.width))


def rope_of(mixer: Any) -> RopeConfig:
    """The RoPE of a mixer, or a default one."""
    position = getattr(mixer, "position", None)
    return position if isinstance(position, RopeConfig) else RopeConfig()


def has_rope(mixer: Any) -> bool:
    """Whether a mixer rotates by RoPE."""
    return isinstance(getattr(mixer, "position", None), RopeConfig)


def first_rope(design: ModelConfig) -> RopeConfig:
    """The RoPE of the first mixer that has one, or a default one."""
    positions = (getattr(mixer, "position", None) for mixer in mixers(design))
    return next((position for position in positions if isinstance(position, RopeConfig)), RopeConfig())


def first_gated(design: ModelConfig) -> GatedConfig:
    """The first gated feed-forward, or a default one."""
    return next((x for x in _feedforwards(design) if isinstance(x, GatedConfig)), GatedConfig(hidden=4 * design.width))


def first_mlp(design: ModelConfig) -> MLPConfig:
    """The first MLP, or a default one."""
    return next((x for x in _feedforwards(design) if isinstance(x, MLPConfig)), MLPConfig(hidden=4 * design.width))


def first_moe(design: ModelConfig) -> MoEConfig:
    """The first mixture of experts, or a default one."""
    default = MoEConfig(experts=1, top_k=1, hidden=design.width).resolved(BuildContext(design.width, design.norm))
    return next((x for x in _feedforwards(design) if isinstance(x, MoEConfig)), default)


def has_experts(design: ModelConfig) -> list[bool]:
    """For each layer, whether it has a mixture of experts."""
    return [isinstance(layer.feedforward, MoEConfig) for layer in layers(design)]


def norm_eps(design: ModelConfig) -> float:
    """The epsilon of the norms, or 1e-5."""
    return design.norm.eps if isinstance(design.norm, RMSConfig | LayerNormConfig) else 1e-5


def layer_types(design: ModelConfig) -> list[str]:
    """`sliding_attention` where a layer's attention has a window, else `full_attention`."""
    windows = [getattr(layer.mixer, "window", None) for layer in layers(design)]
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def mlp_layer_types(design: ModelConfig) -> list[str]:
    """`sparse` where a layer has experts, else `dense`."""
    return [SPARSE if is_sparse else DENSE for is_sparse in has_experts(design)]


def first_window(design: ModelConfig) -> int | None:
    """The first attention window, or None."""
    windows = (getattr(layer.mixer, "window", None) for layer in layers(design))
    return next((window for window in windows if window is not None), None)


def _feedforwards(design: ModelConfig) -> list[Config]:
    return [layer.feedforward for layer in layers(design) if layer.feedforward is not None]
