"""Jais 2 (Inception, MBZUAI & Cerebras 2025): Llama with LayerNorm, an MLP of squared ReLU and biases everywhere."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    _common.check_width(config)
    mixer = _common.read_attention(config, bias=config.get("attention_bias", True))
    feedforward = _common.read_mlp(config, "relu2", config.get("mlp_bias", True))
    norm = {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)}
    return _common.design_fields(config, norm, _common.same_layers(config, mixer, feedforward))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.write_mlp(design)
        | {
            "attention_bias": design_parts.first_attention(design).bias is True,
            "mlp_bias": design_parts.first_mlp(design).bias,
            "layer_norm_eps": design_parts.norm_eps(design),
        }
    )


FAMILY = Family("jais2", "Jais2ForCausalLM", read_config, write_config, _common.map_weights)
