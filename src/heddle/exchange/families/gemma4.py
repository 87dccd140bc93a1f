"""Gemma 4's text models: Gemma 3 with normalized values, unscaled scores and, in most, an embedding for each layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, gemma
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_rope_table, write_rope_table
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.scalings.proportional import ProportionalConfig

ACTIVATION, DEFAULT_ACTIVATION = "hidden_activation", "gelu_pytorch_tanh"
ROPES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
OF_EXPERTS = frozenset({"num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size"})
HEADS = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}


def read_gemma4(config: ConfigReader, window: int = 512, per_layer: int = 256) -> dict[str, Any]:
    """Gemma 4 (Gemma Team 2026), without experts: Gemma 3 with normalized values and unscaled scores.

    Full layers have wider heads, whose values may be the keys, and proportional RoPE. The last layers may read keys and
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
    feedforward = _common.read_gated(config, ACTIVATION, DEFAULT_ACTIVATION)
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
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "cast": "after"},
        _layer_types.merge_repeats(layers),
        embedding=embedding,
        residual={"kind": "sandwich", "layer_scalar": True},
        head={
            "tied": config.get("tie_word_embeddings", True),
            "softcap": config.get_nullable("final_logit_softcapping", None),
        },
    )


def _read_mixers(config: ConfigReader, types: _layer_types.LayerTypes) -> dict[str, dict[str, Any]]:
    """The attention of full and of sliding layers, without their windows."""
    heads, k_eq_v = config.require_count("num_attention_heads"), config.get("attention_k_eq_v", False)
    mixer: dict[str, Any] = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", 4),
        "head_dim": config.get("head_dim", 256),
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "scale": 1.0,
        "qk_norm": "head",
        "value_norm": True,
    }
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
    """The fields that `read_gemma4` reads; the heads of full layers as older and as newer files write them."""
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
    """Gemma 2's tensor names, and those of per-layer embeddings and scalars."""
    gemma.map_weights(design, weights)
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
    return {name: value for name, value in write_gemma4(design).items() if name not in ABSENT}


GEMMA4_UNIFIED = Family(
    "gemma4_unified_text", "Gemma4UnifiedForCausalLM", read_unified, write_unified, map_gemma4,
    ignored_tensors=GEMMA4.ignored_tensors,
)  # fmt: skip
