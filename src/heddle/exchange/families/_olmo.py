"""What OLMo 2 and 3 share: norms of what branches give and of whole projections of q and k, cast at their end."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _local
from heddle.exchange.fields import Fields
from heddle.exchange.rules import Rules
from heddle.model.config import ModelConfig

CAST = {"cast": "after"}  # heads are turned in float32 whatever the model's dtype


def read_mixer(fields: Fields) -> dict[str, Any]:
    """The fields of attention that all layers share."""
    return {
        "kind": "attention",
        **_blocks.read_heads(fields, fields.need("hidden_size", int)),
        "qk_norm": "projection",
        "bias": fields.take("attention_bias", False),
        "dropout": fields.take("attention_dropout", 0.0),
    }


def read(fields: Fields, mixers: list[dict[str, Any]]) -> dict[str, Any]:
    """A design of one layer for each mixer."""
    feedforward = _blocks.read_gated(fields)
    layers = [{"mixer": mixer, "feedforward": feedforward} for mixer in mixers]
    norm = {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-5), "cast": "after"}
    return _blocks.frame(fields, norm, _local.stack(layers), residual={"kind": "reordered"})


def write(design: ModelConfig) -> dict[str, Any]:
    """As read, but for the rotation of OLMo 3."""
    return (
        _blocks.write_frame(design)
        | _blocks.write_attention(design)
        | _blocks.write_gated(design)
        | {
            "attention_bias": views.attention(design).bias is True,
            "rms_norm_eps": views.eps(design),
        }
    )


def rules(design: ModelConfig, to: Rules) -> None:
    """Llama's names, with a norm after each branch and none before."""
    _blocks.rules(design, to, _norms)


def _norms(to: Rules, theirs: str, ours: str) -> None:
    to.module(f"{theirs}.post_attention_layernorm", f"{ours}.residual.norms.mixer")
    to.module(f"{theirs}.post_feedforward_layernorm", f"{ours}.residual.norms.feedforward")
