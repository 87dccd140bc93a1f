"""Qwen2 and Qwen3, dense and with experts; Mellum 2 and Flint, which follow Qwen3's mixtures, Laguna; Qwen3-Next and
Qwen3.5."""

from collections.abc import Callable
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import DEPTHWISE_CONV, Family, ModuleNames, WeightMap, interleaved_by_group
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
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

WINDOW = 4096  # if the field is absent


def read_window(config: ConfigReader) -> int | None:
    """The window, if `use_sliding_window` is on."""
    window: int | None = config.get_nullable("sliding_window", WINDOW)
    return window if config.get("use_sliding_window", False) else None


def read_qwen_design(config: ConfigReader, mixer: dict[str, Any]) -> dict[str, Any]:
    """A design with this mixer in every layer, each with its window.

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


MELLUM_WINDOW = 1024
FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def read_mellum(config: ConfigReader) -> dict[str, Any]:
    """Mellum 2 (JetBrains 2026): Qwen3-MoE with windows in some layers, a RoPE per type, a list of dense layers."""
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
    older = ("rope_theta", "rope_scaling", ORIGINAL_LENGTH, "decoder_sparse_step", "mlp_only_layers")
    tables = [write_rope_table(rope, head_dim or design.width) for rope in ropes]
    return (
        _common.without(fields, *older)
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | _layer_types.write_windows(design, MELLUM_WINDOW)
        | {"rope_parameters": dict(zip((FULL, SLIDING), tables, strict=True))}
        | _common.written(design, "mlp_layer_types")
    )


MELLUM = Family("mellum", "MellumForCausalLM", read_mellum, write_mellum, _moe.map_weights, ignored_tensors=("mtp.",))


FLINT_WINDOW = 513


def read_flint(config: ConfigReader) -> dict[str, Any]:
    """Flint (2026): Qwen3-MoE with sinks, RoPE only in windowed layers, sigmoid experts and a shared one.

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
    return _common.rms_design(config, 1e-6, _layer_types.layers_of(mixers, feedforwards), cast="after")


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
    return (
        _common.write_common(design)
        | _common.without(_common.write_attention(design), *older)
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
            "mlp_layer_types": design_parts.mlp_layer_types(design),
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


# Qwen3-Next and Qwen3.5: gated delta rule, and gated softmax attention in every fourth layer.
#
# Norms multiply by `1 + γ`, except for the delta rule's head norm.

LINEAR = _layer_types.LINEAR
DELTA = _common.Fields(
    heads=("linear_num_value_heads", int),
    key_heads=("linear_num_key_heads", int),
    head_dim=("linear_key_head_dim", int),
    value_dim=("linear_value_head_dim", int),
    conv_kernel=("linear_conv_kernel_dim", int),
)
DELTA_NAMES = {"A_log": "decay.rate", "dt_bias": "decay.bias", "norm": "norm", "out_proj": "out"}
DEFAULT_ROTARY_FACTOR = 0.25  # if the config has none


def _fits(design: ModelConfig) -> bool:
    """Whether the last layer has softmax attention, and experts if any layer has."""
    sparse = design_parts.has_experts(design)
    return isinstance(design.last_layer.mixer, AttentionConfig) and sparse[-1] == any(sparse)


def module_names(count_field: str) -> ModuleNames:
    """The names of the one multi-token module; its layer has softmax attention.

    `count_field` says whether there is one.

    Several modules would share their norms and projection; heddle's do not.
    """
    parts = {
        "pre_fc_norm_embedding": "embedding_norm",
        "pre_fc_norm_hidden": "hidden_norm",
        "fc": "projection",
        "norm": "final_norm.norm",
    }
    return ModuleNames(count_field, prefix="mtp", layer="mtp.layers.0", parts=parts, fits=_fits, most=1)


def read_hybrid_design(config: ConfigReader, feedforwards: list[dict[str, Any]]) -> dict[str, Any]:
    """A design with one layer for each feed-forward; `layer_types` says which mixer each layer has."""
    eps = config.get("rms_norm_eps", 1e-6)
    config.require("head_dim", int)
    config.require("num_key_value_heads", int)
    extra: dict[str, Any] = {"qk_norm": "head", "gate": "channel", "bias": config.get("attention_bias", False)}
    attention = _common.read_attention(config, partial_rotary_factor=DEFAULT_ROTARY_FACTOR, **extra)
    mixers = {FULL: attention, LINEAR: read_delta(config, eps)}
    usual = default_types(config.get("full_attention_interval", 4), len(feedforwards))
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    norm = {"kind": "rms", "eps": eps, "offset": 1.0, "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.layers_of([mixers[kind] for kind in types], feedforwards))


def default_types(interval: int, depth: int) -> list[str]:
    """The type of each layer if every `interval`th one has softmax attention."""
    return [LINEAR if (index + 1) % max(interval, 1) else FULL for index in range(depth)]


def read_delta(config: ConfigReader, eps: float) -> dict[str, Any]:
    """The gated delta rule; `eps` is of the norm of its heads."""
    config.expect("hidden_act", "silu", default="silu")  # the delta rule's convolution uses it too
    return {"kind": "gated_delta", **DELTA.read(config), "norm": {"kind": "rms", "eps": eps}}


def write_hybrid(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_hybrid_design` reads."""
    return (
        _common.write_common(design)
        | {"partial_rotary_factor": 1.0}  # written even if 1.0, because the default is 0.25
        | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | write_delta(design)
    )


def write_delta(design: ModelConfig) -> dict[str, Any]:
    """The types of the layers, and the fields of the first delta rule."""
    delta = DELTA.write(design_parts.first_gated_delta(design))
    return {"layer_types": _layer_types.types_of(design, GatedDeltaConfig), "hidden_act": "silu"} | delta


def map_hybrid(
    design: ModelConfig,
    weights: WeightMap,
    map_inputs: Callable[[WeightMap, str, str, int], None],
    modules: ModuleNames,
) -> None:
    """Llama's tensor names, the delta rule's and the experts'.

    map_inputs: maps the projections of the delta rule's input, given the number of key heads: each family has its own
    order. modules: the names of the multi-token module.
    """
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design, modules):
        map_experts(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)
        mixer, delta, own = layer.mixer, f"{hf}.linear_attn", f"{heddle}.mixer"
        if isinstance(mixer, GatedDeltaConfig):
            map_inputs(weights, delta, own, mixer.key_heads or mixer.heads)
            weights.add_module(f"{delta}.conv1d", f"{own}.convolution", transform=DEPTHWISE_CONV)
            weights.add_modules(delta, own, DELTA_NAMES)
        elif isinstance(mixer, AttentionConfig):  # q and its gate are one tensor, interleaved by head
            _common.map_attention(weights, hf, heddle)
            by_head = interleaved_by_group(mixer.heads)
            weights.add_module(f"{hf}.self_attn.q_proj", f"{own}.q", f"{own}.gate", transform=by_head)


QWEN3_NEXT_MODULES = module_names("num_nextn_predict_layers")


def read_qwen3_next(config: ConfigReader) -> dict[str, Any]:
    """Qwen3-Next (Qwen 2025): gated delta rule, gated softmax attention in every fourth layer, experts in every layer.

    Norms multiply by `1 + γ`, except for the delta rule's head norm. The multi-token module (`mtp.`) is read where the
    weights hold it and the model's last layer has softmax attention, as in published models.
    """
    config.expect("use_sliding_window", False, default=False)
    return read_hybrid_design(config, _moe.read_feedforwards(config, read_shared(config), renormalize=True))


def write_qwen3_next(design: ModelConfig) -> dict[str, Any]:
    types = _layer_types.types_of(design, GatedDeltaConfig)
    interval = types.index(FULL) + 1 if FULL in types else design.depth + 1
    is_usual = types == default_types(interval, design.depth)
    return (
        write_hybrid(design)
        | _moe.write_feedforwards(design)
        | write_shared(design)
        | {"use_sliding_window": False, "full_attention_interval": interval if is_usual else None, "hidden_act": "silu"}
    )


def _map_inputs_of_qwen3_next(weights: WeightMap, hf: str, heddle: str, groups: int) -> None:
    fused = [f"{heddle}.{name}" for name in ("q", "k", "v", "gate")]
    weights.add_module(f"{hf}.in_proj_qkvz", *fused, transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.in_proj_ba", f"{heddle}.beta", f"{heddle}.a", transform=interleaved_by_group(groups))


map_qwen3_next = partial(map_hybrid, map_inputs=_map_inputs_of_qwen3_next, modules=QWEN3_NEXT_MODULES)
QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", read_qwen3_next, write_qwen3_next, map_qwen3_next,
    ignored_tensors=("mtp.",), multi_token=QWEN3_NEXT_MODULES,
)  # fmt: skip


# What the dense Qwen3.5 and its mixture share: Qwen3-Next's layers with one tensor for each input projection.

QWEN3_5_MODULES = module_names("mtp_num_hidden_layers")
STATE_DTYPE = {"mamba_ssm_dtype": "float32"}  # vLLM reads it; heddle's states have at least float32


def check_fixed_fields(config: ConfigReader) -> None:
    """Fields with one value in every published model."""
    config.expect("attn_output_gate", True, default=True)
    config.expect("output_gate_type", "swish", None)
    config.expect("mamba_ssm_dtype", "float32", None)
    config.optional("mtp_use_dedicated_embeddings")  # a module with such tensors is not read
    config.expect("mlp_only_layers", [], None)


def map_inputs_of_qwen3_5(weights: WeightMap, hf: str, heddle: str, _: int) -> None:
    """One tensor for q, k and v, and one for each other projection."""
    weights.add_module(f"{hf}.in_proj_qkv", *(f"{heddle}.{role}" for role in "qkv"))
    weights.add_modules(hf, heddle, {"in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "a"})


map_qwen3_5 = partial(map_hybrid, map_inputs=map_inputs_of_qwen3_5, modules=QWEN3_5_MODULES)
qwen3_5 = partial(Family, map_weights=map_qwen3_5, ignored_tensors=("mtp.",), multi_token=QWEN3_5_MODULES)


def read_qwen3_5(config: ConfigReader) -> dict[str, Any]:
    """The text model of Qwen3.5 and 3.6 (Qwen 2026): Qwen3-Next's two kinds of mixers, with a dense feed-forward.

    `mrope_section` is for images: a text has one position per axis.
    """
    check_fixed_fields(config)
    return read_hybrid_design(config, [_common.read_gated(config)] * _layer_types.read_depth(config))


def write_qwen3_5(design: ModelConfig) -> dict[str, Any]:
    return write_hybrid(design) | _common.write_gated(design) | {"hidden_act": "silu"} | STATE_DTYPE


QWEN3_5 = qwen3_5("qwen3_5_text", "Qwen3_5ForCausalLM", read_qwen3_5, write_qwen3_5)


def read_qwen3_5_moe(config: ConfigReader) -> dict[str, Any]:
    """The text model of Qwen3.5's and 3.6's mixtures (Qwen 2026): Qwen3.5 with experts and a shared one in every layer.

    `mrope_section` is for images: a text has one position per axis.
    """
    # Every layer has experts, whose gates sum to 1.
    check_fixed_fields(config)
    config.expect("norm_topk_prob", True, default=True)
    config.optional("intermediate_size")  # no layer is dense
    depth = _layer_types.read_depth(config)
    experts = _moe.read_experts(config, depth, "moe_intermediate_size") | read_shared(config)
    return read_hybrid_design(config, [experts] * depth)


def write_qwen3_5_moe(design: ModelConfig) -> dict[str, Any]:
    moe = design_parts.first_moe(design)
    fields = write_hybrid(design) | write_shared(design) | _moe.write_aux_loss(design, moe) | STATE_DTYPE
    sizes = {"num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.hidden}
    return fields | sizes


# After Qwen3-Next, which fits the same designs, for older readers.
QWEN3_5_MOE = qwen3_5("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", read_qwen3_5_moe, write_qwen3_5_moe, priority=101)
