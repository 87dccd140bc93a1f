"""Mixtral (Jiang et al. 2024): Mistral's attention, and top-k routed experts in every layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _moe
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

EXPERT_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    depth = config.require("num_hidden_layers", int)
    heads = _moe.read_heads(config)
    config.expect("router_jitter_noise", 0.0, default=0.0)
    mixer = {
        "kind": "attention",
        **heads,
        "window": config.optional("sliding_window"),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"], 1e6),
    }
    top_k = config.require("num_experts_per_tok", int)
    feedforward = {
        "kind": "moe",
        "experts": _moe.read_expert_count(config),
        "top_k": top_k,
        "hidden": config.require("intermediate_size", int),
        "activation": _common.read_activation(config),
        **_moe.read_aux_loss(config, top_k, depth),
    }
    layer = {"repeat": depth, "mixer": mixer, "feedforward": feedforward}
    return _common.design_fields(config, {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-5)}, [layer])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe = design_parts.first_moe(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | {
            "sliding_window": design_parts.first_attention(design).window,
            "num_experts": moe.experts,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.hidden,
            "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
            "rms_norm_eps": design_parts.norm_eps(design),
            "router_jitter_noise": 0.0,
        }
        | _moe.write_aux_loss(design, moe)
    )


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_experts(weights, hf, heddle, EXPERT_NAMES)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, except for the experts."""
    _common.map_weights(design, weights, map_feedforward=_map_experts, feedforward="block_sparse_moe")


FAMILY = Family("mixtral", "MixtralForCausalLM", read_config, write_config, map_weights)
