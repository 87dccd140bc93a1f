"""GPT-NeoX and Pythia (Black et al. 2022): a norm for each of two parallel branches, partial RoPE, biases everywhere.

`use_parallel_residual: false` is pre-norm. Queries, keys and values are one matrix, head by head.
"""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rope import read_rope, write_rope
from heddle.exchange.rules import Rules, in_groups
from heddle.model.config import ModelConfig
from heddle.parts.residuals.parallel import ParallelConfig

PART = 0.25  # of a head's dims that are turned, where nothing is told


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike; one rate of dropout for the embedding and what branches add."""
    heads, width = fields.count("num_attention_heads"), fields.count("hidden_size")
    fields.find("is_decoder")  # causal in either case
    fields.find("classifier_dropout")
    base = _one(fields, 10000.0, "rotary_emb_base", "rope_theta")
    part = _one(fields, PART, "rotary_pct", "partial_rotary_factor")
    mixer = {
        "kind": "attention",
        "heads": heads,
        "bias": fields.take("attention_bias", True),
        "dropout": fields.take("attention_dropout", 0.0),
        "position": read_rope(fields, width // heads, base, part),
    }
    feedforward = {
        "kind": "mlp",
        "hidden": fields.need("intermediate_size", int),
        "activation": _blocks.read_activation(fields, default="gelu"),
        "bias": True,
    }
    layer = {"repeat": fields.need("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}
    norm = {"kind": "layer", "eps": fields.take("layer_norm_eps", 1e-5)}
    dropout = {"dropout": fields.take("hidden_dropout", 0.0)}
    parallel = fields.take("use_parallel_residual", True)
    wiring: dict[str, Any] = {"kind": "parallel", "norms": 2} if parallel else {"kind": "pre_norm"}
    return _blocks.frame(fields, norm, [layer], embedding=dropout, residual=wiring | dropout)


def _one(fields: Fields, default: float, old: str, new: str) -> float:
    """A field by its older name, by which alone it is read. Raises ConfigError where the newer one says otherwise."""
    told = fields.take(old, default)
    if fields.take(new, told) != told:
        raise fields.wrong(new, f"but '{old}' is {told}; make them equal")
    return told


def write(design: ModelConfig) -> dict[str, Any]:
    """As read, the rotation by its older names too."""
    mixer, feedforward = views.attention(design), views.mlp(design)
    rope = write_rope(views.rope(mixer), mixer.head_dim or design.width, _blocks.LONGEST, PART)
    return (
        _blocks.write_frame(design)
        | rope
        | {
            "rotary_emb_base": rope["rope_theta"],
            "rotary_pct": rope["partial_rotary_factor"],
            "num_attention_heads": mixer.heads,
            "attention_bias": mixer.bias is True,
            "attention_dropout": mixer.dropout,
            "hidden_dropout": design.residual.dropout,
            "intermediate_size": feedforward.hidden,
            "hidden_act": views.ACTIVATIONS[feedforward.activation],
            "layer_norm_eps": views.eps(design),
            "use_parallel_residual": isinstance(design.residual, ParallelConfig),
        }
    )


def rules(design: ModelConfig, to: Rules) -> None:
    """The names of either wiring's norms; what a design does not have is left out."""
    to.module("gpt_neox.embed_in", "embed")
    to.module("gpt_neox.final_layer_norm", "close.norm")
    to.module("embed_out", "head")
    heads = in_groups(views.attention(design).heads)
    for index in range(design.depth):
        theirs, ours = f"gpt_neox.layers.{index}", f"layers.{index}"
        to.module(f"{theirs}.input_layernorm", f"{ours}.residual.norms.mixer")
        to.module(f"{theirs}.post_attention_layernorm", f"{ours}.residual.norms.feedforward")
        to.module(f"{theirs}.attention.query_key_value", *(f"{ours}.mixer.{role}" for role in "qkv"), form=heads)
        to.module(f"{theirs}.attention.dense", f"{ours}.mixer.out")
        to.module(f"{theirs}.mlp.dense_h_to_4h", f"{ours}.feedforward.up")
        to.module(f"{theirs}.mlp.dense_4h_to_h", f"{ours}.feedforward.down")


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    read,
    write,
    rules,
    left_out=("*.attention.bias", "*.attention.masked_bias"),  # masks that older files keep
)
