"""Mellum 2 (JetBrains 2026): Qwen3-MoE with windows in some layers, a RoPE for each type, and a list of dense layers.

The layer that predicts further tokens (`mtp`) is ignored; it does not change the next token's logits.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, _layer_types, _moe
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, ORIGINAL_LENGTH, SLIDING, read_ropes_by_layer_type, write_rope_table
from heddle.model.config import ModelConfig

DENSE, SPARSE = _deepseek.DENSE, _deepseek.SPARSE
DEFAULT_WINDOW = 1024
FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layer_types` says which layers have a window, `mlp_layer_types` which are dense."""
    config.note("use_sliding_window", "max_window_layers")  # of Qwen's files; its class goes by layer_types
    for name in FURTHER_TOKENS:
        config.optional(name)
    config.expect("rope_scaling", None)
    bias = config.get("attention_bias", False)
    heads = _common.read_heads(config, config.require("hidden_size", int), head_dim=128)
    mixer = {"kind": "attention", **heads, "qk_norm": "head", "bias": bias}
    mixer["dropout"] = config.get("attention_dropout", 0.0)
    ropes = read_ropes_by_layer_type(config, heads["head_dim"], 5e5, 1e4)
    depth = _layer_types.read_depth(config)
    types = _layer_types.read_types(config, [FULL] * depth)
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", DEFAULT_WINDOW))
    kinds = _layer_types.read_kinds(config, "mlp_layer_types", [SPARSE] * depth, (DENSE, SPARSE))
    experts = _moe.read_experts(config, kinds.count(SPARSE), "moe_intermediate_size")
    experts["renormalize"] = config.get("norm_topk_prob", True)
    feedforwards = {DENSE: _common.read_gated(config), SPARSE: experts}
    layers = [
        {"mixer": mixer | {"window": window, "position": ropes[kind]}, "feedforward": feedforwards[feedforward]}
        for kind, window, feedforward in zip(types, windows, kinds, strict=True)
    ]
    return _common.rms_design(config, 1e-6, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, ropes = design_parts.first_attention(design), _layer_types.ropes_by_layer_type(design)
    fields = _common.write_common(design) | _common.write_attention(design) | _moe.write_feedforwards(design)
    for name in ("rope_theta", "rope_scaling", ORIGINAL_LENGTH, "decoder_sparse_step", "mlp_only_layers"):
        fields.pop(name, None)
    tables = [write_rope_table(rope, mixer.head_dim or design.width) for rope in ropes]
    return fields | {
        "attention_bias": mixer.bias is True,
        "rope_parameters": dict(zip((FULL, SLIDING), tables, strict=True)),
        "layer_types": design_parts.layer_types(design),
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
        "mlp_layer_types": [SPARSE if is_sparse else DENSE for is_sparse in design_parts.has_experts(design)],
        "rms_norm_eps": design_parts.norm_eps(design),
    }


FAMILY = Family("mellum", "MellumForCausalLM", read_config, write_config, _moe.map_weights, ignored_tensors=("mtp.",))
