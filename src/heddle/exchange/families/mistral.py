"""Mistral (Jiang et al. 2023): Llama's decoder without biases, every layer with the same window or none."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike; `sliding_window` null is none, absent 4096."""
    heads = _blocks.read_heads(fields, fields.need("hidden_size", int))
    mixer = {
        "kind": "attention",
        **heads,
        "window": fields.given("sliding_window", 4096),
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, heads["head_dim"]),
    }
    feedforward = _blocks.read_gated(fields)
    layer = {"repeat": fields.need("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}
    return _blocks.frame(fields, {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6)}, [layer])


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | _blocks.write_gated(design)
        | {
            "sliding_window": views.window(design),
            "rms_norm_eps": views.eps(design),
        }
    )


FAMILY = Family("mistral", "MistralForCausalLM", read, write, _blocks.rules, preferred=1)
