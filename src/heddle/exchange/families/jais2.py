"""Jais 2 (Inception, MBZUAI & Cerebras 2025): Llama with LayerNorm, an MLP of squared ReLU and biases everywhere."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    _common.check_width(config)
    heads = _common.read_heads(config, config.require("hidden_size", int))
    mixer = {
        "kind": "attention",
        **heads,
        "bias": config.get("attention_bias", True),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"]),
    }
    feedforward = _common.read_gated(config, default="relu2", bias=config.get("mlp_bias", True)) | {"kind": "mlp"}
    layer = {"repeat": config.require("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}
    return _common.design_fields(config, {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)}, [layer])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    feedforward = design_parts.first_mlp(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | {
            "intermediate_size": feedforward.hidden,
            "hidden_act": design_parts.HF_ACTIVATIONS[feedforward.activation],
            "attention_bias": design_parts.first_attention(design).bias is True,
            "mlp_bias": feedforward.bias,
            "layer_norm_eps": design_parts.norm_eps(design),
        }
    )


FAMILY = Family("jais2", "Jais2ForCausalLM", read_config, write_config, _common.map_weights)
