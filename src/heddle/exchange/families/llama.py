"""Llama 2 and 3 (Meta 2023, 2024): pre-norm, grouped queries, SwiGLU, RoPE with Llama 3.1's scaling."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader, head_dim: int | None = None) -> dict[str, Any]:
    """All layers are the same. head_dim: where the config has no such field."""
    _common.check_width(config)
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    own = None if "head_dim" in config.data else head_dim
    mixer = _common.read_attention(config, head_dim=own, bias=config.get("attention_bias", False))
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, feedforward))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_decoder(design) | {"mlp_bias": design_parts.first_gated(design).bias}


FAMILY = Family("llama", "LlamaForCausalLM", read_config, write_config, _common.map_weights, priority=0)
