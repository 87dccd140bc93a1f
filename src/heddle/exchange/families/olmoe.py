"""OLMoE (Muennighoff et al. 2024): experts in every layer, and norms over whole q and k projections."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

DEFAULT_AUX_LOSS = 0.01


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. Heads are as wide as width / heads, as their norms are."""
    _common.check_width(config)
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    config.expect("head_dim", width // heads, None)
    config.expect("clip_qkv", None)
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": width // heads,
        "qk_norm": "projection",
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, width // heads),
    }
    depth = _layer_types.read_depth(config)
    feedforward = _moe.read_experts(config, depth, default_loss=DEFAULT_AUX_LOSS)
    feedforward["renormalize"] = config.get("norm_topk_prob", False)
    return _common.rms_design(config, 1e-5, [{"repeat": depth, "mixer": mixer, "feedforward": feedforward}])


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, attention = design_parts.first_moe(design), _common.write_attention(design)
    del attention["head_dim"]
    return (
        _common.write_common(design)
        | attention
        | {
            "attention_bias": design_parts.first_attention(design).bias is True,
            "clip_qkv": None,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.hidden,
            "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
            "norm_topk_prob": moe.renormalize,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
        | _moe.write_aux_loss(design, moe)
    )


FAMILY = Family("olmoe", "OlmoeForCausalLM", read_config, write_config, _moe.map_weights)
