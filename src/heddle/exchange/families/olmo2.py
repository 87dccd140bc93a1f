"""OLMo 2 (Team OLMo 2025): norms after each branch and over whole q and k projections; all layers are the same."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

# What OLMo 2 and 3 share: norms after each branch and over whole q and k projections, cast back after the weight.

ROPE_CAST = {"cast": "after"}  # heads are rotated in float32, whatever the model's dtype


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The fields of attention that all layers share."""
    return {
        "kind": "attention",
        **_common.read_heads(config, config.require("hidden_size", int)),
        "qk_norm": "projection",
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }


def read_design(
    config: ConfigReader, mixers: list[dict[str, Any]], feedforward: dict[str, Any] | None = None, eps: float = 1e-5
) -> dict[str, Any]:
    """A design with one layer for each mixer. feedforward: by default a gated one. eps: the family's default."""
    feedforward = feedforward or _common.read_gated(config)
    layers = [{"mixer": mixer, "feedforward": feedforward} for mixer in mixers]
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", eps), "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.merge_repeats(layers), residual={"kind": "reordered"})


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields of both versions; OLMo 3 replaces those of RoPE."""
    return _common.write_decoder(design)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with a norm after each branch and none before."""
    _common.map_weights(design, weights, map_norms)


def map_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    """The norms after attention and feed-forward."""
    weights.add_module(f"{hf}.post_attention_layernorm", f"{heddle}.residual.norms.mixer")
    weights.add_module(f"{hf}.post_feedforward_layernorm", f"{heddle}.residual.norms.feedforward")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, without a window."""
    mixer = read_mixer(config)
    mixer["position"] = read_rope(config, mixer["head_dim"]) | ROPE_CAST
    return read_design(config, [mixer] * _layer_types.read_depth(config))


FAMILY = Family("olmo2", "Olmo2ForCausalLM", read_config, write_config, map_weights, priority=6)
