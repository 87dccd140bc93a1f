"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023): both branches read one norm, partial RoPE, biases everywhere."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _gpt
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig

PART = 0.5  # of a head's dims that are turned, where nothing is told


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike."""
    width = fields.need("hidden_size", int)
    heads = _blocks.read_heads(fields, width)
    normed = fields.take("qk_layernorm", False)
    if normed and heads["head_dim"] != width // heads["heads"]:
        raise fields.wrong("head_dim", f"with 'qk_layernorm' it can be {width // heads['heads']} only")
    mixer = {
        "kind": "attention",
        **heads,
        "bias": True,
        "qk_norm": "head" if normed else None,
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, heads["head_dim"], part=PART),
    }
    feedforward = {
        "kind": "mlp",
        "hidden": fields.need("intermediate_size", int),
        "activation": _blocks.read_activation(fields, default="gelu_new"),
        "bias": True,
    }
    return _blocks.frame(
        fields,
        {"kind": "layer", "eps": fields.take("layer_norm_eps", 1e-5)},
        [{"repeat": fields.need("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}],
        embedding={"dropout": fields.take("embd_pdrop", 0.0)},
        residual={"kind": "parallel", "norms": 1, "dropout": fields.take("resid_pdrop", 0.0)},
        head={"tied": fields.take("tie_word_embeddings", False), "bias": True},
    )


def write(design: ModelConfig) -> dict[str, Any]:
    """As read; norms of queries and keys leave no choice of head_dim."""
    mixer, feedforward = views.attention(design), views.mlp(design)
    fields = _blocks.write_frame(design) | _blocks.write_attention(design, part=PART)
    if mixer.qk_norm is not None and mixer.head_dim != design.width // mixer.heads:
        del fields["head_dim"]
    return fields | {
        "qk_layernorm": mixer.qk_norm is not None,
        "embd_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        "intermediate_size": feedforward.hidden,
        "hidden_act": _gpt.activation(feedforward.activation),
        "layer_norm_eps": views.eps(design),
    }


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names of q, k and v, and names of its own."""
    to.module("model.embed_tokens", "embed")
    to.module("model.final_layernorm", "close.norm")
    to.module("lm_head", "head")
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        to.module(f"{theirs}.input_layernorm", f"{ours}.residual.norms.shared")
        for role in ("q", "k", "v"):
            to.module(f"{theirs}.self_attn.{role}_proj", f"{ours}.mixer.{role}")
        to.module(f"{theirs}.self_attn.dense", f"{ours}.mixer.out")
        for role in ("q", "k"):
            to.module(f"{theirs}.self_attn.{role}_layernorm", f"{ours}.mixer.{role}_norm")
        to.module(f"{theirs}.mlp.fc1", f"{ours}.feedforward.up")
        to.module(f"{theirs}.mlp.fc2", f"{ours}.feedforward.down")


FAMILY = Family("phi", "PhiForCausalLM", read, write, rules)
