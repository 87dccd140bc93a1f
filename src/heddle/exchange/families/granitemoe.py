"""Granite 3 with experts (IBM 2024): Granite's attention and multipliers, and top-k routed experts in every layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _moe, granite
from heddle.exchange.family import STACKED, Family, WeightMap
from heddle.model.config import ModelConfig


def read_experts(config: ConfigReader, hidden: int, depth: int) -> dict[str, Any]:
    """The routed experts of every layer, of this width."""
    top_k = config.get("num_experts_per_tok", 2)
    return {
        "kind": "moe",
        "experts": config.get("num_local_experts", 8, "num_experts"),
        "top_k": top_k,
        "hidden": hidden,
        "activation": _common.read_activation(config),
        "routing": "topk_softmax",
        **_moe.read_aux_loss(config, top_k, depth),
    }


def write_experts(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_experts` reads, and their width."""
    moe = design_parts.first_moe(design)
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
        **_moe.write_aux_loss(design, moe),
    }


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    depth = config.require("num_hidden_layers", int)
    feedforward = read_experts(config, config.require("intermediate_size", int), depth)
    layer = {"repeat": depth, "mixer": granite.read_mixer(config), "feedforward": feedforward}
    return _common.rms_design(config, 1e-6, [layer], **granite.read_multipliers(config))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _common.write_decoder(design) | granite.write_multipliers(design) | write_experts(design)


def map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """The router and the stacks of experts; gate and up are one stack."""
    weights.add_tensor(f"{hf}.router.layer.weight", f"{heddle}.router.weight")
    weights.add_tensor(f"{hf}.input_linear.weight", f"{heddle}.gate.weight", f"{heddle}.up.weight", transform=STACKED)
    weights.add_tensor(f"{hf}.output_linear.weight", f"{heddle}.down.weight")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, except for the experts."""
    _common.map_weights(design, weights, map_feedforward=map_experts, feedforward="block_sparse_moe")


FAMILY = Family("granitemoe", "GraniteMoeForCausalLM", read_config, write_config, map_weights)
