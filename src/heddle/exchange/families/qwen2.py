"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases of q, k and v, and windows in its later layers."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _qwen
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope


def read_config(config: ConfigReader) -> dict[str, Any]:
    """q, k and v always have biases."""
    heads = _common.read_heads(config, config.require("hidden_size", int))
    rope = read_rope(config, heads["head_dim"])
    return _qwen.read_design(config, {"kind": "attention", **heads, "bias": "qkv", "position": rope})


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read_config, _qwen.write_config, _common.map_weights, priority=2)
