"""Qwen3-Next (Qwen 2025): gated delta rule, gated softmax attention in every fourth layer, experts in every layer.

Norms multiply by `1 + γ`, except for the delta rule's head norm. The multi-token module (`mtp.`) is read where the
weights hold it and the model's last layer has softmax attention, as in published models.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _moe, _qwen_hybrid
from heddle.exchange.families._qwen_hybrid import FULL
from heddle.exchange.family import Family, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig

MODULES = _qwen_hybrid.module_names("num_nextn_predict_layers")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Two kinds of mixers; `layer_types` says which each layer has."""
    config.expect("use_sliding_window", False, default=False)
    shared = config.require("shared_expert_intermediate_size", int)
    shared_expert = {"shared": 1, "shared_hidden": shared, "shared_gate": True}
    return _qwen_hybrid.read_design(config, _moe.read_feedforwards(config, shared_expert, True))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, types = design_parts.first_moe(design), _qwen_hybrid.mixer_types(design)
    interval = types.index(FULL) + 1 if FULL in types else design.depth + 1
    return (
        _qwen_hybrid.write_common(design)
        | _moe.write_feedforwards(design)
        | {
            "use_sliding_window": False,
            "full_attention_interval": (
                interval if types == _qwen_hybrid.default_types(interval, design.depth) else None
            ),
            "shared_expert_intermediate_size": moe.shared_hidden or moe.hidden,
            "hidden_act": "silu",
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Projections with the same input are one tensor, interleaved by query head or key head."""
    _qwen_hybrid.map_weights(design, weights, _map_inputs, MODULES)


def _map_inputs(weights: WeightMap, hf: str, heddle: str, groups: int) -> None:
    fused = [f"{heddle}.{name}" for name in ("q", "k", "v", "gate")]
    weights.add_module(f"{hf}.in_proj_qkvz", *fused, transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.in_proj_ba", f"{heddle}.beta", f"{heddle}.a", transform=interleaved_by_group(groups))


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=_qwen_hybrid.IGNORED_TENSORS,
    multi_token=MODULES,
)
