"""The designs of published models, as the explorer shows them: each different layer once, with its number."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from heddle.model.config import ModelConfig

FILE = Path(__file__).with_name("published.json")


@cache
def published_designs() -> list[dict[str, Any]]:
    """Name and design of each model in published.json, which tools/published_designs.py writes."""
    designs: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return designs


def explorer_design(config: ModelConfig) -> dict[str, Any]:
    """A design as plain data with its different layers and how many there are of each. An encoder is left out."""
    data = config.dump()
    layers = [layer.config.dump() | {"count": layer.count} for layer in config.distinct_layers]
    for layer in layers:
        layer.pop("repeat")
    names = ("vocab_size", "width", "norm", "residual", "embedding", "head")
    return {name: data[name] for name in names if name in data} | {"layers": layers}
