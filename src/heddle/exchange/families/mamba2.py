"""Mamba-2 (Dao & Gu 2024): a state space model in every layer, and neither attention nor feed-forwards.

`residual_in_fp32` is about the precision of sums in narrow types; heddle's stream has the type of the weights.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _mamba
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

NAMES = _mamba.Names(
    heads=("num_heads", 128),
    head_dim=("head_dim", 64),
    state_size=("state_size", 128),
    groups=("n_groups", 8),
    conv_kernel=("conv_kernel", 4),
    conv_bias=("use_conv_bias", True),
    bias=("use_bias", False),
    expand=("expand", 2),
)


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    eps = config.get("layer_norm_epsilon", 1e-5)
    config.expect("hidden_act", "silu", default="silu")
    config.expect("rms_norm", True, default=True)
    config.note("residual_in_fp32", "norm_before_gate", "intermediate_size", "time_step_init_scheme", "time_step_scale")
    layer = {"repeat": _layer_types.read_depth(config), "mixer": _mamba.read_mixer(config, NAMES, eps)}
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, [layer])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    common = _common.write_common(design)
    del common["max_position_embeddings"]  # it has no positions
    return (
        common
        | _mamba.write_mixer(design, NAMES)
        | {"hidden_act": "silu", "layer_norm_epsilon": design_parts.norm_eps(design)}
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Its own names."""
    _common.map_embedding_and_head(design, weights, "backbone.embeddings", "backbone.norm_f")
    for index in range(design.depth):
        hf, heddle = f"backbone.layers.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.norm", f"{heddle}.residual.norms.mixer")
        _mamba.map_mixer(weights, f"{hf}.mixer", f"{heddle}.mixer")


FAMILY = Family("mamba2", "Mamba2ForCausalLM", read_config, write_config, map_weights)
