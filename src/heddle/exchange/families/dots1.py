"""dots.llm1 (rednote 2025): Qwen3's attention, and DeepSeek-V3's experts after some dense layers."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, _layer_types
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig

DEFAULT_WINDOW, DEFAULT_FIRST = 4096, 62  # of layers from the second number on


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    window = config.get_nullable("sliding_window", DEFAULT_WINDOW)
    first = config.get("max_window_layers", DEFAULT_FIRST)
    usual = [FULL if window is None or index < first else SLIDING for index in range(_layer_types.read_depth(config))]
    windows = _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)
    mixer = _common.read_attention(config, qk_norm="head", bias=config.get("attention_bias", False))
    routing = _deepseek.read_sigmoid_routing(config, renormalize=False)
    groups = _deepseek.read_layers(config, mixer, routing, False)
    feedforwards = [group["feedforward"] for group in groups for _ in range(group["repeat"])]
    layers = [
        {"mixer": mixer | {"window": width}, "feedforward": feedforward}
        for width, feedforward in zip(windows, feedforwards, strict=True)
    ]
    return _common.rms_design(config, 1e-6, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _deepseek.write_layers(design)
        | _deepseek.write_sigmoid_routing(design)
        | {
            "attention_bias": design_parts.first_attention(design).bias is True,
            "sliding_window": design_parts.first_window(design),
            "layer_types": design_parts.layer_types(design),
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and those of DeepSeek-V3's experts and multi-token modules."""
    _common.map_weights(design, weights, map_feedforward=_deepseek.map_feedforward, modules=_deepseek.MODULES)


FAMILY = Family("dots1", "Dots1ForCausalLM", read_config, write_config, map_weights)
