"""Mistral (Jiang et al. 2023): Llama's decoder without biases, every layer with the same window or none."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. `sliding_window`: null is no window, absent is 4096."""
    heads = _common.read_heads(config, config.require("hidden_size", int))
    mixer = {
        "kind": "attention",
        **heads,
        "window": config.get_nullable("sliding_window", 4096),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"]),
    }
    feedforward = _common.read_gated(config)
    layer = {"repeat": config.require("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}
    return _common.design_fields(config, {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6)}, [layer])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.write_gated(design)
        | {
            "sliding_window": design_parts.first_window(design),
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


FAMILY = Family("mistral", "MistralForCausalLM", read_config, write_config, _common.map_weights, priority=1)
