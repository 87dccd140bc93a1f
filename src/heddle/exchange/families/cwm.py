"""Code World Model (Meta FAIR 2025): Llama's decoder without biases of attention, and windows in most layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, SLIDING, read_rope_or
from heddle.model.config import ModelConfig

DEFAULT_THETA, DEFAULT_WINDOW = 1e6, 8192
DEFAULT_ROPE = {  # if the config has no RoPE at all
    "rope_type": "llama3", "rope_theta": DEFAULT_THETA, "factor": 16.0, "high_freq_factor": 4.0,
    "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Without `layer_types`, layers 0, 4, 8, … have no window."""
    heads = _common.read_heads(config, config.require("hidden_size", int), head_dim=128)
    config.get("pretraining_tp", 1)  # as in Llama
    mixer = {
        "kind": "attention",
        **heads,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope_or(config, heads["head_dim"], DEFAULT_THETA, DEFAULT_ROPE),
    }
    window = config.get_nullable("sliding_window", DEFAULT_WINDOW) or None
    usual = [SLIDING if index % 4 else FULL for index in range(_layer_types.read_depth(config))]
    layer = {"mixer": mixer, "feedforward": _common.read_gated(config, bias=config.get("mlp_bias", False))}
    layers = _layer_types.windowed_layers(config, usual, window, layer)
    return _common.rms_design(config, 1e-5, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_unbiased_decoder(design) | {
        "mlp_bias": design_parts.first_gated(design).bias,
        "sliding_window": design_parts.first_window(design),
        "layer_types": design_parts.layer_types(design),
    }


FAMILY = Family("cwm", "CwmForCausalLM", read_config, write_config, _common.map_weights)
