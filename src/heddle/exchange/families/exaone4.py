"""EXAONE 4 (LG AI Research 2025): norms after each branch and of q and k; layers without a window have no RoPE."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, olmo2
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL
from heddle.model.config import ModelConfig

DEFAULT_WINDOW, DEFAULT_PERIOD = 4096, 4  # if the field is absent


def read_config(config: ConfigReader) -> dict[str, Any]:
    """With `sliding_window`: null, no layer has a window and all have RoPE."""
    window = config.get_nullable("sliding_window", DEFAULT_WINDOW)
    feedforwards = [_common.read_gated(config)] * _layer_types.read_depth(config)
    layers = read_layers(config, window, feedforwards)
    return _common.rms_design(config, 1e-5, layers, residual={"kind": "reordered"})


def read_layers(config: ConfigReader, window: int | None, feedforwards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries for layers with these feed-forwards. window: of the layers that have one; without any, all have RoPE."""
    config.require("num_key_value_heads", int)
    mixer, types = _common.read_attention(config, qk_norm="head"), _read_types(config, window)
    layers = [
        {"mixer": mixer | {"window": width, "position": mixer["position"] if width or not window else None}}
        | {"feedforward": feedforward}
        for width, feedforward in zip(_layer_types.layer_windows(config, types, window), feedforwards, strict=True)
    ]
    return _layer_types.merge_repeats(layers)


def _read_types(config: ConfigReader, window: int | None) -> list[str]:
    """The type of each layer; `sliding_window_pattern` applies if `layer_types` is absent."""
    depth, pattern = _layer_types.read_depth(config), config.optional("sliding_window_pattern")
    if config.data.get("layer_types") is not None or window is None:
        return _layer_types.read_types(config, [FULL] * depth)
    if isinstance(pattern, str) or (pattern is not None and not pattern > 0):
        raise config.invalid("sliding_window_pattern", "give layer_types beside it, as transformers requires")
    return _layer_types.full_every(pattern or DEFAULT_PERIOD, config)


def _period(types: list[str]) -> int:
    """The period that alone would give these types, or the default one."""
    period = types.index(FULL) + 1 if FULL in types else DEFAULT_PERIOD
    is_regular = all((kind == FULL) == ((index + 1) % period == 0) for index, kind in enumerate(types))
    return period if is_regular else DEFAULT_PERIOD


def write_layers(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_layers` and `rms_design` read."""
    types, window = design_parts.layer_types(design), design_parts.first_window(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | {
            "sliding_window": window or DEFAULT_WINDOW,
            "sliding_window_pattern": _period(types),
            "layer_types": types,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    fields, mixers = write_layers(design) | _common.write_gated(design), design_parts.mixers(design)
    if all(getattr(mixer, "window", None) is None and design_parts.has_rope(mixer) for mixer in mixers):
        fields["sliding_window"] = None
    return fields


FAMILY = Family("exaone4", "Exaone4ForCausalLM", read_config, write_config, olmo2.map_weights)
