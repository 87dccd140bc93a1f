"""Qwen3-MoE (Qwen 2025): Qwen3's attention, with a norm of each head's q and k; layers of experts among dense ones."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _experts, _local
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """One attention for all layers; `max_window_layers` is read by nobody."""
    heads = _experts.read_heads(fields)
    fields.find("max_window_layers")
    window = fields.given("sliding_window", 4096)
    mixer = {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "bias": fields.take("attention_bias", False),
        "window": window if fields.take("use_sliding_window", False) else None,
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, heads["head_dim"]),
    }
    layers = [{"mixer": mixer, "feedforward": one} for one in _experts.read_forwards(fields, {}, False)]
    return _blocks.frame(fields, {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6)}, _local.stack(layers))


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    mixer = views.attention(design)
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | _experts.write_forwards(design)
        | {
            "attention_bias": mixer.bias is True,
            "use_sliding_window": mixer.window is not None,
            "sliding_window": mixer.window,
            "rms_norm_eps": views.eps(design),
        }
    )


def rules(design: ModelConfig, to: Rules) -> None:
    """Qwen3's names, and each expert's."""
    _blocks.ends(design, to)
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        _blocks.attention(to, theirs, ours)
        _experts.mlp(to, f"{theirs}.mlp", f"{ours}.feedforward", "shared_expert")
        _blocks.pre_norms(to, theirs, ours)


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read, write, rules)
