"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, and experts of a softmax, chosen freely or in the best groups."""

from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _deepseek
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.model.config import ModelConfig


def read(fields: Fields) -> dict[str, Any]:
    """`norm_topk_prob` is read by nobody in transformers: gates are never divided by their sum."""
    fields.take("norm_topk_prob", False)
    fields.expect("scoring_func", "softmax", default="softmax")
    method = fields.expect("topk_method", "greedy", "group_limited_greedy", default="greedy")
    groups = {"groups": fields.find("n_group"), "top_groups": fields.find("topk_group")}
    routing = {"routing": "softmax_topk"} if method == "greedy" else {"routing": "softmax_group_max", **groups}
    mixer = _deepseek.read_attention(fields, "interleaved")
    layers = _deepseek.read_layers(fields, mixer, routing | {"renormalise": False}, fields.take("mlp_bias", False))
    return _blocks.frame(fields, {"kind": "rms", "eps": fields.take("rms_norm_eps", 1e-6)}, layers)


def write(design: ModelConfig) -> dict[str, Any]:
    """As read."""
    moe, dense = views.moe(design), views.gated(design)
    grouped = moe.routing == "softmax_group_max"
    return _deepseek.write(design) | {
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": moe.groups if grouped else None,
        "topk_group": moe.top_groups if grouped else None,
        "norm_topk_prob": False,
        "mlp_bias": moe.bias == "shared" if any(views.sparse(design)) else dense.bias,
    }


FAMILY = Family("deepseek_v2", "DeepseekV2ForCausalLM", read, write, _deepseek.rules)
