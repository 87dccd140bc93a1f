"""MiniMax-M2 (MiniMax 2025): norms over whole q and k projections, partial RoPE, experts by sigmoid scores.

Its balancing loss (`output_router_logits`) is refused: heddle's, of sigmoid scores, is another. Layers that predict
further tokens are ignored; they do not change the next token's logits.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, minimax, mixtral
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

DEFAULT_THETA = 5e6
SOFTMAX = 1  # in `attn_type_list`


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. The balancing bias keeps its loaded value (`bias_update` 0)."""
    depth = _layer_types.read_depth(config)
    config.require("num_key_value_heads", int)
    heads = _common.read_heads(config, config.require("hidden_size", int), head_dim=128)
    config.expect("attn_type_list", [SOFTMAX] * depth, None)
    config.expect("use_qk_norm", True, None)
    config.expect("qk_norm_type", "per_layer", None)
    mixer = {
        "kind": "attention",
        **heads,
        "qk_norm": "projection",
        "dropout": config.get("attention_dropout", 0.0),
        "position": minimax.read_position(config, heads["head_dim"], DEFAULT_THETA),
    }
    layer = {"repeat": depth, "mixer": mixer, "feedforward": _read_experts(config, depth)}
    return _common.rms_design(config, 1e-6, [layer])


def _read_experts(config: ConfigReader, depth: int) -> dict[str, Any]:
    """The feed-forward of every layer; `intermediate_size` is the width of one expert."""
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        config.optional(name)
    config.expect("output_router_logits", False, None)
    config.expect("router_jitter_noise", 0.0, None)
    config.expect("scoring_func", "sigmoid", None)
    config.expect("use_routing_bias", True, None)
    config.expect("shared_intermediate_size", 0, None)
    return _moe.read_experts(config, depth) | {"routing": "sigmoid", "bias_update": 0.0}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=1.0)
        | _moe.write_experts(design)
        | {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rms_norm_eps": design_parts.norm_eps(design),
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
        }
    )


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_experts(weights, hf, heddle, mixtral.EXPERT_NAMES)
    weights.add_tensor(f"{hf}.e_score_correction_bias", f"{heddle}.router.expert_bias")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Mixtral's tensor names, and the balancing bias."""
    _common.map_weights(design, weights, map_feedforward=_map_experts, feedforward="block_sparse_moe")


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("model.layers.{depth}.",),
)
