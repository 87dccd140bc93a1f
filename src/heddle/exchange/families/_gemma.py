"""What Gemma 2 and 3 share: scaled embeddings, sandwich norms with 1 + γ, GeGLU, windows in most layers."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _local
from heddle.exchange.fields import Fields
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig

WINDOW = 4096  # of a file that does not tell
ACTIVATION = "hidden_activation"


def read_mixer(fields: Fields) -> dict[str, Any]:
    """The fields of attention that all layers share."""
    _blocks.check_width(fields)
    scalar = fields.take("query_pre_attn_scalar", 256)
    if scalar < 1:
        raise fields.wrong("query_pre_attn_scalar", "should be at least 1; scores are divided by its root")
    fields.expect("use_bidirectional_attention", False, None)
    return {
        "kind": "attention",
        **_blocks.read_heads(fields, fields.need("hidden_size", int), head_dim=256),
        "bias": fields.take("attention_bias", False),
        "dropout": fields.take("attention_dropout", 0.0),
        "scale": scalar**-0.5,
    }


def read(fields: Fields, mixers: list[dict[str, Any]], softcap: float | None) -> dict[str, Any]:
    """A design of one layer for each mixer; `softcap` bounds the logits."""
    # What no reader computes with: an older name of the activation, of the window, and how keys are cached.
    fields.unread -= {"hidden_act", "sliding_window_size", "cache_implementation"}
    feedforward = _blocks.read_gated(fields, ACTIVATION, "gelu_pytorch_tanh")
    layers = [{"mixer": mixer, "feedforward": feedforward} for mixer in mixers]
    norm = {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6), "offset": 1.0, "cast": "after"}
    return _blocks.frame(
        fields,
        norm,
        _local.stack(layers),
        embedding={"scale": True},
        residual={"kind": "sandwich"},
        head={"tied": fields.take("tie_word_embeddings", True), "softcap": softcap},
    )


def write(design: ModelConfig) -> dict[str, Any]:
    """As read, but for the rotations."""
    mixer = views.attention(design)
    return _blocks.write_frame(design) | {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": mixer.bias is True,
        "attention_dropout": mixer.dropout,
        "query_pre_attn_scalar": round(max(min(mixer.scale or 1.0, 1.0), 1e-9) ** -2),
        "sliding_window": views.window(design) or WINDOW,
        "layer_types": views.layer_types(design),
        "final_logit_softcapping": design.head.softcap,
        **_blocks.write_gated(design, ACTIVATION),
        "rms_norm_eps": views.eps(design),
    }


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names, with four norms a layer."""
    _blocks.rules(design, to, _norms)


def _norms(to: Rules, theirs: str, ours: str) -> None:
    to.module(f"{theirs}.input_layernorm", f"{ours}.residual.norms.mixer")
    to.module(f"{theirs}.post_attention_layernorm", f"{ours}.residual.after.mixer")
    to.module(f"{theirs}.pre_feedforward_layernorm", f"{ours}.residual.norms.feedforward")
    to.module(f"{theirs}.post_feedforward_layernorm", f"{ours}.residual.after.feedforward")
