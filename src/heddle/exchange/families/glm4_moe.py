"""GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team 2025): partial RoPE, optional norms of q and k, DeepSeek-V3's experts.

Multi-token modules (`num_nextn_predict_layers`) are read where the weights hold them, as further layers.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, dots1
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

DEFAULT_ROTARY_FACTOR = 0.5  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    config.require("num_key_value_heads", int)
    mixer = _common.read_attention(
        config,
        partial_rotary_factor=DEFAULT_ROTARY_FACTOR,
        qk_norm="head" if config.get("use_qk_norm", False) else None,
        bias="qkv" if config.get("attention_bias", False) else False,
    )
    layers = _deepseek.read_layers(config, mixer, _deepseek.read_sigmoid_routing(config), False)
    return _common.rms_design(config, 1e-5, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = design_parts.first_attention(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
        | _deepseek.write_layers(design)
        | _deepseek.write_sigmoid_routing(design)
        | {"attention_bias": mixer.bias == "qkv", "use_qk_norm": mixer.qk_norm is not None}
    )


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read_config,
    write_config,
    dots1.map_weights,
    ignored_tensors=("model.layers.{depth}.",),
    multi_token=_deepseek.MODULES,
)
