"""Granite 3 with a shared expert (IBM 2025): Granite's attention and multipliers, routed experts and a shared one."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import granitemoe
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

DEFAULT_SHARED = 0  # if the config has no width of the shared expert


def read_shared(config: ConfigReader) -> dict[str, Any]:
    """The fields of the shared expert; a width of 0 is a model without one."""
    shared = config.get("shared_intermediate_size", DEFAULT_SHARED)
    return {"shared": 1, "shared_hidden": shared} if shared else {}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    design = granitemoe.read_config(config)
    design["layers"][0]["feedforward"] |= read_shared(config)
    return design


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe = design_parts.first_moe(design)
    return granitemoe.write_config(design) | {
        "shared_intermediate_size": (moe.shared_hidden or moe.hidden) if moe.shared else 0
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Those of Granite's experts and of the shared one."""
    granitemoe.map_weights(design, weights)
    map_shared(design, weights)


def map_shared(design: ModelConfig, weights: WeightMap) -> None:
    """The shared expert of each layer; its gate and up are one matrix."""
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}.shared_mlp", f"layers.{index}.feedforward.shared"
        weights.add_module(f"{hf}.input_linear", f"{heddle}.gate", f"{heddle}.up")
        weights.add_module(f"{hf}.output_linear", f"{heddle}.down")


FAMILY = Family("granitemoeshared", "GraniteMoeSharedForCausalLM", read_config, write_config, map_weights)
