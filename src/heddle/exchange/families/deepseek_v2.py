"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, experts by softmax scores, top k of all or of the best groups."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """transformers ignores `norm_topk_prob`: gates are never divided by their sum."""
    config.get("norm_topk_prob", False)
    config.expect("scoring_func", "softmax", default="softmax")
    method = config.expect("topk_method", "greedy", "group_limited_greedy", default="greedy")
    groups = {"groups": config.optional("n_group"), "top_groups": config.optional("topk_group")}
    routing = {"routing": "softmax_topk"} if method == "greedy" else {"routing": "softmax_group_max", **groups}
    mixer = _deepseek.read_attention(config, "interleaved")
    layers = _deepseek.read_layers(config, mixer, routing | {"renormalize": False}, config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-6, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, dense = design_parts.first_moe(design), design_parts.first_gated(design)
    grouped = moe.routing == "softmax_group_max"
    return _deepseek.write_common(design) | {
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": moe.groups if grouped else None,
        "topk_group": moe.top_groups if grouped else None,
        "norm_topk_prob": False,
        "mlp_bias": moe.bias == "shared" if any(design_parts.has_experts(design)) else dense.bias,
    }


FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", read_config, write_config, _deepseek.map_weights)
