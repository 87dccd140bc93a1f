"""Cohere's Command models: both branches read one LayerNorm without bias, and logits are scaled."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, _moe, deepseek
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_rope, read_rope_table, write_rope_table
from heddle.model.config import ModelConfig
from heddle.parts.norms.rms import RMSConfig


def read_cohere(config: ConfigReader) -> dict[str, Any]:
    """Command R (Cohere 2024): both branches read one LayerNorm without bias, interleaved RoPE, logits are scaled."""
    # Norms of queries and keys have weights of their own for each head (Command R+).
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    bias, qk_norm = config.get("attention_bias", False), "per_head" if config.get("use_qk_norm", False) else None
    mixer = _common.read_attention(config, 500000.0, bias=bias, qk_norm=qk_norm)
    mixer["position"]["layout"] = "interleaved"
    return design_fields(config, _common.same_layers(config, mixer, _common.read_gated(config)))


def design_fields(config: ConfigReader, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """A design with these layers, as Command R and its successor have it."""
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5), "bias": False},
        layers,
        residual={"kind": "parallel", "norms": 1},
        head={"tied": config.get("tie_word_embeddings", True), "scale": config.get("logit_scale", 0.0625)},
    )


def write_cohere(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | write_fields(design)
        | {"use_qk_norm": design_parts.first_attention(design).qk_norm is not None}
    )


def write_fields(design: ModelConfig) -> dict[str, Any]:
    """The fields of both models, without heads, windows and RoPE."""
    scale = {"logit_scale": design.head.scale}
    return _common.write_gated(design) | _common.written(design, "attention_bias", "layer_norm_eps") | scale


def map_cohere(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with one norm per layer."""
    _common.map_weights(design, weights, {"input_layernorm": "residual.norms.shared"})


COHERE = Family("cohere", "CohereForCausalLM", read_cohere, write_cohere, map_cohere)


WINDOW = 4096  # if the field is absent
# Fields of the published files, which transformers ignores: other values would ask for another model.
FIXED_FIELDS = {
    "use_qk_norm": False,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "use_parallel_block": True,
    "use_gated_activation": True,
}


def read_cohere2(config: ConfigReader) -> dict[str, Any]:
    """Command R7B and Command A (Cohere 2024): Command R, windows in three of four layers, which alone have RoPE."""
    heads = _common.read_equal_heads(config)
    for name, value in FIXED_FIELDS.items():
        config.expect(name, value, default=value)
    config.unread -= {"cache_implementation", "use_embedding_sharing", "use_parallel_embedding", "pretraining_tp"}
    rope = read_rope(config, heads["head_dim"]) | {"layout": "interleaved"}
    period = config.get("sliding_window_pattern", 4, "layer_switch")
    if period < 1:
        raise config.invalid("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    windows = _layer_types.read_windows(config, _layer_types.full_every(period, config), WINDOW)
    mixer = _common.attention(config, heads, bias=config.get("attention_bias", False))
    mixers = [mixer | {"window": window, "position": rope if window else None} for window in windows]
    return design_fields(config, _layer_types.layers_of(mixers, _common.read_gated(config)))


def write_cohere2(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | write_fields(design)
        | _layer_types.write_windows(design, WINDOW)
    )


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", read_cohere2, write_cohere2, map_cohere)


def read_compass(config: ConfigReader) -> dict[str, Any]:
    """The text model of Command's vision models (Cohere 2026): Command R7B, with a RoPE or none for each layer type.

    Its heads are rotated in halves. `mrope_section` is for images: a text has one position per axis.
    """
    heads = _common.read_equal_heads(config)
    config.ignore("pooling")
    types = _layer_types.read_types(config, [FULL] * _layer_types.read_depth(config))
    tables = config.get("rope_parameters", dict[str, Any]())
    if set(types) - tables.keys():
        raise config.invalid("rope_parameters", "should have a table, or null, for each type of layers")
    ropes = {
        kind: None if tables[kind] is None else read_rope_table(config, tables[kind], heads["head_dim"], 10000.0)
        for kind in set(types)
    }
    mixer = _common.attention(config, heads, bias=config.get("attention_bias", False))
    windows = _layer_types.layer_windows(config, types, config.get("sliding_window", WINDOW))
    mixers = [mixer | {"window": window, "position": ropes[kind]} for window, kind in zip(windows, types, strict=True)]
    scale = config.get("logit_scale", 1.0)
    design = design_fields(config, _layer_types.layers_of(mixers, _common.read_gated(config)))
    return design | {"head": design["head"] | {"scale": scale}}


def write_compass(design: ModelConfig) -> dict[str, Any]:
    tables: dict[str, Any] = {FULL: None, SLIDING: None}
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    for mixer, kind in zip(mixers, design_parts.layer_types(design), strict=True):
        if design_parts.has_rope(mixer):
            tables[kind] = write_rope_table(design_parts.rope_of(mixer), getattr(mixer, "head_dim", 0) or 1)
    # Its class would read them over the tables.
    fields = _common.without(write_cohere2(design), "rope_scaling", "rope_theta")
    return fields | {"rope_parameters": tables}


COMPASS = Family("cohere_compass_text", "CohereCompassForCausalLM", read_compass, write_compass, map_cohere)


ROUTING = {"softmax": "topk_softmax", "sigmoid": "sigmoid"}


def read_cohere2_moe(config: ConfigReader) -> dict[str, Any]:
    """Command with experts (Cohere 2026): Command A's attention, and shared experts that are averaged with the others.

    Full attention has RoPE only in dense layers, and only if `prefix_dense_sliding_window_pattern` is 1.
    """
    heads, depth = _common.read_heads(config, head_dim=128), _layer_types.read_depth(config)
    rope, first = (
        read_rope(config, heads["head_dim"]) | {"layout": "interleaved"},
        config.get("first_k_dense_replace", 0),
    )
    config.ignore("output_router_logits")
    periods = [
        config.get(f"{name}sliding_window_pattern", default) for name, default in (("prefix_dense_", 1), ("", 4))
    ]
    if min(periods) < 1:
        raise config.invalid("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    counts = (first, periods[0]), (depth - first, periods[1])
    usual = [SLIDING if (index + 1) % period else FULL for count, period in counts for index in range(count)]
    types = _layer_types.read_types(config, usual)
    kinds = _layer_types.read_kinds(
        config, "mlp_layer_types", [DENSE] * first + [SPARSE] * (depth - first), (DENSE, SPARSE)
    )
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", WINDOW))
    mixer = _common.attention(config, heads, bias=config.get("attention_bias", False))
    mixers = [
        mixer | {"window": window, "position": rope if window or (kind == DENSE and periods[0] == 1) else None}
        for window, kind in zip(windows, kinds, strict=True)
    ]
    gated, shared = _common.read_gated(config), config.get("num_shared_experts", 0)
    strategy = config.expect("shared_expert_combination_strategy", "average", "sum", default="average")
    halves = {"scale": 0.5, "shared_scale": 0.5} if shared and strategy == "average" else {}
    routing = ROUTING[config.expect("expert_selection_fn", *ROUTING, default="softmax")]
    normed = config.get("norm_topk_prob", True) or routing != "sigmoid"
    experts = {
        "kind": "moe",
        "experts": config.get("num_experts", 8, "num_local_experts"),
        "top_k": config.get("num_experts_per_tok", 2),
        "hidden": gated["hidden"],
        "activation": gated["activation"],
        "shared": shared or None,
        "routing": routing,
        "renormalize": normed,
    } | halves
    dense = gated | {"hidden": config.get("prefix_dense_intermediate_size", gated["hidden"])}
    design = design_fields(
        config, _layer_types.layers_of(mixers, [dense if kind == DENSE else experts for kind in kinds])
    )
    eps = config.optional("rms_norm_eps")
    return design if eps is None else design | {"norm": {"kind": "rms", "eps": eps}}


def write_cohere2_moe(design: ModelConfig) -> dict[str, Any]:
    moe, eps = design_parts.first_moe(design), design_parts.norm_eps(design)
    layers, has_experts = design_parts.layers(design), design_parts.has_experts(design)
    bare = any(
        not is_moe and not design_parts.has_rope(layer.mixer) for layer, is_moe in zip(layers, has_experts, strict=True)
    )
    dense, is_rms = design_parts.first_gated(design).hidden, isinstance(design.norm, RMSConfig)
    return _common.without(write_cohere2(design), "layer_norm_eps") | {
        "rope_scaling": None,
        "intermediate_size": moe.hidden,
        "hidden_act": _moe.write_activation(design),
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "num_shared_experts": deepseek.shared_experts(moe) if moe.shared else 0,
        "shared_expert_combination_strategy": "sum" if moe.shared and moe.shared_scale is None else "average",
        "expert_selection_fn": "sigmoid" if moe.routing == "sigmoid" else "softmax",
        "norm_topk_prob": moe.renormalize,
        "mlp_layer_types": design_parts.mlp_layer_types(design),
        "prefix_dense_intermediate_size": None if dense == moe.hidden else dense,
        "prefix_dense_sliding_window_pattern": 2 if bare else 1,
        **({"rms_norm_eps": eps} if is_rms else {"rms_norm_eps": None, "layer_norm_eps": eps}),
    }


map_cohere2_moe = partial(
    _common.map_weights,
    names={"input_layernorm": "residual.norms.shared"},
    map_feedforward=partial(_moe.map_feedforward, shared_expert="shared_experts"),
)
COHERE2_MOE = Family("cohere2_moe", "Cohere2MoeForCausalLM", read_cohere2_moe, write_cohere2_moe, map_cohere2_moe)
