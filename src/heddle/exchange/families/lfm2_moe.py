"""LFM2-MoE (Liquid AI 2025): LFM2's mixers, and experts that are chosen by sigmoid scores after some dense layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _layer_types, _moe, lfm2
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

DEFAULT_DENSE = 2
SUM_EPS = 1e-6  # beside the sum of the gates


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    config.get("output_router_logits", False)
    depth, renormalized = _layer_types.read_depth(config), config.get("norm_topk_prob", True)
    experts = {
        "kind": "moe",
        "experts": config.require("num_experts", int),
        "top_k": config.require("num_experts_per_tok", int),
        "hidden": config.require("moe_intermediate_size", int),
        "routing": "sigmoid",
        "renormalize": renormalized,
        "renormalize_eps": SUM_EPS if renormalized else None,
        "scale": config.get("routed_scaling_factor", 1.0),
        "bias_update": 0.0 if config.get("use_expert_bias", True) else None,
    }
    dense = {"kind": "gated", "hidden": config.require("intermediate_size", int)}
    first = config.get("num_dense_layers", DEFAULT_DENSE)
    return lfm2.read_decoder(config, [dense if index < first else experts for index in range(depth)])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, sparse, fields = design_parts.first_moe(design), design_parts.has_experts(design), lfm2.write_config(design)
    del fields["block_auto_adjust_ff_dim"]
    return fields | {
        "num_dense_layers": sparse.index(True) if True in sparse else design.depth,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.hidden,
        "norm_topk_prob": moe.renormalize,
        "routed_scaling_factor": moe.scale,
        "use_expert_bias": moe.bias_update is not None,
    }


def map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    """A layer's feed-forward, dense or with experts, and the balancing bias."""
    if f"{heddle}.router.weight" not in weights.shapes:
        lfm2.map_gated(weights, hf, heddle)
        return
    _moe.map_experts(weights, hf, heddle, {role: name for name, role in lfm2.FEEDFORWARD.items()})
    weights.add_tensor(f"{hf}.expert_bias", f"{heddle}.router.expert_bias")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """LFM2's tensor names, and those of each expert."""
    lfm2.map_weights(design, weights, map_feedforward=map_feedforward)


FAMILY = Family("lfm2_moe", "Lfm2MoeForCausalLM", read_config, write_config, map_weights)
