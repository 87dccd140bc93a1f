"""What a family's `write` asks of any design at all: its first part of a kind, or a plain one."""

from typing import Any

from heddle.config import Config
from heddle.model.config import LayerConfig, ModelConfig
from heddle.parts.feedforwards.gated import GatedConfig
from heddle.parts.feedforwards.mlp import MLPConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.norms.layer import LayerNormConfig
from heddle.parts.norms.rms import RMSConfig
from heddle.parts.positions.rope import RopeConfig

ACTIVATIONS = {"relu": "relu", "relu2": "relu2", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu"}
READ = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {
    "gelu_new": "gelu_tanh", "gelu_python": "gelu", "gelu_fast": "gelu_tanh", "swish": "silu",
}  # fmt: skip
ACTIVATIONS |= {"swiglu_clamped": "silu"}  # the nearest; where it is a family's own, its file writes it


def layers(design: ModelConfig) -> list[LayerConfig]:
    """Every layer, from the bottom."""
    return [layer for _, layer in design.expand()]


def attention(design: ModelConfig) -> AttentionConfig:
    """The first softmax attention of a design that was written out; a plain one where it has none."""
    for layer in layers(design):
        if isinstance(layer.mixer, AttentionConfig):
            return layer.mixer
    return AttentionConfig(heads=1, kv_heads=1, head_dim=design.width, value_dim=design.width)


def latent(design: ModelConfig) -> LatentAttentionConfig:
    """The first latent attention, or a plain one."""
    plain = LatentAttentionConfig(heads=1, kv_rank=design.width, nope_dim=design.width, rope_dim=2, value_dim=1)
    return next((x.mixer for x in layers(design) if isinstance(x.mixer, LatentAttentionConfig)), plain)


def delta(design: ModelConfig) -> GatedDeltaConfig:
    """The first gated delta rule, or a plain one."""
    plain = GatedDeltaConfig(heads=1, key_heads=1, head_dim=design.width, value_dim=design.width)
    return next((x.mixer for x in layers(design) if isinstance(x.mixer, GatedDeltaConfig)), plain)


def rope(mixer: Any) -> RopeConfig:
    """The rotation of a mixer, or a plain one."""
    position = getattr(mixer, "position", None)
    return position if isinstance(position, RopeConfig) else RopeConfig()


def gated(design: ModelConfig) -> GatedConfig:
    """The first gated feed-forward, or a plain one."""
    return next((x for x in _forwards(design) if isinstance(x, GatedConfig)), GatedConfig(hidden=4 * design.width))


def mlp(design: ModelConfig) -> MLPConfig:
    """The first MLP, or a plain one."""
    return next((x for x in _forwards(design) if isinstance(x, MLPConfig)), MLPConfig(hidden=4 * design.width))


def moe(design: ModelConfig) -> MoEConfig:
    """The first mixture of experts, or a plain one."""
    plain = MoEConfig(experts=1, top_k=1, hidden=design.width).resolved()
    return next((x for x in _forwards(design) if isinstance(x, MoEConfig)), plain)


def sparse(design: ModelConfig) -> list[bool]:
    """Which layers have a mixture of experts."""
    return [isinstance(layer.feedforward, MoEConfig) for layer in layers(design)]


def eps(design: ModelConfig) -> float:
    """The epsilon of the norms."""
    return design.norm.eps if isinstance(design.norm, RMSConfig | LayerNormConfig) else 1e-5


def layer_types(design: ModelConfig) -> list[str]:
    """`sliding_attention` where a layer's attention has a window, else `full_attention`."""
    windows = [getattr(layer.mixer, "window", None) for layer in layers(design)]
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def window(design: ModelConfig) -> int | None:
    """The first window."""
    windows = (getattr(layer.mixer, "window", None) for layer in layers(design))
    return next((one for one in windows if one is not None), None)


def _forwards(design: ModelConfig) -> list[Config]:
    return [layer.feedforward for layer in layers(design) if layer.feedforward is not None]
