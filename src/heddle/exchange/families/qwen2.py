"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases of q, k and v, and windows in its later layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, SLIDING, read_rope
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
    feedforward = _common.read_gated(config)
    shared = {"dropout": config.get("attention_dropout", 0.0)}
    layers = _layer_types.windowed_layers(config, types, window, {"mixer": mixer | shared, "feedforward": feedforward})
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6)}
    return _common.design_fields(config, norm, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that are read. `max_window_layers` is for older readers, which do not know `layer_types`."""
    window, types = design_parts.first_window(design), design_parts.layer_types(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _common.write_gated(design)
        | {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": design.depth if window is None else types.index(SLIDING),
            "layer_types": types,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def read_config(config: ConfigReader) -> dict[str, Any]:
    """q, k and v always have biases."""
    heads = _common.read_heads(config, config.require("hidden_size", int))
    rope = read_rope(config, heads["head_dim"])
    return read_design(config, {"kind": "attention", **heads, "bias": "qkv", "position": rope})


FAMILY = Family("qwen2", "Qwen2ForCausalLM", read_config, write_config, _common.map_weights, priority=2)
