"""Granite's mixtures with windows (IBM 2026): the attention of `granite_swa`, routed experts and a shared one."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, granite, granite_swa, granitemoe, granitemoeshared
from heddle.exchange.family import STACKED, Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All feed-forwards are the same."""
    hidden, depth = config.require("intermediate_size", int), _layer_types.read_depth(config)
    feedforward = granitemoe.read_experts(config, hidden, depth) | granitemoeshared.read_shared(config)
    layers = granite_swa.read_layers(config, feedforward)
    return _common.rms_design(config, 1e-6, layers, **granite.read_multipliers(config))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return granitemoeshared.write_config(design) | granite_swa.write_windows(design)


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """The router and the stacks of experts; gate and up are one stack."""
    weights.add_tensor(f"{hf}.router.weight", f"{heddle}.router.weight")
    gate_up = f"{heddle}.gate.weight", f"{heddle}.up.weight"
    weights.add_tensor(f"{hf}.experts.gate_up_proj", *gate_up, transform=STACKED)
    weights.add_tensor(f"{hf}.experts.down_proj", f"{heddle}.down.weight")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, the experts', and the sinks."""
    _common.map_weights(design, weights, map_feedforward=_map_experts, feedforward="block_sparse_moe")
    granitemoeshared.map_shared(design, weights)
    granite_swa.map_sinks(design, weights)


FAMILY = Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", read_config, write_config, map_weights)
