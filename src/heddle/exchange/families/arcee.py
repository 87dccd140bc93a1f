"""Arcee AFM (Arcee AI 2025): Llama's decoder with an MLP of squared ReLU instead of the gated feed-forward."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    _common.check_width(config)
    mixer = _common.read_attention(config, bias=config.get("attention_bias", False))
    feedforward = _common.read_mlp(config, "relu2", config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, feedforward))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mlp = _common.write_mlp(design) | {"mlp_bias": design_parts.first_mlp(design).bias}
    return _common.write_decoder(design) | mlp


FAMILY = Family("arcee", "ArceeForCausalLM", read_config, write_config, _common.map_weights)
