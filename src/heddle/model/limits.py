"""Limits on the size of a design. They are checked on plain data, before any part is parsed and torch is imported."""

from typing import Any

from heddle.config import Config, DesignError, Width, join, parse_config

MAX_LAYERS = 4096
MAX_DISTINCT_LAYERS = 128  # each takes about 20 ms to build and measure


class _Sizes(Config):
    """The field of a design whose limit is checked here."""

    width: Width


def check_limits(design: dict[str, Any], path: str = "") -> None:
    """Refuse a width or a number of layers that is too large. Other errors are left to `parse_config`."""
    if "width" in design:
        parse_config(_Sizes, {"width": design["width"]}, path)
    if reason := too_many_layers(_depth(design.get("layers"))):
        raise DesignError(join(path, "layers"), reason)
    if isinstance(design.get("encoder"), dict):
        check_limits(design["encoder"], join(path, "encoder"))


def too_many_layers(depth: int) -> str | None:
    """Return why a design of `depth` layers is refused, or None if it is not."""
    count = f"{depth}" if depth < 2**64 else "more than 2^64"
    return f"stands for {count} layers; at most {MAX_LAYERS} are built" if depth > MAX_LAYERS else None


def _depth(layers: Any) -> int:
    """Count the layers that a list of entries stands for. What is not valid counts as one layer."""
    if not isinstance(layers, list):
        return 1
    depth = 0
    for entry in layers:
        fields = entry if isinstance(entry, dict) else {}
        repeat = fields.get("repeat")
        depth += (repeat if type(repeat) is int and repeat > 0 else 1) * _depth(fields.get("layers"))
    return depth
