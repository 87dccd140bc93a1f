"""What most families share: the fields and the tensor names of Llama's decoder."""

from collections.abc import Callable
from typing import Any

from heddle.exchange import views
from heddle.exchange.fields import Fields
from heddle.exchange.rope import write_rope
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig

LONGEST = 2048  # max_position_embeddings of a design that tells no length


def read_activation(fields: Fields, name: str = "hidden_act", default: str = "silu") -> str:
    """Our name of an activation. Raises ConfigError for one that heddle does not have."""
    told = fields.take(name, default)
    if told not in views.READ:
        raise fields.wrong(name, f"heddle has {', '.join(views.READ)}")
    return views.READ[told]


def read_heads(fields: Fields, width: int, head_dim: int | None = None) -> dict[str, Any]:
    """heads, kv_heads and head_dim of an attention, as Llama names them; `head_dim` is the family's default."""
    heads = fields.count("num_attention_heads")
    dim = fields.take("head_dim", head_dim or width // heads)
    return {"heads": heads, "kv_heads": fields.take("num_key_value_heads", heads), "head_dim": dim}


def check_width(fields: Fields) -> None:
    """Raises ConfigError for a width that heads do not divide, where the family's own class does."""
    width, heads = fields.need("hidden_size", int), fields.count("num_attention_heads")
    if width % heads:
        raise fields.wrong("hidden_size", f"{fields.data.get('model_type')} asks a multiple of its {heads} heads")


def read_gated(fields: Fields, name: str = "hidden_act", default: str = "silu", **more: Any) -> dict[str, Any]:
    """A gated feed-forward; `name` and `default` are of its activation."""
    hidden = fields.need("intermediate_size", int)
    return {"kind": "gated", "hidden": hidden, "activation": read_activation(fields, name, default), **more}


def write_gated(design: ModelConfig, name: str = "hidden_act") -> dict[str, Any]:
    """The same of the first one."""
    found = views.gated(design)
    return {"intermediate_size": found.hidden, name: views.ACTIVATIONS[found.activation]}


def frame(fields: Fields, norm: dict[str, Any], layers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A design of these layers, with the fields that every family has."""
    std = fields.take("initializer_range", 0.02)
    return {
        "vocab_size": fields.need("vocab_size", int),
        "width": fields.need("hidden_size", int, "n_embd"),
        "norm": norm,
        "layers": layers,
        "head": {"tied": fields.take("tie_word_embeddings", False)},
        "initialisation": {"std": std} if std else {},
    } | more


def write_frame(design: ModelConfig) -> dict[str, Any]:
    """The fields that every family has."""
    return {
        "vocab_size": design.vocab_size,
        "hidden_size": design.width,
        "num_hidden_layers": design.depth,
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": design.head.tied,
        "initializer_range": design.initialisation.std,
    }


def write_attention(design: ModelConfig, rope: RopeConfig | None = None, part: float | None = None) -> dict[str, Any]:
    """Heads and rotation of the first attention, as Llama names them.

    rope: what the family can say of the rotation, if not all. part: its default of partial_rotary_factor, if it has it.
    """
    mixer = views.attention(design)
    heads = {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_dropout": mixer.dropout,
    }
    return heads | write_rope(rope or views.rope(mixer), mixer.head_dim or design.width, LONGEST, part)


def ends(design: ModelConfig, to: Rules) -> None:
    """Embedding, final norm and head."""
    to.module("model.embed_tokens", "embed")
    to.module("model.norm", "close.norm")
    if not design.head.tied:
        to.module("lm_head", "head")


def attention(to: Rules, theirs: str, ours: str) -> None:
    """The four projections of layer prefixes such as model.layers.0 and layers.0, and the norms of q and k."""
    for name, role in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
        to.module(f"{theirs}.self_attn.{name}", f"{ours}.mixer.{role}")
    for name in ("q_norm", "k_norm"):
        to.module(f"{theirs}.self_attn.{name}", f"{ours}.mixer.{name}")


def gated(to: Rules, theirs: str, ours: str) -> None:
    """The three projections of a gated feed-forward."""
    for name in ("gate", "up", "down"):
        to.module(f"{theirs}.{name}_proj", f"{ours}.{name}")


def pre_norms(to: Rules, theirs: str, ours: str) -> None:
    """A norm before each branch."""
    to.module(f"{theirs}.input_layernorm", f"{ours}.residual.norms.mixer")
    to.module(f"{theirs}.post_attention_layernorm", f"{ours}.residual.norms.feedforward")


def rules(design: ModelConfig, to: Rules, norms: Callable[[Rules, str, str], None] = pre_norms) -> None:
    """All of Llama's names; what a design does not have is left out. `norms` names those of a layer."""
    ends(design, to)
    for index in range(design.depth):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        attention(to, theirs, ours)
        gated(to, f"{theirs}.mlp", f"{ours}.feedforward")
        norms(to, theirs, ours)
