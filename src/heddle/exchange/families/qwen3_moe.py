"""Qwen3-MoE (Qwen 2025): Qwen3's attention, with a norm of each head's q and k; MoE layers and dense layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """One attention for all layers; transformers ignores `max_window_layers`."""
    config.require("num_key_value_heads", int)
    config.optional("max_window_layers")
    config.expect("use_qk_norm", True, default=True)
    window = config.get_nullable("sliding_window", 4096)
    mixer = _common.read_attention(
        config,
        qk_norm="head",
        bias=config.get("attention_bias", False),
        window=window if config.get("use_sliding_window", False) else None,
    )
    layers = [{"mixer": mixer, "feedforward": feedforward} for feedforward in _moe.read_feedforwards(config, {}, False)]
    return _common.rms_design(config, 1e-6, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = design_parts.first_attention(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _moe.write_feedforwards(design)
        | {
            "attention_bias": mixer.bias is True,
            "use_sliding_window": mixer.window is not None,
            "sliding_window": mixer.window,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read_config, write_config, _moe.map_weights)
