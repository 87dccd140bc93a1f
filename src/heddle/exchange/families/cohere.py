"""Command R (Cohere 2024): both branches read one LayerNorm without bias, interleaved RoPE, logits are scaled."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike; norms of queries and keys have weights for each head (Command R+)."""
    heads = _blocks.read_heads(fields, fields.need("hidden_size", int))
    fields.take("pretraining_tp", 1)  # how its products were once cut; the sums are the same
    position = read_rope(fields, heads["head_dim"], 500000.0)
    mixer = {
        "kind": "attention",
        **heads,
        "bias": fields.take("attention_bias", False),
        "qk_norm": "per_head" if fields.take("use_qk_norm", False) else None,
        "dropout": fields.take("attention_dropout", 0.0),
        "position": position | {"layout": "interleaved"},
    }
    feedforward = _blocks.read_gated(fields)
    return _blocks.frame(
        fields,
        {"kind": "layer", "eps": fields.take("layer_norm_eps", 1e-5), "bias": False},
        [{"repeat": fields.need("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}],
        residual={"kind": "parallel", "norms": 1},
        head={"tied": fields.take("tie_word_embeddings", True), "scale": fields.take("logit_scale", 0.0625)},
    )


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    mixer = views.attention(design)
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | _blocks.write_gated(design)
        | {
            "attention_bias": mixer.bias is True,
            "use_qk_norm": mixer.qk_norm is not None,
            "layer_norm_eps": views.eps(design),
            "logit_scale": design.head.scale,
        }
    )


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names, and one norm a layer."""
    _blocks.ends(design, to)
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        to.module(f"{theirs}.input_layernorm", f"{ours}.residual.norms.shared")
        _blocks.attention(to, theirs, ours)
        _blocks.gated(to, f"{theirs}.mlp", f"{ours}.feedforward")


FAMILY = Family("cohere", "CohereForCausalLM", read, write, rules)
