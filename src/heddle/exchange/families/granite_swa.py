"""Granite with windows (IBM 2026): Granite 3 with sinks, windows in three of four layers, a theta for each layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, granite
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig

DEFAULT_WINDOW = 128  # if the field is absent


def read_layers(config: ConfigReader, feedforward: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers with this feed-forward; one whose theta is 0 has no RoPE."""
    mixer, depth = granite.read_mixer(config) | {"sink": True}, _layer_types.read_depth(config)
    usual = [SLIDING if index % 4 else FULL for index in range(depth)]
    window = config.get_nullable("sliding_window", DEFAULT_WINDOW)
    windows = _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)
    thetas = config.get("layer_rope_theta", [mixer["position"]["base"]] * depth)
    if len(thetas) != depth:
        raise config.invalid("layer_rope_theta", f"num_hidden_layers asks {depth} entries")
    positions = [mixer["position"] | {"base": float(theta)} if theta else None for theta in thetas]
    layers = [
        {"mixer": mixer | {"window": width, "position": position}, "feedforward": feedforward}
        for width, position in zip(windows, positions, strict=True)
    ]
    return _layer_types.merge_repeats(layers)


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All feed-forwards are the same."""
    layers = read_layers(config, _common.read_gated(config, bias=config.get("mlp_bias", False)))
    return _common.rms_design(config, 1e-5, layers, **granite.read_multipliers(config, tied=True))


def write_windows(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_layers` reads."""
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    return _common.write_attention(design, design_parts.first_rope(design)) | {
        "layer_types": design_parts.layer_types(design),
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
        "layer_rope_theta": [
            design_parts.rope_of(mixer).base if design_parts.has_rope(mixer) else 0.0 for mixer in mixers
        ],
    }


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return granite.write_config(design) | write_windows(design)


def map_sinks(design: ModelConfig, weights: WeightMap) -> None:
    """The sink of each layer."""
    for index in range(design.depth):
        weights.add_tensor(f"model.layers.{index}.self_attn.sinks", f"layers.{index}.mixer.sink")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the sinks."""
    _common.map_weights(design, weights)
    map_sinks(design, weights)


FAMILY = Family("granite_swa", "GraniteSWAForCausalLM", read_config, write_config, map_weights)
