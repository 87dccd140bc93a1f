"""Mixtral (Jiang et al. 2024): Mistral's attention, and top-k routed experts in every layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _moe
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

EXPERT_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    depth = config.require("num_hidden_layers", int)
    config.require("num_key_value_heads", int)
    config.expect("router_jitter_noise", 0.0, default=0.0)
    mixer = _common.read_attention(config, 1e6, window=config.optional("sliding_window"))
    layer = {"repeat": depth, "mixer": mixer, "feedforward": _moe.read_experts(config, depth)}
    return _common.rms_design(config, 1e-5, [layer])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _moe.write_experts(design)
        | {
            "sliding_window": design_parts.first_attention(design).window,
            "rms_norm_eps": design_parts.norm_eps(design),
            "router_jitter_noise": 0.0,
        }
        | _moe.write_aux_loss(design, design_parts.first_moe(design))
    )


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_experts(weights, hf, heddle, EXPERT_NAMES)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, except for the experts."""
    _common.map_weights(design, weights, map_feedforward=_map_experts, feedforward="block_sparse_moe")


FAMILY = Family("mixtral", "MixtralForCausalLM", read_config, write_config, map_weights)
