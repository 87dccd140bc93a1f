"""Solar Open (Upstage 2026): grouped queries with biases of q, k and v or none, DeepSeek-V3's experts in all layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, dots1
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

DEFAULT_THETA = 1e6


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. The balancing bias keeps its loaded value (`bias_update` 0)."""
    config.require("num_key_value_heads", int)
    config.expect("first_k_dense_replace", 0, default=0)
    config.expect("use_qk_norm", False, default=False)
    config.note("intermediate_size")  # of dense layers, which it lacks
    bias = "qkv" if config.get("attention_bias", False) else False
    mixer = _common.read_attention(config, DEFAULT_THETA, head_dim=128, partial_rotary_factor=1.0, bias=bias)
    feedforward = _deepseek.read_experts(config, _deepseek.read_sigmoid_routing(config))
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, feedforward))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    experts = _deepseek.write_layers(design) | _deepseek.write_sigmoid_routing(design)
    for name in ("intermediate_size", "first_k_dense_replace", "moe_layer_freq"):
        del experts[name]
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=1.0)
        | experts
        | {"attention_bias": design_parts.first_attention(design).bias == "qkv"}
    )


FAMILY = Family("solar_open", "SolarOpenForCausalLM", read_config, write_config, dots1.map_weights)
