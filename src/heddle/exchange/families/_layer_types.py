"""Layers with and without a sliding window, as the fields `layer_types` and `sliding_window` describe them."""

from collections.abc import Sequence
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import MAX_LAYERS, ModelConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.positions.rope import RopeConfig

LayerTypes = list[str]
LINEAR = "linear_attention"


def read_depth(config: ConfigReader) -> int:
    """The number of layers."""
    return config.require_count("num_hidden_layers", maximum=MAX_LAYERS)


def full_every(period: int, config: ConfigReader) -> LayerTypes:
    """Full attention in every `period`-th layer, a sliding window in all others."""
    return [SLIDING if (index + 1) % period else FULL for index in range(read_depth(config))]


def read_types(config: ConfigReader, default: LayerTypes) -> LayerTypes:
    """The type of each layer, `default` if the field is absent. Raises ConfigError for a wrong one."""
    return read_kinds(config, "layer_types", default, (FULL, SLIDING))


def read_kinds(config: ConfigReader, name: str, default: LayerTypes, kinds: tuple[str, ...]) -> LayerTypes:
    """Which of some kinds each layer is, as the field `name` says; `default` if it is absent."""
    types = config.get(name, default)
    if len(types) != len(default) or any(kind not in kinds for kind in types):
        raise config.invalid(name, f"should say {' or '.join(kinds)} of each of {len(default)} layers")
    return types


def layer_windows(config: ConfigReader, types: LayerTypes, window: int | None) -> list[int | None]:
    """The window of each layer. Raises ConfigError if there are sliding layers but no window."""
    if window is None and SLIDING in types:
        raise config.invalid("sliding_window", f"layers of type {SLIDING} need a window")
    return [window if kind == SLIDING else None for kind in types]


def read_windows(config: ConfigReader, usual: LayerTypes, default: int | None) -> list[int | None]:
    """The window of each layer. usual: the types, and default: the window, where the fields are absent."""
    window = config.get_nullable("sliding_window", default)
    return layer_windows(config, read_types(config, usual), window)


def write_windows(design: ModelConfig, default: int) -> dict[str, Any]:
    """The fields that `read_windows` reads; `default` is written where no layer has a window."""
    window = design_parts.first_window(design) or default
    return {"sliding_window": window, "layer_types": design_parts.layer_types(design)}


def windowed_layers(
    config: ConfigReader, usual: LayerTypes, window: int | None, layer: dict[str, Any]
) -> list[dict[str, Any]]:
    """Entries for layers that differ in the window of their mixer alone. usual: the types where the field is absent."""
    windows = layer_windows(config, read_types(config, usual), window)
    return merge_repeats([layer | {"mixer": layer["mixer"] | {"window": width}} for width in windows])


def types_of(design: ModelConfig, mixer: type[MixerConfig], kind: str = LINEAR) -> LayerTypes:
    """The type of each layer of a design: `kind` for layers with this mixer, full attention for others."""
    return [kind if isinstance(layer.mixer, mixer) else FULL for layer in design_parts.layers(design)]


def merge_repeats(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers in order, with equal neighbors merged into one entry with `repeat`."""
    entries: list[dict[str, Any]] = []
    for layer in layers:
        if entries and entries[-1] == layer | {"repeat": entries[-1]["repeat"]}:
            entries[-1]["repeat"] += 1
        else:
            entries.append({"repeat": 1, **layer})
    return entries


def layers_of(
    mixers: Sequence[dict[str, Any]], feedforwards: dict[str, Any] | Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Entries for layers with these mixers. feedforwards: one for each, or one for all."""
    each = [feedforwards] * len(mixers) if isinstance(feedforwards, dict) else feedforwards
    pairs = zip(mixers, each, strict=True)
    return merge_repeats([{"mixer": mixer, "feedforward": feedforward} for mixer, feedforward in pairs])


def ropes_by_layer_type(design: ModelConfig) -> tuple[RopeConfig, RopeConfig]:
    """The RoPE of the first full and of the first sliding layer. A type without layers gets the other's."""
    ropes: dict[str, RopeConfig] = {}
    for layer, kind in zip(design_parts.layers(design), design_parts.layer_types(design), strict=True):
        ropes.setdefault(kind, design_parts.rope_of(layer.mixer))
    full, sliding = ropes.get(FULL), ropes.get(SLIDING)
    return full or sliding or RopeConfig(), sliding or full or RopeConfig()
