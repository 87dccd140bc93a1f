"""GLM-4 9B (Team GLM 2024): Llama with interleaved partial RoPE, and gate and up in one matrix."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

DEFAULT_ROTARY_FACTOR, DEFAULT_EPS = 0.5, 1.5625e-07  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; `attention_bias` applies to q, k and v."""
    bias = "qkv" if config.get("attention_bias", True) else False
    mixer = _common.read_attention(config, partial_rotary_factor=DEFAULT_ROTARY_FACTOR, bias=bias)
    mixer["position"]["layout"] = "interleaved"
    return _common.rms_design(config, DEFAULT_EPS, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_decoder(design)
        | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
        | {"attention_bias": design_parts.first_attention(design).bias == "qkv"}
    )


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The feed-forward, with gate and up in one matrix."""
    weights.add_module(f"{hf}.gate_up_proj", f"{heddle}.gate", f"{heddle}.up")
    weights.add_module(f"{hf}.down_proj", f"{heddle}.down")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, except for the feed-forward."""
    _common.map_weights(design, weights, map_feedforward=map_gated)


FAMILY = Family("glm", "GlmForCausalLM", read_config, write_config, map_weights)
