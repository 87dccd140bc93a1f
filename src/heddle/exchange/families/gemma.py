"""Gemma's text models: scaled embeddings, norms with weights 1 + γ, GeGLU, later windows in most layers."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope, read_ropes_by_layer_type, write_ropes_by_layer_type
from heddle.model.config import ModelConfig

GELU_TANH = "gelu_pytorch_tanh"


def read_norm(config: ConfigReader) -> dict[str, Any]:
    """Norms with weights 1 + γ."""
    return {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "offset": 1.0, "cast": "after"}


def read_gemma(config: ConfigReader) -> dict[str, Any]:
    """Gemma 1 (Gemma Team 2024): Llama's decoder with scaled embeddings, norms with weights 1 + γ, and GeGLU.

    The activation that its first files call `gelu` is the tanh approximation, as in transformers.
    """
    # transformers ignores `hidden_activation`.
    config.expect("use_bidirectional_attention", False, None)
    config.unread.discard("hidden_activation")
    mixer = _common.read_attention(config, head_dim=256, bias=config.get("attention_bias", False))
    feedforward = _common.read_gated(config, default=GELU_TANH)
    if config.get("hidden_act", GELU_TANH) == "gelu":
        feedforward["activation"] = design_parts.HEDDLE_ACTIVATIONS[GELU_TANH]
    return _common.design_fields(
        config,
        read_norm(config),
        _common.same_layers(config, mixer, feedforward),
        tied=True,
        embedding={"scale": True},
    )


GEMMA = Family("gemma", "GemmaForCausalLM", read_gemma, _common.write_decoder, _common.map_weights, priority=9)

# Gemma 2 and 3.
WINDOW = 4096  # if the field is absent
ACTIVATION = "hidden_activation"
NORMS = {
    "input_layernorm": "residual.norms.mixer", "post_attention_layernorm": "residual.after.mixer",
    "pre_feedforward_layernorm": "residual.norms.feedforward",
    "post_feedforward_layernorm": "residual.after.feedforward",
}  # fmt: skip


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The fields of attention that all layers share."""
    _common.check_width(config)
    scalar = config.get("query_pre_attn_scalar", 256)
    if scalar < 1:
        raise config.invalid("query_pre_attn_scalar", "should be at least 1; scores are divided by its square root")
    config.expect("use_bidirectional_attention", False, None)
    return {
        "kind": "attention",
        **_common.read_heads(config, head_dim=256),
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "scale": scalar**-0.5,
    }


def read_design(config: ConfigReader, mixers: list[dict[str, Any]], softcap: float | None) -> dict[str, Any]:
    """A design with one layer for each mixer; `softcap` bounds the logits."""
    # Fields that transformers ignores: older names of the activation and the window, and how keys are cached.
    config.unread -= {"hidden_act", "sliding_window_size", "cache_implementation"}
    feedforward = _common.read_gated(config, ACTIVATION, GELU_TANH)
    return _common.design_fields(
        config,
        read_norm(config),
        _layer_types.layers_of(mixers, feedforward),
        embedding={"scale": True},
        residual={"kind": "sandwich"},
        head={"tied": config.get("tie_word_embeddings", True), "softcap": softcap},
    )


def write_windowed(design: ModelConfig) -> dict[str, Any]:
    """The fields of both versions, but for RoPE."""
    mixer = design_parts.first_attention(design)
    return _common.write_common(design) | {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": design_parts.first_attention(design).bias is True,
        "attention_dropout": mixer.dropout,
        "query_pre_attn_scalar": round(max(min(mixer.scale or 1.0, 1.0), 1e-9) ** -2),
        **_layer_types.write_windows(design, WINDOW),
        "final_logit_softcapping": design.head.softcap,
        **_common.write_gated(design, ACTIVATION),
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def read_gemma2(config: ConfigReader) -> dict[str, Any]:
    """Gemma 2 (Riviere et al. 2024): a sliding window in every other layer, soft caps on scores and logits."""
    # A soft cap of null is off; an absent one has the value of the published model.
    mixer = read_mixer(config)
    mixer["softcap"] = config.get_nullable("attn_logit_softcapping", 50.0)
    mixer["position"] = read_rope(config, mixer["head_dim"])
    windows = _layer_types.read_windows(config, _layer_types.full_every(2, config), WINDOW)
    mixers = [mixer | {"window": window} for window in windows]
    return read_design(config, mixers, config.get_nullable("final_logit_softcapping", 30.0))


def write_gemma2(design: ModelConfig) -> dict[str, Any]:
    cap = {"attn_logit_softcapping": design_parts.first_attention(design).softcap}
    return _common.write_attention(design) | write_windowed(design) | cap


map_weights = partial(_common.map_weights, names=NORMS)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", read_gemma2, write_gemma2, map_weights, priority=4)


def read_vaultgemma(config: ConfigReader) -> dict[str, Any]:
    """VaultGemma (Google 2025): Gemma 2 without the norms after each branch, trained with differential privacy."""
    return read_gemma2(config) | {"residual": {"kind": "pre_norm"}}


VAULTGEMMA = Family("vaultgemma", "VaultGemmaForCausalLM", read_vaultgemma, write_gemma2, map_weights)


def read_gemma3(config: ConfigReader) -> dict[str, Any]:
    """Gemma 3's text model (Gemma Team 2025): Gemma 2 with norms of q and k, without soft caps, and with two RoPEs.

    Five layers with a sliding window and theta 1e4 alternate with one full layer with theta 1e6.
    """
    # Both formats: `layer_types` or `sliding_window_pattern`; one RoPE table per layer type, or one theta per type.
    mixer = read_mixer(config) | {"qk_norm": "head"}
    config.expect("attn_logit_softcapping", None)  # transformers reads it but caps nothing
    thetas = config.get("rope_theta", 1e6), config.get("rope_local_base_freq", 1e4)
    ropes = read_ropes_by_layer_type(config, mixer["head_dim"], *thetas)
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    if period < 1:
        raise config.invalid("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    types = _layer_types.read_types(config, _layer_types.full_every(period, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", WINDOW))
    mixers = [mixer | {"window": window, "position": ropes[kind]} for kind, window in zip(types, windows, strict=True)]
    return read_design(config, mixers, config.get_nullable("final_logit_softcapping", None))


def write_gemma3(design: ModelConfig) -> dict[str, Any]:
    full, sliding = _layer_types.ropes_by_layer_type(design)
    head_dim = design_parts.first_attention(design).head_dim or design.width
    own = {"rope_local_base_freq": sliding.base, "attn_logit_softcapping": None}
    return write_windowed(design) | write_ropes_by_layer_type(full, sliding, head_dim) | own


GEMMA3_TEXT = Family("gemma3_text", "Gemma3ForCausalLM", read_gemma3, write_gemma3, map_weights, priority=5)
