"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases of q, k and v, and windows in its later layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig

# What Qwen2 and Qwen3 share: sliding windows from `max_window_layers` on, if enabled, and a gated feed-forward.


def read_design(config: ConfigReader, mixer: dict[str, Any]) -> dict[str, Any]:
    """A design whose layers have this mixer, each with its window.

    Without `layer_types`, `use_sliding_window` gives a window to the layers from `max_window_layers` on.
    """
    window, first = config.get_nullable("sliding_window", 4096), config.get("max_window_layers", 28)
    if not config.get("use_sliding_window", False):
        window = None
    types = [FULL if window is None or index < first else SLIDING for index in range(_layer_types.read_depth(config))]
    layer = {"mixer": mixer, "feedforward": _common.read_gated(config)}
    return _common.rms_design(config, 1e-6, _layer_types.windowed_layers(config, types, window, layer))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that are read. `max_window_layers` is for older readers, which do not know `layer_types`."""
    window, types = design_parts.first_window(design), design_parts.layer_types(design)
    return _common.write_unbiased_decoder(design) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": design.depth if window is None else types.index(SLIDING),
        "layer_types": types,
    }


def read_config(config: ConfigReader) -> dict[str, Any]:
    """q, k and v always have biases."""
    return read_design(config, _common.read_attention(config, bias="qkv"))


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read_config, write_config, _common.map_weights, priority=2)
