"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2's attention, routed experts and a gated shared one.

With `use_sliding_window`, every second one of the first `max_window_layers` layers has a window.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, _qwen_hybrid
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Biases of q, k and v, unless `qkv_bias` is false. `layer_types` says which layers have a window."""
    mixer = _common.read_attention(config, bias="qkv" if config.get("qkv_bias", True) else False)
    shared = config.require("shared_expert_intermediate_size", int)
    feedforwards = _moe.read_feedforwards(
        config, {"shared": 1, "shared_hidden": shared, "shared_gate": True}, renormalize=False
    )
    layers = [
        {"mixer": mixer | {"window": window}, "feedforward": feedforward}
        for window, feedforward in zip(_read_windows(config), feedforwards, strict=True)
    ]
    return _common.rms_design(config, 1e-6, _layer_types.merge_repeats(layers))


def _read_windows(config: ConfigReader) -> list[int | None]:
    window, last = config.get_nullable("sliding_window", 4096), config.get("max_window_layers", 28)
    if not config.get("use_sliding_window", False):
        window = None
    usual = _default_types(0 if window is None else last, _layer_types.read_depth(config))
    return _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)


def _default_types(last: int, depth: int) -> list[str]:
    """The type of each layer if every second one of the first `last` has a window."""
    return [SLIDING if index < last and index % 2 == 0 else FULL for index in range(depth)]


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads; `max_window_layers` is for readers that do not know `layer_types`."""
    moe, window = design_parts.first_moe(design), design_parts.first_window(design)
    types = design_parts.layer_types(design)
    last = max((index for index, kind in enumerate(types) if kind == SLIDING), default=0) + 2
    usual = window is not None and types == _default_types(last, design.depth)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _moe.write_feedforwards(design)
        | {
            "qkv_bias": design_parts.first_attention(design).bias == "qkv",
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": types,
            **({"max_window_layers": last} if usual else {}),
            "shared_expert_intermediate_size": moe.shared_hidden or moe.hidden,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, those of each expert, and those of the shared one."""
    _common.map_weights(design, weights, map_feedforward=_qwen_hybrid.map_experts)


FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", read_config, write_config, map_weights)
