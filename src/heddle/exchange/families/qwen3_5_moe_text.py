"""The text model of Qwen3.5's and 3.6's mixtures (Qwen 2026): Qwen3.5 with experts and a shared expert in every layer.

The multi-token module (`mtp.`) is read where the weights hold it. `mrope_section` is for images: a text has one
position per axis.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _layer_types, _moe, _qwen_hybrid, qwen3_5_text
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Every layer has experts, whose gates sum to 1."""
    qwen3_5_text.check_fixed_fields(config)
    config.expect("norm_topk_prob", True, default=True)
    config.optional("intermediate_size")  # no layer is dense
    depth, top_k = _layer_types.read_depth(config), config.require("num_experts_per_tok", int)
    feedforward = {
        "kind": "moe",
        "experts": _moe.read_expert_count(config),
        "top_k": top_k,
        "hidden": config.require("moe_intermediate_size", int),
        "activation": "silu",
        "shared": 1,
        "shared_hidden": config.require("shared_expert_intermediate_size", int),
        "shared_gate": True,
        **_moe.read_aux_loss(config, top_k, depth),
    }
    return _qwen_hybrid.read_design(config, [feedforward] * depth)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe = design_parts.first_moe(design)
    return (
        qwen3_5_text.write_common(design)
        | {
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.hidden,
            "shared_expert_intermediate_size": moe.shared_hidden or moe.hidden,
        }
        | _moe.write_aux_loss(design, moe)
    )


FAMILY = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    read_config,
    write_config,
    qwen3_5_text.map_weights,
    ignored_tensors=_qwen_hybrid.IGNORED_TENSORS,
    multi_token=qwen3_5_text.MODULES,
    priority=101,  # after Qwen3-Next, which fits the same designs, for older readers
)
