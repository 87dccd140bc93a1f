"""Llama 2 and 3 (Meta 2023, 2024): pre-norm, grouped queries, SwiGLU, RoPE with Llama 3.1's scaling."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader, head_dim: int | None = None) -> dict[str, Any]:
    """All layers are the same. head_dim: where the config has no such field."""
    _common.check_width(config)
    own = None if "head_dim" in config.data else head_dim
    heads = _common.read_heads(config, config.require("hidden_size", int), own)
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    mixer = {
        "kind": "attention",
        **heads,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"]),
    }
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    layer = {"repeat": config.require("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}
    return _common.design_fields(config, {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6)}, [layer])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_decoder(design) | {"mlp_bias": design_parts.first_gated(design).bias}


FAMILY = Family("llama", "LlamaForCausalLM", read_config, write_config, _common.map_weights, priority=0)
