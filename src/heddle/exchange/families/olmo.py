"""OLMo (Groeneveld et al. 2024): Llama's decoder with LayerNorm that has neither weights nor biases."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.families.olmo2 import ROPE_CAST
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    heads = _common.read_heads(config, config.require("hidden_size", int))
    mixer = {
        "kind": "attention",
        **heads,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "qkv_clip": config.optional("clip_qkv"),
        "position": read_rope(config, heads["head_dim"]) | ROPE_CAST,
    }
    depth, feedforward = config.require("num_hidden_layers", int), _common.read_gated(config)
    norm = {"kind": "layer", "eps": 1e-5, "weight": False, "bias": False}
    return _common.design_fields(config, norm, [{"repeat": depth, "mixer": mixer, "feedforward": feedforward}])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = design_parts.first_attention(design)
    own = {"attention_bias": mixer.bias is True, "clip_qkv": mixer.qkv_clip}
    return _common.write_common(design) | _common.write_attention(design) | _common.write_gated(design) | own


FAMILY = Family("olmo", "OlmoForCausalLM", read_config, write_config, _common.map_weights)
