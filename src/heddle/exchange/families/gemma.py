"""Gemma's text models, up to Gemma 4: scaled embeddings, norms with weights 1 + γ, GeGLU, later windows.

RecurrentGemma has Griffin's recurrence in most layers.
"""

import math
from functools import partial
from typing import Any

import torch

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import DEPTHWISE_CONV, STACKED_TRANSPOSED, Family, WeightMap, reshaped
from heddle.exchange.rope import (
    FULL,
    SLIDING,
    read_rope,
    read_rope_table,
    read_ropes_by_layer_type,
    write_rope_table,
    write_ropes_by_layer_type,
)
from heddle.model.config import ModelConfig
from heddle.numerics.norms import rounded_to_dtypes
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.rg_lru import RGLRUConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.proportional import ProportionalConfig

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


# Gemma 3n's and Gemma 4's text models: normalized values, unscaled scores, and in most an embedding for each layer.

ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
OF_EXPERTS = frozenset({"num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"})
HEADS = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}


def read_gemma4(config: ConfigReader, window: int = 512, per_layer: int = 256) -> dict[str, Any]:
    """Gemma 4 (Gemma Team 2026), without experts: Gemma 3 with normalized values and unscaled scores.

    Full layers have wider heads, proportional RoPE, and may use their keys as values. The last layers may read keys and
    values of earlier ones. Each layer may read its own embedding, and scales the stream. The last layer is full,
    whatever `layer_types` says.
    """
    # window, per_layer: defaults of fields
    if config.get("enable_moe_block", False):
        raise config.invalid("enable_moe_block", "its experts read the stream beside the norm, which heddle lacks")
    config.unread -= OF_EXPERTS
    config.expect("use_bidirectional_attention", None, "vision")  # a text is read from left to right with both
    types = [*_layer_types.read_types(config, _layer_types.full_every(6, config))[:-1], FULL]
    windows = _layer_types.layer_windows(config, types, config.get("sliding_window", window))
    own = len(types) - config.get("num_kv_shared_layers", 0)
    mixers = _read_mixers(config, types)
    feedforward = _common.read_gated(config, ACTIVATION, GELU_TANH)
    wide = feedforward | {"hidden": feedforward["hidden"] * (2 if config.get("use_double_wide_mlp", False) else 1)}
    layers = []
    for index, (kind, width) in enumerate(zip(types, windows, strict=True)):
        values = {} if index < own else {"shared_kv": True, "k_eq_v": False, "value_norm": False}
        mixer = mixers[kind] | values | {"window": width}
        layers.append({"mixer": mixer, "feedforward": feedforward if index < own else wide})
    embedding: dict[str, Any] = {"scale": True}
    if dim := config.get("hidden_size_per_layer_input", per_layer):
        config.expect("vocab_size_per_layer_input", config.require("vocab_size", int), default=262144)
        embedding["per_layer"] = {"dim": dim, "activation": feedforward["activation"]}
    config.unread.discard("vocab_size_per_layer_input")
    return _common.rms_design(
        config,
        1e-6,
        _layer_types.merge_repeats(layers),
        cast="after",
        embedding=embedding,
        residual={"kind": "sandwich", "layer_scalar": True},
        head={
            "tied": config.get("tie_word_embeddings", True),
            "softcap": config.get_nullable("final_logit_softcapping", None),
        },
    )


def _attention(config: ConfigReader, kv_heads: int) -> dict[str, Any]:
    """The fields that all layers share. kv_heads: the family's default."""
    return {
        "kind": "attention",
        "heads": config.require_count("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads", kv_heads),
        "head_dim": config.get("head_dim", 256),
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "scale": 1.0,
        "qk_norm": "head",
        "value_norm": True,
    }


def _read_mixers(config: ConfigReader, types: _layer_types.LayerTypes) -> dict[str, dict[str, Any]]:
    """The attention of full and of sliding layers, without their windows."""
    mixer, k_eq_v = _attention(config, kv_heads=4), config.get("attention_k_eq_v", False)
    full = mixer | {"head_dim": config.get("global_head_dim", 512), "k_eq_v": k_eq_v}
    if (groups := config.optional("num_global_key_value_heads")) and k_eq_v:
        full["kv_heads"] = groups
    if (overrides := config.optional("per_layer_config")) is not None:
        full |= {HEADS[name]: mixer[HEADS[name]] for name in HEADS} | _read_overrides(config, overrides, types)
    mixers = {FULL: full, SLIDING: mixer}
    used = set(types)
    return {
        kind: fields | {"position": _read_rope(config, kind, fields["head_dim"])}
        for kind, fields in mixers.items()
        if kind in used
    }


def _read_overrides(config: ConfigReader, overrides: Any, types: _layer_types.LayerTypes) -> dict[str, Any]:
    """The heads of full layers. Raises ConfigError unless they are the same in all of these and only there."""
    full = {str(index) for index, kind in enumerate(types) if kind == FULL}
    by_layer: dict[str, Any] = overrides if isinstance(overrides, dict) else {"": None}
    tables = list(by_layer.values())
    layers = {str(index).lstrip("0") or "0" for index in by_layer}  # some files write 05
    fits = layers in (full, set()) and all(table == tables[0] for table in tables)
    if not fits or any(not isinstance(table, dict) or table.keys() - HEADS.keys() for table in tables):
        fields = " and ".join(HEADS)
        raise config.invalid("per_layer_config", f"heddle builds one {fields} for all layers of type {FULL}")
    return {HEADS[name]: value for table in tables[:1] for name, value in table.items()}


def _read_rope(config: ConfigReader, kind: str, head_dim: int) -> dict[str, Any]:
    """The RoPE of a type of layers."""
    table = config.get("rope_parameters", ROPES).get(kind)
    if not isinstance(table, dict):
        raise config.invalid("rope_parameters", f"it should have a table for {FULL} and one for {SLIDING}")
    if table.get("rope_type") != "proportional":
        return read_rope_table(config, table, head_dim, ROPES[kind]["rope_theta"])
    parameters = ConfigReader(table, f"{config.source}, rope_parameters")
    parameters.unread.discard("rope_type")
    share, factor = parameters.get("partial_rotary_factor", 1.0), parameters.get("factor", 1.0)
    scaling = {"kind": "proportional", "rotated_share": share, "factor": factor}
    rope = {"kind": "rope", "base": parameters.require("rope_theta", float), "scaling": scaling}
    parameters.check_all_read()
    return rope


def write_gemma4(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_gemma4` reads; the heads of full layers in both the older and the newer form."""
    types = design_parts.layer_types(design)
    mixers = dict(zip(reversed(types), reversed(_attentions(design)), strict=False))
    sliding = mixers.get(SLIDING) or design_parts.first_attention(design)
    full = mixers.get(FULL, sliding)
    shared = sum(mixer.shared_kv for mixer in _attentions(design))
    feedforwards = [getattr(layer.feedforward, "hidden", 0) for layer in design_parts.layers(design)]
    per_layer = design.embedding.per_layer
    heads = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
    return _common.write_common(design) | {
        **_common.write_gated(design, ACTIVATION),
        "num_attention_heads": sliding.heads,
        "num_key_value_heads": sliding.kv_heads,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "per_layer_config": {str(index): heads for index, kind in enumerate(types) if kind == FULL},
        "attention_k_eq_v": any(mixer.k_eq_v for mixer in _attentions(design)),
        "attention_bias": sliding.bias is True,
        "attention_dropout": sliding.dropout,
        "sliding_window": design_parts.first_window(design) or 512,
        "layer_types": types,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": bool(shared) and feedforwards[-1] == 2 * feedforwards[0],
        "rope_parameters": {FULL: _write_rope(full), SLIDING: _write_rope(sliding)},
        "hidden_size_per_layer_input": 0 if per_layer is None else per_layer.dim,
        "vocab_size_per_layer_input": design.vocab_size,
        "enable_moe_block": False,
        "final_logit_softcapping": design.head.softcap,
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def _attentions(design: ModelConfig) -> list[AttentionConfig]:
    mixers = (layer.mixer for layer in design_parts.layers(design))
    return [mixer for mixer in mixers if isinstance(mixer, AttentionConfig)]


def _write_rope(mixer: AttentionConfig) -> dict[str, Any]:
    rope = design_parts.rope_of(mixer)
    if not isinstance(rope.scaling, ProportionalConfig):
        return write_rope_table(RopeConfig(base=rope.base), mixer.head_dim or 1)
    scaling = {"partial_rotary_factor": rope.scaling.rotated_share, "factor": rope.scaling.factor}
    return {"rope_type": "proportional", "rope_theta": rope.base, **scaling}


def map_gemma4(design: ModelConfig, weights: WeightMap) -> None:
    """Gemma 2's tensor names, and the names of per-layer embeddings and scalars."""
    map_weights(design, weights)
    weights.add_module("model.embed_tokens_per_layer", "embed.per_layer")
    weights.add_module("model.per_layer_model_projection", "embed.per_layer.projection")
    weights.add_module("model.per_layer_projection_norm", "embed.per_layer.norm")
    for hf, heddle, _ in _common.named_layers(design):
        weights.add_module(f"{hf}.per_layer_input_gate", f"{heddle}.per_layer.gate")
        weights.add_module(f"{hf}.per_layer_projection", f"{heddle}.per_layer.out")
        weights.add_module(f"{hf}.post_per_layer_input_norm", f"{heddle}.per_layer.norm")
        weights.add_tensor(f"{hf}.layer_scalar", f"{heddle}.scalar.weight")


GEMMA4 = Family(
    "gemma4_text", "Gemma4ForCausalLM", read_gemma4, write_gemma4, map_gemma4, priority=8,
    # of layers that read the keys and values of others, in published files
    ignored_tensors=tuple(f"model.layers.*.self_attn.{name}" for name in ("k_proj", "v_proj", "k_norm")),
)  # fmt: skip


ABSENT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")


def read_unified(config: ConfigReader) -> dict[str, Any]:
    """The text model of Gemma 4's variant without encoders of images and sound; it has no per-layer embeddings."""
    config.expect("hidden_size_per_layer_input", 0, None)
    return read_gemma4(config, window=1024, per_layer=0)


def write_unified(design: ModelConfig) -> dict[str, Any]:
    return _common.without(write_gemma4(design), *ABSENT)


GEMMA4_UNIFIED = Family(
    "gemma4_unified_text", "Gemma4UnifiedForCausalLM", read_unified, write_unified, map_gemma4,
    ignored_tensors=GEMMA4.ignored_tensors,
)  # fmt: skip


# Gemma 3n.
SHARED_LAYERS, SPARSITY = 15, 0.95  # if the fields are absent
ALTUP = {"altup_projections": "expansion.projections", "altup_unembed_projections": "final_norm.projections"}
OF_3N_LAYERS = {
    "laurel.linear_left": "residual.laurel.down", "laurel.linear_right": "residual.laurel.up",
    "laurel.post_laurel_norm": "residual.laurel.norm", "altup.router_norm": "residual.altup.norm",
    "altup.modality_router": "residual.altup.router", "altup.prediction_coefs": "residual.altup.prediction",
    "altup.correction_coefs": "residual.altup.correction",
}  # fmt: skip


def read_gemma3n(config: ConfigReader) -> dict[str, Any]:
    """Gemma 3n's text model (Gemma Team 2025): Gemma 3 with an embedding for each layer, AltUp and LAuReL.

    Values are normalized and scores unscaled; the last layers read keys and values of earlier ones, and the first
    layers' feed-forwards are sparse.
    """
    config.expect("altup_active_idx", 0)
    config.expect("altup_correct_scale", True)
    # Bounds of AltUp's weights and their learning rate, in training alone; and a field that transformers ignores.
    config.unread -= {"altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"}
    _common.check_width(config)
    types = _layer_types.read_types(config, _layer_types.full_every(5, config))
    windows = _layer_types.layer_windows(config, types, config.get("sliding_window", 512))
    mixer = _attention(config, kv_heads=2)
    thetas = config.get("rope_theta", 1e6), config.get("rope_local_base_freq", 1e4)
    ropes = read_ropes_by_layer_type(config, mixer["head_dim"], *thetas)
    own = len(types) - config.get("num_kv_shared_layers", SHARED_LAYERS)
    mixers = [
        mixer
        | {"window": window, "position": ropes[kind]}
        | ({} if index < own else {"shared_kv": True, "value_norm": False})
        for index, (kind, window) in enumerate(zip(types, windows, strict=True))
    ]
    sparse = 10 if len(types) > 10 else 0
    widths = _of_each_layer(config, "intermediate_size", [16384] * len(types))
    shares = _of_each_layer(config, "activation_sparsity_pattern", [SPARSITY] * sparse + [0.0] * (len(types) - sparse))
    activation = _common.read_activation(config, ACTIVATION, GELU_TANH)
    feedforwards = [
        {"kind": "gated", "hidden": hidden, "activation": activation, "sparsity": share or None}
        for hidden, share in zip(widths, shares, strict=True)
    ]
    rows, dim = config.get("vocab_size_per_layer_input", 262144), config.get("hidden_size_per_layer_input", 256)
    residual = {
        "kind": "sandwich",
        "laurel_rank": config.get("laurel_rank", 64),
        "altup_streams": config.get("altup_num_inputs", 4),
    }
    return _common.rms_design(
        config,
        1e-6,
        _layer_types.layers_of(mixers, feedforwards),
        cast="after",
        embedding={"scale": True, "per_layer": {"dim": dim, "activation": activation, "vocab_size": rows}},
        residual=residual,
        head={
            "tied": config.get("tie_word_embeddings", True),
            "softcap": config.get_nullable("final_logit_softcapping", 30.0),
        },
    )


def _of_each_layer(config: ConfigReader, name: str, default: list[Any]) -> list[Any]:
    """A field that is one number, or a list with one for each layer. Raises ConfigError for another length."""
    value = config.data.get(name)
    config.unread.discard(name)
    values = default if value is None else value if isinstance(value, list) else [value] * len(default)
    if len(values) != len(default):
        raise config.invalid(name, f"num_hidden_layers needs {len(default)} entries")
    return values


def write_gemma3n(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_gemma3n` reads."""
    mixer, per_layer = design_parts.first_attention(design), design.embedding.per_layer
    full, sliding = _layer_types.ropes_by_layer_type(design)
    feedforwards = [layer.feedforward for layer in design_parts.layers(design)]
    residual = design.residual
    return _common.write_common(design) | {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_bias": mixer.bias is True,
        "attention_dropout": mixer.dropout,
        ACTIVATION: _common.write_gated(design, ACTIVATION)[ACTIVATION],
        "intermediate_size": [getattr(each, "hidden", 1) for each in feedforwards],
        "activation_sparsity_pattern": [getattr(each, "sparsity", None) or 0.0 for each in feedforwards],
        **_layer_types.write_windows(design, 512),
        **write_ropes_by_layer_type(full, sliding, mixer.head_dim or design.width),
        "rope_local_base_freq": sliding.base,
        "num_kv_shared_layers": sum(each.shared_kv for each in _attentions(design)),
        "hidden_size_per_layer_input": 1 if per_layer is None else per_layer.dim,
        "vocab_size_per_layer_input": design.vocab_size if per_layer is None else per_layer.vocab_size,
        "laurel_rank": getattr(residual, "laurel_rank", None) or 1,
        "altup_num_inputs": getattr(residual, "altup_streams", None) or 2,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "final_logit_softcapping": design.head.softcap,
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def map_gemma3n(design: ModelConfig, weights: WeightMap) -> None:
    """Gemma 4's tensor names, and the names of AltUp and LAuReL."""
    map_gemma4(design, weights)
    for index in range((getattr(design.residual, "altup_streams", None) or 1) - 1):
        for hf, heddle in ALTUP.items():
            weights.add_module(f"model.{hf}.{index}", f"{heddle}.{index}")
    for hf, heddle, _ in _common.named_layers(design):
        weights.add_modules(hf, heddle, OF_3N_LAYERS)
        weights.add_tensor(f"{hf}.altup.correct_output_scale", f"{heddle}.residual.altup.embedding_scale")


GEMMA3N = Family(
    "gemma3n_text", "Gemma3nForCausalLM", read_gemma3n, write_gemma3n, map_gemma3n,
    ignored_tensors=GEMMA4.ignored_tensors,
)  # fmt: skip


# RecurrentGemma.
RECURRENT, ATTENTION = "recurrent", "attention"
OF_GRIFFIN = {"temporal_pre_norm": "residual.norms.mixer", "channel_pre_norm": "residual.norms.feedforward"}
OF_RECURRENCE = {
    "linear_x": "v", "linear_y": "gate", "linear_out": "out", "conv_1d.bias": "convolution.bias",
    "rg_lru.recurrent_param": "rate",
}  # fmt: skip
OF_ATTENTION = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}
GATES = {"input_gate": "input_gate", "recurrent_gate": "decay_gate"}


def read_recurrent_gemma(config: ConfigReader) -> dict[str, Any]:
    """RecurrentGemma (Griffin Team 2024): an RG-LRU in two of three layers, attention with a window in the third.

    The factor of embeddings is rounded to bfloat16, as in transformers. `intermediate_size` counts both halves.
    """
    # Of the first weights, and of older versions.
    config.unread -= {"w_init_variance_scale", "final_w_init_variance_scale", "embeddings_scale_by_sqrt_dim"}
    heads, bias = _common.read_heads(config), config.get("attention_bias", False) or "out"
    rope = read_rope(config, heads["head_dim"], partial_rotary_factor=0.5)
    if "scaling" in rope:
        raise config.invalid("rope_parameters", "models of this family have no scaling of RoPE; leave it out")
    window, width = config.get("attention_window_size", 2048), config.require_count("hidden_size")
    attention = _common.attention(config, heads, rope, bias=bias, window=window)
    gated = _common.read_gated(config, ACTIVATION, GELU_TANH, bias=True)
    recurrence = {"kind": "rg_lru", "heads": heads["heads"], "hidden": config.get("lru_width", width)}
    recurrence |= {"conv_kernel": config.get("conv1d_width", 4), "activation": gated["activation"]}
    types = config.get("block_types", [RECURRENT, RECURRENT, ATTENTION], "_block_types")
    if not types or any(kind not in (RECURRENT, ATTENTION) for kind in types):
        raise config.invalid("block_types", f"should say {RECURRENT} or {ATTENTION} of each layer of a period")
    mixers = [
        recurrence if types[index % len(types)] == RECURRENT else attention
        for index in range(_layer_types.read_depth(config))
    ]
    return _common.design_fields(
        config,
        read_norm(config),
        _layer_types.layers_of(mixers, gated | {"hidden": gated["hidden"] // 2}),
        embedding={"multiplier": rounded_to_dtypes(math.sqrt(width))[torch.bfloat16]},
        head={"tied": config.get("tie_word_embeddings", True), "softcap": config.get("logits_soft_cap", 30.0)},
    )


def write_recurrent_gemma(design: ModelConfig) -> dict[str, Any]:
    mixer, gated = design_parts.first_attention(design), design_parts.first_gated(design)
    recurrence = design_parts.first_mixer(design, RGLRUConfig(heads=mixer.heads, hidden=design.width))
    types = [ATTENTION, RECURRENT]
    types = [types[isinstance(layer.mixer, RGLRUConfig)] for layer in design_parts.layers(design)]
    periods = range(1, len(types))
    period = next((n for n in periods if types[n:] == types[:-n]), len(types))
    return {
        **_common.without(_common.write_common(design), "max_position_embeddings"),
        **_common.write_attention(design, partial_rotary_factor=0.5),
        **_common.write_gated(design, ACTIVATION),
        "num_attention_heads": recurrence.heads,
        "attention_bias": mixer.bias is True,
        "intermediate_size": 2 * gated.hidden,
        "lru_width": recurrence.hidden,
        "conv1d_width": recurrence.conv_kernel,
        "attention_window_size": mixer.window or 2048,
        "block_types": types[:period],
        "logits_soft_cap": design.head.softcap or 30.0,
        "rms_norm_eps": design_parts.norm_eps(design),
    }


def map_recurrent_gemma(design: ModelConfig, weights: WeightMap) -> None:
    """Names of its own; the gates' blocks are [inputs, outputs]."""
    _common.map_embedding_and_head(design, weights, norm="model.final_norm")
    for hf, heddle, layer in _common.named_layers(design):
        weights.add_modules(hf, heddle, OF_GRIFFIN)
        _common.map_gated(weights, f"{hf}.mlp_block", f"{heddle}.feedforward")
        unit, mixer = f"{hf}.temporal_block", f"{heddle}.mixer"
        if not isinstance(layer.mixer, RGLRUConfig):
            weights.add_modules(unit, mixer, OF_ATTENTION)
            continue
        weights.add_modules(unit, mixer, OF_RECURRENCE)
        weights.add_tensor(f"{unit}.conv_1d.weight", f"{mixer}.convolution.weight", transform=DEPTHWISE_CONV)
        for name, gate in GATES.items():
            hf_gate, blocks = f"{unit}.rg_lru.{name}", reshaped(layer.mixer.heads, -1)
            weights.add_tensor(f"{hf_gate}_weight", f"{mixer}.{gate}.weight", transform=STACKED_TRANSPOSED)
            weights.add_tensor(f"{hf_gate}_bias", f"{mixer}.{gate}.bias", transform=blocks)


RECURRENT_GEMMA = Family(
    "recurrent_gemma", "RecurrentGemmaForCausalLM", read_recurrent_gemma, write_recurrent_gemma, map_recurrent_gemma
)
