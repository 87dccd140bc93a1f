"""ModernBERT and its decoder: RoPE, GeGLU and pre-norm; two of three layers have a window."""

from dataclasses import replace
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_ropes_by_layer_type, write_ropes_by_layer_type
from heddle.model.config import HeadConfig, ModelConfig
from heddle.parts.norms.layer import LayerNormConfig

BASE = "ModernBertModel"  # without a language head
FULL_THETA, LOCAL_THETA, LOCAL_ATTENTION = 160000.0, 10000.0, 128
NORM_EPS = ("norm_eps", "layer_norm_eps")  # the second is written beside the first by some programs
# Fields that no logits depend on: of classifiers, of a kernel, of first weights and of training.
UNUSED_FIELDS = (
    "classifier_dropout", "classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor",
    "sparse_prediction", "sparse_pred_ignore_index", "reference_compile", "repad_logits_with_grad", "cls_token_id",
)  # fmt: skip


def read_modernbert(config: ConfigReader, base: str = BASE, causal: bool = False) -> dict[str, Any]:
    """ModernBERT (Warner et al. 2024): an encoder with RoPE, GeGLU and pre-norm; every third layer sees the whole text.

    Layers with a window see `local_attention` // 2 tokens to each side and have a RoPE of their own. The embedding has
    a norm, so the first layer's attention has none. `classifier_pooling` and `sparse_prediction` only affect
    classifiers and training.
    """
    # Both formats: `layer_types` or `global_attn_every_n_layers`; `rope_parameters` by type, or two thetas.
    _common.check_width(config)
    config.ignore(*UNUSED_FIELDS)
    config.expect("position_embedding_type", "absolute", None)  # no class reads it
    config.expect("rope_scaling", None)  # of all layers; newer files have a table for each type
    layer = {"mixer": _read_mixer(config) | {"causal": causal}, "feedforward": _read_feedforward(config)}
    mixers = [layer["mixer"] | own for own in _read_layers(config)]
    head = {
        "tied": config.get("tie_word_embeddings", True),
        "bias": config.get("decoder_bias", True),
        "transform": _common.read_activation(config, "classifier_activation", "gelu"),
        "transform_bias": config.get("classifier_bias", False),
    }
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get(NORM_EPS[0], 1e-5, NORM_EPS[1]), "bias": config.get("norm_bias", False)},
        _layer_types.merge_repeats([layer | {"mixer": mixer} for mixer in mixers]),
        embedding={"norm": True, "dropout": config.get("embedding_dropout", 0.0)},
        residual={"kind": "pre_norm", "first_norm": False},
        head={"tied": True} if _common.is_base_class(config, base) else head,
    )


def _read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The fields of attention that all layers share."""
    return {
        "kind": "attention",
        "heads": config.require_count("num_attention_heads"),
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }


def _read_feedforward(config: ConfigReader) -> dict[str, Any]:
    bias, dropout = config.get("mlp_bias", False), config.get("mlp_dropout", 0.0)
    return _common.read_gated(config, "hidden_activation", "gelu", bias=bias, dropout=dropout)


def _read_layers(config: ConfigReader) -> list[dict[str, Any]]:
    """The window and the RoPE of each layer."""
    period = config.get("global_attn_every_n_layers", 3)
    if period < 1:
        raise config.invalid("global_attn_every_n_layers", "should be at least 1, which gives no layer a window")
    depth = _layer_types.read_depth(config)
    types = _layer_types.read_types(config, [SLIDING if index % period else FULL for index in range(depth)])
    local = config.get("local_attention", LOCAL_ATTENTION)
    if local < 2:
        raise config.invalid("local_attention", "should be at least 2, one token to each side")
    thetas = config.get("global_rope_theta", FULL_THETA), config.get("local_rope_theta", LOCAL_THETA)
    head_dim = config.require_count("hidden_size") // config.require_count("num_attention_heads")
    ropes = read_ropes_by_layer_type(config, head_dim, *thetas)
    window = config.get("sliding_window", local // 2)  # the decoder's files have it, and it counts
    return [{"window": window if kind == SLIDING else None, "position": ropes[kind]} for kind in types]


def write_modernbert(design: ModelConfig, base: str = BASE) -> dict[str, Any]:
    """The fields that `read_modernbert` reads; of RoPE, the older fields too."""
    mixer, gated = design_parts.first_attention(design), design_parts.first_gated(design)
    full, sliding = _layer_types.ropes_by_layer_type(design)
    window = design_parts.first_window(design)
    ropes = write_ropes_by_layer_type(full, sliding, mixer.head_dim or design.width)
    return (
        _common.write_common(design)
        | _common.without(ropes, "rope_theta", "rope_scaling")
        | _common.base_class(design, base)
        | {
            "global_rope_theta": full.base,
            "local_rope_theta": sliding.base,
            "layer_types": design_parts.layer_types(design),
            "local_attention": LOCAL_ATTENTION if window is None else 2 * window,
            "num_attention_heads": mixer.heads,
            "attention_bias": design_parts.first_attention(design).bias is True,
            "attention_dropout": mixer.dropout,
            **_common.written(design, "embedding_dropout", "mlp_bias"),
            "mlp_dropout": gated.dropout,
            **_common.write_gated(design, "hidden_activation"),
            "norm_eps": design_parts.norm_eps(design),
            "norm_bias": isinstance(design.norm, LayerNormConfig) and design.norm.bias,
            "decoder_bias": design.head.bias,
            "classifier_bias": design.head.transform_bias,
            "classifier_activation": design_parts.HF_ACTIVATIONS[design.head.transform or "gelu"],
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap, head: str = "head") -> None:
    """Queries, keys and values are one matrix, three in the decoder; gate and up are one. head: of its first step."""
    model = "" if design.head == HeadConfig() else "model."
    weights.add_module(f"{model}embeddings.tok_embeddings", "embed")
    weights.add_module(f"{model}embeddings.norm", "embed.norm")
    weights.add_module(f"{model}final_norm", "final_norm.norm")
    for index in range(design.depth):
        hf, heddle = f"{model}layers.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.attn_norm", f"{heddle}.residual.norms.mixer")
        weights.add_module(f"{hf}.mlp_norm", f"{heddle}.residual.norms.feedforward")
        if design_parts.first_attention(design).causal:
            weights.add_modules(hf, heddle, {f"attn.{role}_proj": f"mixer.{role}" for role in "qkv"})
        else:
            weights.add_module(f"{hf}.attn.Wqkv", *(f"{heddle}.mixer.{role}" for role in "qkv"))
        weights.add_module(f"{hf}.attn.Wo", f"{heddle}.mixer.out")
        weights.add_module(f"{hf}.mlp.Wi", *(f"{heddle}.feedforward.{role}" for role in ("gate", "up")))
        weights.add_module(f"{hf}.mlp.Wo", f"{heddle}.feedforward.down")
    weights.add_modules(head, "head.transform", {"dense": "dense", "norm": "norm"})
    if design.head.tied:
        weights.add_tensor("decoder.bias", "head.bias")
    else:
        weights.add_module("decoder", "head")


MODERNBERT = Family("modernbert", "ModernBertForMaskedLM", read_modernbert, write_modernbert, map_weights)


DECODER_BASE = "ModernBertDecoderModel"


def read_decoder(config: ConfigReader) -> dict[str, Any]:
    """ModernBERT's decoder (Ettin, Weller et al. 2025): causal, with windows of `local_attention` // 2 tokens."""
    return read_modernbert(config, DECODER_BASE, causal=True)


def write_decoder(design: ModelConfig) -> dict[str, Any]:
    fields = write_modernbert(design, DECODER_BASE)
    # Its class takes no null for ids, and its own lie beyond a small vocabulary.
    return fields | {"sliding_window": fields["local_attention"] // 2, "bos_token_id": 0, "pad_token_id": 0}


DECODER = replace(
    MODERNBERT,
    model_type="modernbert-decoder",
    architecture="ModernBertDecoderForCausalLM",
    read_config=read_decoder,
    write_config=write_decoder,
    map_weights=partial(map_weights, head="lm_head"),
)
