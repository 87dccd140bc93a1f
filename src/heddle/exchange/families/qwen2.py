"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases of q, k and v, and windows in its upper layers."""

from typing import Any

from heddle.exchange.families import _blocks, _qwen
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope


def read(fields: Fields) -> dict[str, Any]:
    """q, k and v always have biases."""
    heads = _blocks.read_heads(fields, fields.need("hidden_size", int))
    rope = read_rope(fields, heads["head_dim"])
    return _qwen.read(fields, {"kind": "attention", **heads, "bias": "qkv", "position": rope})


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read, _qwen.write, _blocks.rules, preferred=2)
