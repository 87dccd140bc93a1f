"""Mistral (Jiang et al. 2023): Llama's decoder without biases, every layer with the same window or none."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. `sliding_window`: null is no window, absent is 4096."""
    mixer = _common.read_attention(config, window=config.get_nullable("sliding_window", 4096))
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_unbiased_decoder(design) | {"sliding_window": design_parts.first_window(design)}


FAMILY = Family("mistral", "MistralForCausalLM", read_config, write_config, _common.map_weights, priority=1)
