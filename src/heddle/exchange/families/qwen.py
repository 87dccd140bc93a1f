"""Qwen2 and Qwen3, dense and with experts; Mellum 2 and Flint, which follow Qwen3's mixtures, and Laguna."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, deepseek
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import (
    FULL,
    ORIGINAL_LENGTH,
    SLIDING,
    read_rope,
    read_rope_table,
    read_ropes_by_layer_type,
    write_rope_table,
)
from heddle.model.config import ModelConfig

WINDOW = 4096  # if the field is absent


def read_window(config: ConfigReader) -> int | None:
    """The window, if `use_sliding_window` is on."""
    window: int | None = config.get_nullable("sliding_window", WINDOW)
    return window if config.get("use_sliding_window", False) else None


def read_qwen_design(config: ConfigReader, mixer: dict[str, Any]) -> dict[str, Any]:
    """A design whose layers have this mixer, each with its window.

    Without `layer_types`, `use_sliding_window` gives a window to the layers from `max_window_layers` on.
    """
    window, first = read_window(config), config.get("max_window_layers", 28)
    types = [FULL if window is None or index < first else SLIDING for index in range(_layer_types.read_depth(config))]
    layer = {"mixer": mixer, "feedforward": _common.read_gated(config)}
    return _common.rms_design(config, 1e-6, _layer_types.windowed_layers(config, types, window, layer))


def write_qwen2(design: ModelConfig) -> dict[str, Any]:
    """`max_window_layers` is for older readers, which do not know `layer_types`."""
    types = design_parts.layer_types(design)
    fields = _common.write_unbiased_decoder(design, "use_sliding_window", "sliding_window", "layer_types")
    return fields | {"max_window_layers": types.index(SLIDING) if SLIDING in types else design.depth}


def read_qwen2(config: ConfigReader) -> dict[str, Any]:
    """Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases of q, k and v, windows in its later layers."""
    return read_qwen_design(config, _common.read_attention(config, bias="qkv"))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", read_qwen2, write_qwen2, _common.map_weights, priority=2)


def read_qwen3(config: ConfigReader) -> dict[str, Any]:
    """Qwen3 (Yang et al. 2025): Qwen2's decoder with a norm of each head of q and k, and without biases by default."""
    # `attention_bias` gives biases to all four projections.
    bias = config.get("attention_bias", False)
    return read_qwen_design(config, _common.read_attention(config, head_dim=128, qk_norm="head", bias=bias))


def write_qwen3(design: ModelConfig) -> dict[str, Any]:
    return write_qwen2(design) | _common.written(design, "attention_bias")


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", read_qwen3, write_qwen3, _common.map_weights, priority=3)


def read_qwen2_moe(config: ConfigReader) -> dict[str, Any]:
    """Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2's attention, routed experts and a gated shared one.

    With `use_sliding_window`, every second one of the first `max_window_layers` layers has a window.
    """
    # Biases of q, k and v, unless `qkv_bias` is false. `layer_types` says which layers have a window.
    mixer = _common.read_attention(config, bias="qkv" if config.get("qkv_bias", True) else False)
    feedforwards = _moe.read_feedforwards(config, read_shared(config), renormalize=False)
    window, last = read_window(config), config.get("max_window_layers", 28)
    usual = _default_types(0 if window is None else last, _layer_types.read_depth(config))
    windows = _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)
    layers = _layer_types.layers_of([mixer | {"window": width} for width in windows], feedforwards)
    return _common.rms_design(config, 1e-6, layers)


def read_shared(config: ConfigReader) -> dict[str, Any]:
    """The shared expert and its gate."""
    hidden = config.require("shared_expert_intermediate_size", int)
    return {"shared": 1, "shared_hidden": hidden, "shared_gate": True}


def write_shared(design: ModelConfig) -> dict[str, Any]:
    """The field that `read_shared` reads."""
    moe = design_parts.first_moe(design)
    return {"shared_expert_intermediate_size": moe.shared_hidden or moe.hidden}


def _default_types(last: int, depth: int) -> list[str]:
    """The type of each layer if every second one of the first `last` has a window."""
    return [SLIDING if index < last and index % 2 == 0 else FULL for index in range(depth)]


def write_qwen2_moe(design: ModelConfig) -> dict[str, Any]:
    """`max_window_layers` is for readers that do not know `layer_types`."""
    types = design_parts.layer_types(design)
    last = max((index for index, kind in enumerate(types) if kind == SLIDING), default=0) + 2
    usual = SLIDING in types and types == _default_types(last, design.depth)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _moe.write_feedforwards(design)
        | write_shared(design)
        | _common.written(design, "use_sliding_window", "sliding_window", "layer_types", "rms_norm_eps")
        | {"qkv_bias": design_parts.first_attention(design).bias == "qkv"}
        | ({"max_window_layers": last} if usual else {})
    )


def map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """Experts, the shared expert and its gate, or a dense feed-forward."""
    _moe.map_feedforward(weights, hf, heddle)
    weights.add_module(f"{hf}.shared_expert_gate", f"{heddle}.shared_gate")


map_qwen2_moe = partial(_common.map_weights, map_feedforward=map_experts)
QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe, write_qwen2_moe, map_qwen2_moe)


def read_qwen3_moe(config: ConfigReader) -> dict[str, Any]:
    """Qwen3-MoE (Qwen 2025): Qwen3's attention, with a norm of each head's q and k; MoE layers and dense layers."""
    config.require("num_key_value_heads", int)
    config.optional("max_window_layers")  # transformers ignores it
    config.expect("use_qk_norm", True, default=True)
    window, bias = read_window(config), config.get("attention_bias", False)
    mixer = _common.read_attention(config, qk_norm="head", bias=bias, window=window)
    feedforwards = _moe.read_feedforwards(config, {}, renormalize=False)
    return _common.rms_design(config, 1e-6, _layer_types.layers_of([mixer] * len(feedforwards), feedforwards))


def write_qwen3_moe(design: ModelConfig) -> dict[str, Any]:
    window = design_parts.first_attention(design).window
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _moe.write_feedforwards(design)
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | {"use_sliding_window": window is not None, "sliding_window": window}
    )


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, _moe.map_weights)


DENSE, SPARSE = deepseek.DENSE, deepseek.SPARSE
MELLUM_WINDOW = 1024
FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def read_mellum(config: ConfigReader) -> dict[str, Any]:
    """Mellum 2 (JetBrains 2026): Qwen3-MoE with windows in some layers, a RoPE for each type, a list of dense layers.

    The layer that predicts further tokens (`mtp`) is ignored; it does not change the next token's logits.
    """
    config.note("use_sliding_window", "max_window_layers")  # of Qwen's files; its class goes by layer_types
    config.ignore(*FURTHER_TOKENS)
    config.expect("rope_scaling", None)
    heads, bias = _common.read_heads(config, head_dim=128), config.get("attention_bias", False)
    mixer = _common.attention(config, heads, qk_norm="head", bias=bias)
    ropes = read_ropes_by_layer_type(config, heads["head_dim"], 5e5, 1e4)
    depth = _layer_types.read_depth(config)
    types = _layer_types.read_types(config, [FULL] * depth)
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", MELLUM_WINDOW))
    kinds = _layer_types.read_kinds(config, "mlp_layer_types", [SPARSE] * depth, (DENSE, SPARSE))
    experts = _moe.read_experts(config, kinds.count(SPARSE), "moe_intermediate_size")
    experts["renormalize"] = config.get("norm_topk_prob", True)
    feedforwards = {DENSE: _common.read_gated(config), SPARSE: experts}
    mixers = [mixer | {"window": width, "position": ropes[kind]} for kind, width in zip(types, windows, strict=True)]
    return _common.rms_design(config, 1e-6, _layer_types.layers_of(mixers, [feedforwards[kind] for kind in kinds]))


def write_mellum(design: ModelConfig) -> dict[str, Any]:
    head_dim, ropes = design_parts.first_attention(design).head_dim, _layer_types.ropes_by_layer_type(design)
    fields = _common.write_common(design) | _common.write_attention(design) | _moe.write_feedforwards(design)
    for name in ("rope_theta", "rope_scaling", ORIGINAL_LENGTH, "decoder_sparse_step", "mlp_only_layers"):
        fields.pop(name, None)
    tables = [write_rope_table(rope, head_dim or design.width) for rope in ropes]
    return (
        fields
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | _layer_types.write_windows(design, MELLUM_WINDOW)
        | {"rope_parameters": dict(zip((FULL, SLIDING), tables, strict=True))}
        | {"mlp_layer_types": [SPARSE if is_sparse else DENSE for is_sparse in design_parts.has_experts(design)]}
    )


MELLUM = Family("mellum", "MellumForCausalLM", read_mellum, write_mellum, _moe.map_weights, ignored_tensors=("mtp.",))


FLINT_WINDOW = 513


def read_flint(config: ConfigReader) -> dict[str, Any]:
    """Flint (2026): Qwen3-MoE with sinks, RoPE in windowed layers alone, sigmoid experts and a shared one.

    Full attention is in the first two layers, in every fourth and in the last.
    """
    heads, depth = _common.read_heads(config, head_dim=128), _layer_types.read_depth(config)
    bias = config.get("attention_bias", False)
    mixer = _common.attention(config, heads, qk_norm="head", bias=bias, sink=True)
    usual = [FULL if index < 2 or index % 4 == 1 or index == depth - 1 else SLIDING for index in range(depth)]
    rope, windows = read_rope(config, heads["head_dim"]), _layer_types.read_windows(config, usual, FLINT_WINDOW)
    mixers = [mixer | {"window": width, "position": None if width is None else rope} for width in windows]
    routing = {"routing": "sigmoid", **read_shared(config), "shared_gate": False}
    feedforwards = _moe.read_feedforwards(config, routing, renormalize=True, dense=[0, 1], default_loss=0.0005)
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.layers_of(mixers, feedforwards))


def write_flint(design: ModelConfig) -> dict[str, Any]:
    rotated = (layer.mixer for layer in design_parts.layers(design) if getattr(layer.mixer, "window", None))
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.rope_of(next(rotated, None)))
        | _layer_types.write_windows(design, FLINT_WINDOW)
        | _moe.write_feedforwards(design)
        | write_shared(design)
        | _common.written(design, "attention_bias", "rms_norm_eps")
    )


FLINT = Family(
    "flint",
    "FlintForCausalLM",
    read_flint,
    write_flint,
    partial(
        _common.map_weights,
        names=_common.PRE_NORMS | {"self_attn.softmax_offset": "mixer.sink"},
        map_feedforward=_moe.map_feedforward,
    ),
)


LAGUNA_ROPE: dict[str, dict[str, Any]] = {  # if the config has none
    FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}
LAGUNA_WINDOW = 512
SPARSE, DENSE = "sparse", "dense"
LAGUNA_EXPERTS = _common.Fields(
    experts=("num_experts", 256, "num_local_experts"), top_k=("num_experts_per_tok", 8),
    hidden=("moe_intermediate_size", 512), shared_hidden=("shared_expert_intermediate_size", 512),
    scale=("moe_routed_scaling_factor", 1.0), router_softcap=("moe_router_logit_softcapping", 0.0),
)  # fmt: skip


def read_laguna(config: ConfigReader) -> dict[str, Any]:
    """Laguna (Poolside 2026): softplus gates, heads by layer, windows with a RoPE of their own, sigmoid experts."""
    config.expect("attention_bias", False, None)  # its gate has none
    config.expect("moe_apply_router_weight_on_input", False, None)
    config.ignore("output_router_logits", "router_aux_loss_coef")
    depth, heads = _layer_types.read_depth(config), _common.read_heads(config, head_dim=128)
    gate = config.expect("gating", True, "per-head", "per-element", default=True)
    tables = config.get("rope_parameters", LAGUNA_ROPE)
    if any(not isinstance(tables.get(kind), dict) or tables[kind].get("truncate") is False for kind in LAGUNA_ROPE):
        raise config.invalid("rope_parameters", f"should be a table for {FULL} and one for {SLIDING}, without truncate")
    ropes = {kind: read_rope_table(config, tables[kind], heads["head_dim"], 10000.0, 1.0) for kind in LAGUNA_ROPE}
    types = _layer_types.read_types(config, [FULL] * depth)
    windows = _layer_types.layer_windows(config, types, config.get("sliding_window", LAGUNA_WINDOW))
    numbers = config.get("num_attention_heads_per_layer", [heads["heads"]] * depth)
    if len(numbers) != depth:
        raise config.invalid("num_attention_heads_per_layer", f"should have {depth} entries, one for each layer")
    mixer = _common.attention(config, heads, qk_norm="head", gate_activation="softplus")
    mixer["gate"] = "channel" if gate == "per-element" else "head"
    mixers = [
        mixer | {"heads": number, "window": window, "position": ropes[kind]}
        for number, window, kind in zip(numbers, windows, types, strict=True)
    ]
    dense, fields = _common.read_gated(config), LAGUNA_EXPERTS.read(config)
    experts = {"kind": "moe", **fields, "router_softcap": fields["router_softcap"] or None, "shared": 1}
    experts |= {"activation": dense["activation"], "routing": "sigmoid", "bias_update": 0.0}
    kinds = _layer_types.read_kinds(config, "mlp_layer_types", [DENSE] + [SPARSE] * (depth - 1), (SPARSE, DENSE))
    feedforwards = [experts if kind == SPARSE else dense for kind in kinds]
    return _common.rms_design(config, 1e-6, _layer_types.layers_of(mixers, feedforwards))


def write_laguna(design: ModelConfig) -> dict[str, Any]:
    mixer, moe = design_parts.first_attention(design), design_parts.first_moe(design)
    head_dim, ropes = mixer.head_dim or design.width, _layer_types.ropes_by_layer_type(design)
    tables = {kind: write_rope_table(rope, head_dim, 1.0) for kind, rope in zip(LAGUNA_ROPE, ropes, strict=True)}
    for table in tables.values():
        table.pop("truncate", None)
    older = ("rope_theta", "rope_scaling", "partial_rotary_factor")  # its class reads tables by type alone
    fields = {name: value for name, value in _common.write_attention(design).items() if name not in older}
    return (
        _common.write_common(design)
        | fields
        | _layer_types.write_windows(design, LAGUNA_WINDOW)
        | _common.written(design, "rms_norm_eps")
        | LAGUNA_EXPERTS.write(moe)
        | {
            "intermediate_size": design_parts.first_gated(design).hidden,
            "hidden_act": _moe.write_activation(design),
            "gating": "per-element" if mixer.gate == "channel" else True,
            "num_attention_heads_per_layer": [
                getattr(layer.mixer, "heads", mixer.heads) for layer in design_parts.layers(design)
            ],
            "mlp_layer_types": [SPARSE if is_moe else DENSE for is_moe in design_parts.has_experts(design)],
            "rope_parameters": tables,
        }
    )


def _map_laguna(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle)
    weights.add_tensor(f"{hf}.experts.e_score_correction_bias", f"{heddle}.router.expert_bias")


LAGUNA = Family(
    "laguna", "LagunaForCausalLM", read_laguna, write_laguna,
    partial(
        _common.map_weights, names=_common.PRE_NORMS | {"self_attn.g_proj": "mixer.gate"}, map_feedforward=_map_laguna
    ),
)  # fmt: skip
