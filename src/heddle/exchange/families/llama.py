"""Llama 2 and 3 (Meta 2023, 2024): pre-norm, grouped queries, SwiGLU, RoPE with Llama 3.1's scaling."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike."""
    _blocks.check_width(fields)
    heads = _blocks.read_heads(fields, fields.need("hidden_size", int))
    fields.take("pretraining_tp", 1)  # how its products were once cut; the sums are the same
    mixer = {
        "kind": "attention",
        **heads,
        "bias": fields.take("attention_bias", False),
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, heads["head_dim"]),
    }
    feedforward = _blocks.read_gated(fields, bias=fields.take("mlp_bias", False))
    layer = {"repeat": fields.need("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}
    return _blocks.frame(fields, {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6)}, [layer])


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | _blocks.write_gated(design)
        | {
            "attention_bias": views.attention(design).bias is True,
            "mlp_bias": views.gated(design).bias,
            "rms_norm_eps": views.eps(design),
        }
    )


FAMILY = Family("llama", "LlamaForCausalLM", read, write, _blocks.rules, preferred=0)
