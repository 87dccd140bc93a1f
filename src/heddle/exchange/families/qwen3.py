"""Qwen3 (Yang et al. 2025): Qwen2's decoder with a norm of each head of q and k, and no biases unless asked for."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _qwen
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """`attention_bias` gives biases to all four projections."""
    heads = _blocks.read_heads(fields, fields.need("hidden_size", int), head_dim=128)
    mixer = {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "bias": fields.take("attention_bias", False),
        "position": read_rope(fields, heads["head_dim"]),
    }
    return _qwen.read(fields, mixer)


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    return _qwen.write(design) | {"attention_bias": views.attention(design).bias is True}


FAMILY = Family("qwen3", "Qwen3ForCausalLM", read, write, _blocks.rules, preferred=3)
