"""Helium (Kyutai 2025): Llama with interleaved RoPE, heads that fill the width, and norms that round last."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

DEFAULT_THETA, DEFAULT_HEAD_DIM = 100000.0, 128  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; `attention_bias` applies to q, k and v."""
    width = config.require("hidden_size", int)
    bias = "qkv" if config.get("attention_bias", False) else False
    mixer = _common.read_attention(config, DEFAULT_THETA, head_dim=DEFAULT_HEAD_DIM, bias=bias)
    if mixer["heads"] * mixer["head_dim"] != width:
        raise config.invalid("head_dim", f"all heads together should be as wide as the model, {width}")
    mixer["position"]["layout"] = "interleaved"
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-8), "cast": "after"}
    return _common.design_fields(config, norm, _common.same_layers(config, mixer, feedforward))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_decoder(design) | {
        "attention_bias": design_parts.first_attention(design).bias == "qkv",
        "mlp_bias": design_parts.first_gated(design).bias,
    }


FAMILY = Family("helium", "HeliumForCausalLM", read_config, write_config, _common.map_weights)
