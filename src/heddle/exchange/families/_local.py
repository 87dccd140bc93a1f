"""Layers of two types, with a window and without, as `layer_types` and `sliding_window` tell them."""

from collections.abc import Sequence
from typing import Any

from heddle.exchange import views
from heddle.exchange.fields import Fields
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import MOST_LAYERS, ModelConfig
from heddle.parts.positions.rope import RopeConfig

Types = list[str]


def depth(fields: Fields) -> int:
    """The number of layers."""
    return fields.count("num_hidden_layers", most=MOST_LAYERS)


def every(period: int, fields: Fields) -> Types:
    """Every `period`-th layer is full, all others have a window."""
    return [SLIDING if (index + 1) % period else FULL for index in range(depth(fields))]


def read_types(fields: Fields, default: Types) -> Types:
    """The type of each layer, `default` where the file does not tell. Raises ConfigError for a wrong one."""
    found = fields.take("layer_types", default)
    if len(found) != len(default):
        raise fields.wrong("layer_types", f"num_hidden_layers asks {len(default)} entries")
    if any(one not in (FULL, SLIDING) for one in found):
        raise fields.wrong("layer_types", f"this family has {FULL} and {SLIDING}")
    return found


def windows(fields: Fields, types: Types, window: int | None) -> list[int | None]:
    """The window of each layer. Raises ConfigError if there are sliding layers and no window."""
    if window is None and SLIDING in types:
        raise fields.wrong("sliding_window", f"layers of type {SLIDING} need a window")
    return [window if kind == SLIDING else None for kind in types]


def stack(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers from the bottom, equal neighbours as one entry with `repeat`."""
    entries: list[dict[str, Any]] = []
    for layer in layers:
        if entries and entries[-1] == layer | {"repeat": entries[-1]["repeat"]}:
            entries[-1]["repeat"] += 1
        else:
            entries.append({"repeat": 1, **layer})
    return entries


def ropes(design: ModelConfig) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of the first full and of the first sliding layer; that of the other where there is none."""
    found: dict[str, RopeConfig] = {}
    for layer, kind in zip(views.layers(design), views.layer_types(design), strict=True):
        found.setdefault(kind, views.rope(layer.mixer))
    full, sliding = found.get(FULL), found.get(SLIDING)
    return full or sliding or RopeConfig(), sliding or full or RopeConfig()
