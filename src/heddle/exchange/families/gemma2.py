"""Gemma 2 (Riviere et al. 2024): a sliding window in every other layer, soft caps on scores and logits."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

# What Gemma 2 and 3 share: scaled embeddings, sandwich norms with weights 1 + γ, GeGLU, windows in most layers.

DEFAULT_WINDOW = 4096  # if the field is absent
ACTIVATION = "hidden_activation"


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The fields of attention that all layers share."""
    _common.check_width(config)
    scalar = config.get("query_pre_attn_scalar", 256)
    if scalar < 1:
        raise config.invalid("query_pre_attn_scalar", "should be at least 1; scores are divided by its square root")
    config.expect("use_bidirectional_attention", False, None)
    return {
        "kind": "attention",
        **_common.read_heads(config, config.require("hidden_size", int), head_dim=256),
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "scale": scalar**-0.5,
    }


def read_design(config: ConfigReader, mixers: list[dict[str, Any]], softcap: float | None) -> dict[str, Any]:
    """A design with one layer for each mixer; `softcap` bounds the logits."""
    # Fields that transformers ignores: older names of the activation and the window, and how keys are cached.
    config.unread -= {"hidden_act", "sliding_window_size", "cache_implementation"}
    feedforward = _common.read_gated(config, ACTIVATION, "gelu_pytorch_tanh")
    layers = [{"mixer": mixer, "feedforward": feedforward} for mixer in mixers]
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "offset": 1.0, "cast": "after"}
    return _common.design_fields(
        config,
        norm,
        _layer_types.merge_repeats(layers),
        embedding={"scale": True},
        residual={"kind": "sandwich"},
        head={"tied": config.get("tie_word_embeddings", True), "softcap": softcap},
    )


def write_common(design: ModelConfig) -> dict[str, Any]:
    """The fields of both versions, but for RoPE."""
    mixer = design_parts.first_attention(design)
    return _common.write_common(design) | {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": mixer.bias is True,
        "attention_dropout": mixer.dropout,
        "query_pre_attn_scalar": round(max(min(mixer.scale or 1.0, 1.0), 1e-9) ** -2),
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
        "layer_types": design_parts.layer_types(design),
        "final_logit_softcapping": design.head.softcap,
        **_common.write_gated(design, ACTIVATION),
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with four norms per layer."""
    _common.map_weights(design, weights, _map_norms)


def _map_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.mixer")
    weights.add_module(f"{hf}.post_attention_layernorm", f"{heddle}.residual.after.mixer")
    weights.add_module(f"{hf}.pre_feedforward_layernorm", f"{heddle}.residual.norms.feedforward")
    weights.add_module(f"{hf}.post_feedforward_layernorm", f"{heddle}.residual.after.feedforward")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """A soft cap of null is off; an absent one has the value of the published model."""
    mixer = read_mixer(config)
    mixer["softcap"] = config.get_nullable("attn_logit_softcapping", 50.0)
    mixer["position"] = read_rope(config, mixer["head_dim"])
    types = _layer_types.read_types(config, _layer_types.full_every(2, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", DEFAULT_WINDOW))
    mixers = [mixer | {"window": window} for window in windows]
    return read_design(config, mixers, config.get_nullable("final_logit_softcapping", 30.0))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    cap = {"attn_logit_softcapping": design_parts.first_attention(design).softcap}
    return _common.write_attention(design) | write_common(design) | cap


FAMILY = Family("gemma2", "Gemma2ForCausalLM", read_config, write_config, map_weights, priority=4)
