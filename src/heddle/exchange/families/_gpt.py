"""What GPT-2 and GPT-J share: older names of the fields, and blocks of two projections with biases."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks
from heddle.exchange.fields import Fields
from heddle.exchange.rules import Form, Rules
from heddle.model.config import ModelConfig

MASKS = ("*.attn.bias", "*.attn.masked_bias")  # tensors that older files keep
# Of heads that a language model does not have, of the length (again), and of how the model was once run.
NOT_COMPUTED = (
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "n_ctx", "gradient_checkpointing", "output_past",
)  # fmt: skip


def read_attention(fields: Fields, dropout: float) -> dict[str, Any]:
    """The fields of an attention, without what is added to them; dropout is the family's default."""
    heads = fields.count("n_head", "num_attention_heads")
    return {"kind": "attention", "heads": heads, "dropout": fields.take("attn_pdrop", dropout)}


def read_mlp(fields: Fields) -> dict[str, Any]:
    """The feed-forward, four times as wide as the model unless told."""
    width = fields.count("n_embd", "hidden_size")
    return {
        "kind": "mlp",
        "hidden": fields.take("n_inner", 4 * width),
        "activation": _blocks.read_activation(fields, "activation_function", "gelu_new"),
        "bias": True,
    }


def read_depth(fields: Fields) -> int:
    """How many layers."""
    return fields.count("n_layer", "num_hidden_layers")


def frame(fields: Fields, layers: list[dict[str, Any]], dropout: float, **more: Any) -> dict[str, Any]:
    """A design of these layers; dropout is the family's default, `residual` and `embedding` are completed."""
    for name in NOT_COMPUTED:
        fields.find(name)
    norm = {"kind": "layer", "eps": fields.take("layer_norm_epsilon", 1e-5)}
    more["residual"] = more["residual"] | {"dropout": fields.take("resid_pdrop", dropout)}
    more["embedding"] = more.get("embedding", {}) | {"dropout": fields.take("embd_pdrop", dropout)}
    return _blocks.frame(fields, norm, layers, **more)


def write(design: ModelConfig) -> dict[str, Any]:
    """The fields that both have."""
    mixer, feedforward = views.attention(design), views.mlp(design)
    return {
        "vocab_size": design.vocab_size,
        "n_embd": design.width,
        "n_layer": design.depth,
        "n_head": mixer.heads,
        "n_inner": None if feedforward.hidden == 4 * design.width else feedforward.hidden,
        "n_positions": _blocks.LONGEST,
        "activation_function": activation(feedforward.activation),
        "layer_norm_epsilon": views.eps(design),
        "attn_pdrop": mixer.dropout,
        "embd_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        "tie_word_embeddings": design.head.tied,
        "initializer_range": design.initialisation.std,
    }


def activation(ours: str) -> str:
    """Their name of an activation: as these families have always written tanh's approximation of GELU."""
    return "gelu_new" if ours == "gelu_tanh" else views.ACTIVATIONS[ours]


def ends(to: Rules) -> None:
    """Embedding, final norm and head."""
    to.module("transformer.wte", "embed")
    to.module("transformer.ln_f", "close.norm")
    to.module("lm_head", "head")


def mlp(to: Rules, up: str, down: str, ours: str, form: Form) -> None:
    """The two projections of a feed-forward."""
    to.module(up, f"{ours}.up", form=form)
    to.module(down, f"{ours}.down", form=form)
