"""Mixtral (Jiang et al. 2024): Mistral's attention; in every layer a token meets the top k of the experts."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _experts
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig

NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike."""
    depth = fields.need("num_hidden_layers", int)
    heads = _experts.read_heads(fields)
    fields.expect("router_jitter_noise", 0.0, default=0.0)
    mixer = {
        "kind": "attention",
        **heads,
        "window": fields.find("sliding_window"),
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, heads["head_dim"], 1e6),
    }
    top_k = fields.need("num_experts_per_tok", int)
    feedforward = {
        "kind": "moe",
        "experts": _experts.read_number(fields),
        "top_k": top_k,
        "hidden": fields.need("intermediate_size", int),
        "activation": _blocks.read_activation(fields),
        **_experts.read_loss(fields, top_k, depth),
    }
    layer = {"repeat": depth, "mixer": mixer, "feedforward": feedforward}
    return _blocks.frame(fields, {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-5)}, [layer])


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    moe = views.moe(design)
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | {
            "sliding_window": views.attention(design).window,
            "num_experts": moe.experts,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.hidden,
            "hidden_act": views.ACTIVATIONS[moe.activation or "silu"],
            "rms_norm_eps": views.eps(design),
            "router_jitter_noise": 0.0,
        }
        | _experts.write_loss(design, moe)
    )


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names, but for the experts."""
    _blocks.ends(design, to)
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        _blocks.attention(to, theirs, ours)
        _experts.experts(to, f"{theirs}.block_sparse_moe", f"{ours}.feedforward", NAMES)
        _blocks.pre_norms(to, theirs, ours)


FAMILY = Family("mixtral", "MixtralForCausalLM", read, write, rules)
