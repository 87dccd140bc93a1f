"""Qwen3-MoE (Qwen 2025): Qwen3's attention, with a norm of each head's q and k; MoE layers and dense layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """One attention for all layers; transformers ignores `max_window_layers`."""
    heads = _moe.read_heads(config)
    config.optional("max_window_layers")
    config.expect("use_qk_norm", True, default=True)
    window = config.get_nullable("sliding_window", 4096)
    mixer = {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "bias": config.get("attention_bias", False),
        "window": window if config.get("use_sliding_window", False) else None,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"]),
    }
    layers = [{"mixer": mixer, "feedforward": feedforward} for feedforward in _moe.read_feedforwards(config, {}, False)]
    return _common.design_fields(
        config, {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6)}, _layer_types.merge_repeats(layers)
    )


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


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Qwen3's tensor names, and those of each expert."""
    _common.map_weights(design, weights, map_feedforward=_moe.map_feedforward)


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", read_config, write_config, map_weights)
