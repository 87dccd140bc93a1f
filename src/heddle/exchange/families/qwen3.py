"""Qwen3 (Yang et al. 2025): Qwen2's decoder with a norm of each head of q and k, and without biases by default."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, qwen2
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`attention_bias` gives biases to all four projections."""
    bias = config.get("attention_bias", False)
    return qwen2.read_design(config, _common.read_attention(config, head_dim=128, qk_norm="head", bias=bias))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return qwen2.write_config(design) | {"attention_bias": design_parts.first_attention(design).bias is True}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read_config, write_config, _common.map_weights, priority=3)
