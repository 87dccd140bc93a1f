"""Ministral 8B (Mistral AI 2024): Mistral's decoder, with a window in some of the layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, mistral
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig

DEFAULT_WINDOW = 4096


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Without `layer_types`, every layer has the window of `sliding_window`; null is none, absent is 4096."""
    window = config.get_nullable("sliding_window", DEFAULT_WINDOW)
    usual = [FULL if window is None else SLIDING] * _layer_types.read_depth(config)
    layer = {"mixer": _common.read_attention(config), "feedforward": _common.read_gated(config)}
    layers = _layer_types.windowed_layers(config, usual, window, layer)
    return _common.rms_design(config, 1e-6, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads; transformers wants a number for the window where no layer has one, too."""
    return mistral.write_config(design) | {
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
        "layer_types": design_parts.layer_types(design),
    }


FAMILY = Family("ministral", "MinistralForCausalLM", read_config, write_config, _common.map_weights)
