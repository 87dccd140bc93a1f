"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with fused projections, a window, partial RoPE and LongRoPE's scaling."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig
from heddle.parts.scalings.longrope import LongropeConfig

ORIGINAL = 4096  # the original length where none is told


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike, all with a window or none."""
    heads = _blocks.read_heads(fields, fields.need("hidden_size", int))
    fields.expect("attention_bias", False, default=False)
    position = read_rope(fields, heads["head_dim"], part=1.0, original=ORIGINAL)
    if position.get("scaling", {}).get("kind", "longrope") != "longrope":
        raise fields.wrong("rope_parameters", "a Phi-3 model has rope_type default or longrope only")
    mixer = {
        "kind": "attention",
        **heads,
        "window": fields.find("sliding_window"),
        "dropout": fields.take("attention_dropout", 0.0),
        "position": position,
    }
    feedforward = _blocks.read_gated(fields)
    return _blocks.frame(
        fields,
        {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-5)},
        [{"repeat": fields.need("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}],
        embedding={"dropout": fields.take("embd_pdrop", 0.0)},
        residual={"kind": "pre_norm", "dropout": fields.take("resid_pdrop", 0.0)},
    )


def write(design: ModelConfig) -> dict[str, Any]:
    """As read; the length is the factor times the original one, which older readers divide."""
    mixer = views.attention(design)
    rope = views.rope(mixer)
    scaling = rope.scaling if isinstance(rope.scaling, LongropeConfig) else None
    fields = _blocks.write_frame(design) | _blocks.write_attention(design, rope.replace(scaling=scaling), part=1.0)
    if scaling is not None:
        if mixer.head_dim != design.width // mixer.heads:
            del fields["head_dim"]  # their check of the factors does not look at it
        fields["max_position_embeddings"] = round(scaling.original_length * (scaling.factor or 1.0))
    return fields | {
        "sliding_window": views.window(design),
        "embd_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        **_blocks.write_gated(design),
        "rms_norm_eps": views.eps(design),
    }


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names, with q, k and v one matrix, and gate and up another."""
    _blocks.ends(design, to)
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        to.module(f"{theirs}.self_attn.qkv_proj", *(f"{ours}.mixer.{role}" for role in "qkv"))
        to.module(f"{theirs}.self_attn.o_proj", f"{ours}.mixer.out")
        to.module(f"{theirs}.mlp.gate_up_proj", f"{ours}.feedforward.gate", f"{ours}.feedforward.up")
        to.module(f"{theirs}.mlp.down_proj", f"{ours}.feedforward.down")
        _blocks.pre_norms(to, theirs, ours)


FAMILY = Family("phi3", "Phi3ForCausalLM", read, write, rules)
