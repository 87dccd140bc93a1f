"""DeepSeek-V2 and V3, and families with their latent attention or their experts.

Dense layers come first, then routed and shared experts.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, _moe, granite
from heddle.exchange.family import Family, ModuleNames, WeightMap, interleaved_by_group
from heddle.exchange.rope import FULL, SLIDING, read_rope, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.residuals.pre_norm import PreNormConfig

LATENTS = {
    "q_proj": "q", "q_a_proj": "q_down", "q_a_layernorm": "q_norm", "q_b_proj": "q_up", "kv_a_layernorm": "kv_norm",
    "o_proj": "out",
}  # fmt: skip

GROUPS = _common.Fields(groups=("n_group", 1), top_groups=("topk_group", 1))
EXPERTS = _common.Fields(
    experts=("n_routed_experts", int), top_k=("num_experts_per_tok", int), hidden=("moe_intermediate_size", int)
)

# The multi-token modules of V3 and of the families that took them over, as further layers. Their feed-forwards are
# mixtures, also where the model's last layer is dense. Published models have one; of several, each reads the states
# after the last norm of the one before, as in transformers.
MODULES = ModuleNames(
    "num_nextn_predict_layers",
    prefix="model.layers.{layer}",
    layer="model.layers.{layer}",
    parts={
        "enorm": "embedding_norm",
        "hnorm": "hidden_norm",
        "eh_proj": "projection",
        "shared_head.norm": "final_norm.norm",
    },
    copies={"embed_tokens": "embed", "shared_head.head": "head"},
    fits=lambda design: isinstance(design.last_layer.feedforward, MoEConfig),
)


def read_attention(
    config: ConfigReader, layout: str, query_rank: int = 1536, value_dim: int | None = None
) -> dict[str, Any]:
    """The latent attention of every layer.

    layout: how RoPE pairs dims, `interleaved` or `half`. query_rank, value_dim: the family's defaults for `q_lora_rank`
    and `v_head_dim`, which is required if there is none.
    """
    rope_dim = config.require("qk_rope_head_dim", int)
    config.expect("head_dim", rope_dim, default=rope_dim)  # written as the width of the rotated part
    return read_latents(config, query_rank, value_dim) | {
        "position": read_latent_rope(config, rope_dim) | {"layout": layout}
    }


def read_latents(config: ConfigReader, query_rank: int | None, value_dim: int | None = None) -> dict[str, Any]:
    """Latent attention without its rotation; the defaults as in `read_attention`."""
    heads = config.require("num_attention_heads", int)
    if heads // config.get("num_key_value_heads", heads) != 1:
        raise config.invalid("num_key_value_heads", f"latent attention needs num_attention_heads = {heads}")
    config.optional("qk_head_dim")  # the sum of qk_nope_head_dim and qk_rope_head_dim
    config.expect("attention_dropout", 0.0, None)
    return {
        "kind": "latent_attention",
        "heads": heads,
        "kv_rank": config.require("kv_lora_rank", int),
        "query_rank": config.optional("q_lora_rank") if "q_lora_rank" in config.data else query_rank,
        "nope_dim": config.require("qk_nope_head_dim", int),
        "rope_dim": config.require("qk_rope_head_dim", int),
        "value_dim": config.get("v_head_dim", value_dim) if value_dim else config.require("v_head_dim", int),
        "bias": config.get("attention_bias", False),
    }


def read_latent_rope(config: ConfigReader, rope_dim: int, theta: float = 10000.0) -> dict[str, Any]:
    """RoPE of all of `rope_dim` dims; `theta` is the family's default."""
    table = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    if table.get("mscale_all_dim") and (table.get("attention_factor") or not table.get("mscale")):
        raise config.invalid(
            "rope_parameters", "mscale_all_dim is supported only with mscale, and without attention_factor"
        )
    rope = read_rope(config, rope_dim, theta)
    if "rotary_dim" in rope:
        raise config.invalid("partial_rotary_factor", "all dims of qk_rope_head_dim are rotated; leave it out")
    return rope


def read_layers(
    config: ConfigReader, mixer: dict[str, Any], routing: dict[str, Any], bias: bool
) -> list[dict[str, Any]]:
    """Dense layers, then layers with experts. bias: of dense layers and shared experts; routed experts have none."""
    config.expect("moe_layer_freq", 1, default=1)
    depth, dense = config.require("num_hidden_layers", int), _common.read_gated(config, bias=bias)
    first = min(config.require("first_k_dense_replace", int), depth)
    groups = ((first, dense), (depth - first, read_experts(config, routing, bias)))
    return [{"repeat": count, "mixer": mixer, "feedforward": feedforward} for count, feedforward in groups if count]


def read_layout(config: ConfigReader) -> str:
    """How RoPE pairs dims, as `rope_interleave` says."""
    return "interleaved" if config.get("rope_interleave", True) else "half"


def write_layout(design: ModelConfig) -> dict[str, Any]:
    """The field that `read_layout` reads."""
    rope = design_parts.rope_of(design_parts.first_latent_attention(design))
    return {"rope_interleave": rope.layout == "interleaved"}


def read_feedforwards(config: ConfigReader, routing: dict[str, Any], dense: int, bias: bool) -> list[dict[str, Any]]:
    """The feed-forward of each layer: `mlp_layer_types`, or the first `dense` are dense. bias: as in `read_layers`."""
    depth = _layer_types.read_depth(config)
    usual = [DENSE] * min(dense, depth) + [SPARSE] * (depth - dense)
    types = _layer_types.read_kinds(config, "mlp_layer_types", usual, (DENSE, SPARSE))
    kinds = {DENSE: _common.read_gated(config, bias=bias), SPARSE: read_experts(config, routing, bias)}
    return [kinds[kind] for kind in types]


def read_experts(
    config: ConfigReader, routing: dict[str, Any], bias: bool = False, shared: bool = True
) -> dict[str, Any]:
    """Routed and shared experts; shared: whether the family has the latter.

    DeepSeek's own code has a balancing loss per sequence, as heddle does: `aux_loss_alpha` is heddle's `aux_loss`.
    transformers has no such loss.
    """
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    config.optional("ep_size")  # expert parallelism
    config.get("output_router_logits", False)
    config.expect("seq_aux", True, default=True)
    return {
        "kind": "moe",
        **EXPERTS.read(config),
        "activation": _common.read_activation(config),
        "shared": config.require("n_shared_experts", int) if shared else None,
        "scale": config.require("routed_scaling_factor", float) if shared else config.get("routed_scaling_factor", 1.0),
        "bias": "shared" if bias else False,
        "aux_loss": config.get("aux_loss_alpha", 0.0) or None,
        **routing,
    }


def read_sigmoid_routing(config: ConfigReader, renormalize: bool = True) -> dict[str, Any]:
    """Routing by sigmoid scores within groups, of which there is one by default.

    renormalize: the family's default.
    """
    config.ignore(MODULES.count_field, "num_mtp_layers")
    config.expect("scoring_func", "sigmoid", default="sigmoid")
    config.expect("topk_method", "noaux_tc", default="noaux_tc")
    normed = config.get("norm_topk_prob", renormalize)
    return {"routing": "sigmoid", "renormalize": normed, **GROUPS.read(config), "bias_update": 0.0}


def write_sigmoid_routing(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_sigmoid_routing` reads."""
    moe = design_parts.first_moe(design)
    return {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        **GROUPS.write(moe),
        "norm_topk_prob": moe.renormalize,
        "num_nextn_predict_layers": 0,
    }


def write_deepseek(design: ModelConfig) -> dict[str, Any]:
    """The fields of both versions."""
    mixer = design_parts.first_latent_attention(design)
    rope_dim = mixer.rope_dim or 2
    return (
        _common.write_common(design)
        | write_layers(design)
        | write_latents(mixer)
        | {"qk_head_dim": mixer.nope_dim + rope_dim, "head_dim": rope_dim}
        | write_rope(design_parts.rope_of(mixer), rope_dim, _common.DEFAULT_MAX_POSITIONS)
    )


def write_latents(mixer: LatentAttentionConfig) -> dict[str, Any]:
    """The fields that `read_latents` reads."""
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "kv_lora_rank": mixer.kv_rank,
        "q_lora_rank": mixer.query_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim or 2,
        "v_head_dim": mixer.value_dim,
        "attention_bias": mixer.bias,
        "attention_dropout": 0.0,
    }


def write_layers(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_layers` reads, and the epsilon of the norms."""
    moe, sparse = design_parts.first_moe(design), design_parts.has_experts(design)
    loss = {} if moe.aux_loss is None else {"aux_loss_alpha": moe.aux_loss, "seq_aux": True}
    return {
        "rms_norm_eps": design_parts.norm_eps(design),
        "hidden_act": _moe.write_activation(design),
        "intermediate_size": design_parts.first_gated(design).hidden,
        "first_k_dense_replace": sparse.index(True) if any(sparse) else design.depth,
        "moe_layer_freq": 1,
        **EXPERTS.write(moe),
        "n_shared_experts": shared_experts(moe),
        "routed_scaling_factor": moe.scale,
        **loss,
    }


def write_feedforwards(design: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that `read_feedforwards` reads, by the family's own `names`, and the epsilon of the norms."""
    fields = _common.without(write_layers(design), "first_k_dense_replace", "moe_layer_freq")
    fields |= _common.written(design, "mlp_layer_types")
    return {names.get(name, name): value for name, value in fields.items()}


def write_dense(design: ModelConfig) -> dict[str, Any]:
    """The fields of latent attention and a gated feed-forward in every layer."""
    mixer = design_parts.first_latent_attention(design)
    rope, rope_dim = design_parts.rope_of(mixer), mixer.rope_dim or 2
    return (
        _common.write_common(design)
        | _common.write_gated(design)
        | write_latents(mixer)
        | write_rope(rope, rope_dim, _common.DEFAULT_MAX_POSITIONS)
        | _common.written(design, "rms_norm_eps")
    )


def shared_experts(moe: MoEConfig) -> int:
    """The width of the shared expert as a number of routed experts."""
    return max((moe.shared_hidden or moe.hidden) // moe.hidden, 1)


def map_deepseek(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names of both versions."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design, MODULES):
        map_attention(weights, f"{hf}.self_attn", f"{heddle}.mixer", getattr(layer.mixer, "heads", 1))
        map_feedforward(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)


def map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    """A layer's feed-forward, dense or with experts, and the balancing bias."""
    _moe.map_feedforward(weights, hf, heddle, "shared_experts")
    weights.add_tensor(f"{hf}.gate.e_score_correction_bias", f"{heddle}.router.expert_bias")


def map_attention(weights: WeightMap, hf: str, heddle: str, heads: int, names: Mapping[str, str] = LATENTS) -> None:
    """The projections of latent attention; keys and values are one projection, interleaved by head."""
    weights.add_modules(hf, heddle, names)
    latents = [f"{heddle}.kv_down", f"{heddle}.k_rope"]
    rotated = 2 if f"{heddle}.k_rope.weight" in weights.shapes else 1
    weights.add_module(f"{hf}.kv_a_proj_with_mqa", *latents[:rotated])
    weights.add_module(f"{hf}.kv_b_proj", f"{heddle}.k_up", f"{heddle}.v_up", transform=interleaved_by_group(heads))


def read_deepseek_v2(config: ConfigReader) -> dict[str, Any]:
    """DeepSeek-V2 (DeepSeek-AI 2024): latent attention, experts by softmax scores, of all or of the best groups."""
    # transformers ignores `norm_topk_prob`: gates are never divided by their sum.
    config.get("norm_topk_prob", False)
    config.expect("scoring_func", "softmax", default="softmax")
    method = config.expect("topk_method", "greedy", "group_limited_greedy", default="greedy")
    groups = {"groups": config.optional("n_group"), "top_groups": config.optional("topk_group")}
    routing = {"routing": "softmax_topk"} if method == "greedy" else {"routing": "softmax_group_max", **groups}
    mixer = read_attention(config, "interleaved")
    layers = read_layers(config, mixer, routing | {"renormalize": False}, config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-6, layers)


def write_deepseek_v2(design: ModelConfig) -> dict[str, Any]:
    moe, dense = design_parts.first_moe(design), design_parts.first_gated(design)
    grouped = moe.routing == "softmax_group_max"
    return write_deepseek(design) | {
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
        "n_group": moe.groups if grouped else None,
        "topk_group": moe.top_groups if grouped else None,
        "norm_topk_prob": False,
        "mlp_bias": moe.bias == "shared" if any(design_parts.has_experts(design)) else dense.bias,
    }


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2, write_deepseek_v2, map_deepseek)


def read_deepseek_v3(config: ConfigReader) -> dict[str, Any]:
    """DeepSeek-V3 (DeepSeek-AI 2024): as V2, with sigmoid scores, a balancing bias, experts chosen within groups.

    Kimi K2 (`kimi_k2`) and the text model of K2.5 (`kimi_k25`) are of this class.
    """
    mixer = read_attention(config, read_layout(config))
    return _common.rms_design(config, 1e-6, read_layers(config, mixer, read_sigmoid_routing(config), False))


def write_deepseek_v3(design: ModelConfig) -> dict[str, Any]:
    return write_deepseek(design) | write_sigmoid_routing(design) | write_layout(design)


# Their modules are further layers, ignored where they are not read.
with_modules = partial(Family, ignored_tensors=("model.layers.{depth}.",), multi_token=MODULES)
DEEPSEEK_V3 = with_modules("deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3, write_deepseek_v3, map_deepseek)


def read_lite(config: ConfigReader) -> dict[str, Any]:
    """GLM-4.7-Flash (Z.ai 2026): DeepSeek-V3's latent attention and experts, with a list of which layers are dense."""
    mixer = read_attention(config, read_layout(config), query_rank=768)
    config.expect("first_k_dense_replace", 1, default=1)
    return _common.rms_design(config, 1e-5, read_listed_layers(config, mixer, dense=1))


def read_listed_layers(config: ConfigReader, mixer: dict[str, Any], dense: int, **extra: Any) -> list[dict[str, Any]]:
    """Layers that `mlp_layer_types` says are dense or mixtures; where it is absent, the first `dense` are dense.

    extra: further fields of the mixtures.
    """
    config.expect("moe_layer_freq", 1, default=1)
    feedforwards = read_feedforwards(config, read_sigmoid_routing(config) | extra, dense, bias=False)
    return _layer_types.layers_of([mixer] * len(feedforwards), feedforwards)


def write_lite(design: ModelConfig) -> dict[str, Any]:
    fields = write_deepseek(design) | write_sigmoid_routing(design)
    fields = _common.without(fields, "first_k_dense_replace", "moe_layer_freq", "head_dim")
    return fields | write_feedforwards(design, {}) | write_layout(design)


GLM4_MOE_LITE = with_modules("glm4_moe_lite", "Glm4MoeLiteForCausalLM", read_lite, write_lite, map_deepseek)


def read_axk1(config: ConfigReader) -> dict[str, Any]:
    """A.X K1 (SK Telecom 2026): DeepSeek-V3, with a norm of each mixture's output.

    Published files have no balancing biases, which are then zero, and norms of dense layers, which are never used.
    """
    mixer = read_attention(config, read_layout(config))
    if mixer["query_rank"] is None:
        raise config.invalid("q_lora_rank", "its class projects queries from a latent; give its width")
    layers = read_listed_layers(config, mixer, config.get("first_k_dense_replace", 1), output_norm=True)
    return _common.rms_design(config, 1e-6, layers)


def map_axk1(design: ModelConfig, weights: WeightMap) -> None:
    """V3's tensor names, and the norms after mixtures."""
    map_deepseek(design, weights)
    for hf, heddle, _ in _common.named_layers(design):
        weights.add_module(f"{hf}.post_mlp_layernorm", f"{heddle}.feedforward.output_norm")


AXK1 = Family(
    "axk1",
    "AXK1ForCausalLM",
    read_axk1,
    write_lite,
    map_axk1,
    ignored_tensors=("model.layers.*.post_mlp_layernorm",),
    zeros_if_absent=("model.layers.*.mlp.gate.e_score_correction_bias",),
)


INDEXED = "indexed_attention"  # the type of every layer
INDEXER = {"wq_b": "q", "wk": "k", "k_norm": "k_norm", "weights_proj": "weights"}
INDEXER_FIELDS = {"index_topk": "top_k", "index_n_heads": "heads", "index_head_dim": "head_dim"}


def read_v32(config: ConfigReader) -> dict[str, Any]:
    """DeepSeek-V3.2 (DeepSeek-AI 2025): V3, with an indexer in each layer that selects the keys of a query."""
    return read_indexed_design(config, 1e-6, query_rank=1536, heads=64, indexer={})


def read_indexed_design(
    config: ConfigReader, eps: float, query_rank: int, heads: int, indexer: dict[str, Any]
) -> dict[str, Any]:
    """A design; all but the last are the family's defaults, `heads` the indexer's. indexer: further fields of it."""
    depth = config.require("num_hidden_layers", int)
    config.expect("mlp_bias", False, default=False)
    dense = config.get("first_k_dense_replace", 3)
    mixer = read_attention(config, "interleaved", query_rank) | {"indexer": read_indexer(config, heads) | indexer}
    return _common.rms_design(config, eps, read_listed_layers(config, mixer, min(dense, depth)))


def read_indexer(config: ConfigReader, heads: int) -> dict[str, Any]:
    """The sizes of the indexer that every layer has; `heads` is the family's default."""
    config.expect("layer_types", None, [INDEXED] * config.require("num_hidden_layers", int))
    defaults = (2048, heads, 128)
    return {own: config.get(name, size) for (name, own), size in zip(INDEXER_FIELDS.items(), defaults, strict=True)}


def write_v32(design: ModelConfig) -> dict[str, Any]:
    indexer = first_indexer(design)
    fields = write_deepseek(design) | write_sigmoid_routing(design) | write_feedforwards(design, {})
    return fields | {name: getattr(indexer, own) for name, own in INDEXER_FIELDS.items()}


def first_indexer(design: ModelConfig) -> IndexerConfig:
    """That of the first layer with latent attention; one of the least sizes if it has none."""
    return design_parts.first_latent_attention(design).indexer or IndexerConfig(top_k=1, heads=1, head_dim=2)


def map_v32(design: ModelConfig, weights: WeightMap) -> None:
    """V3's tensor names, and the indexers'."""
    map_deepseek(design, weights)
    for hf, heddle, _ in _common.named_layers(design, MODULES):
        weights.add_modules(f"{hf}.self_attn.indexer", f"{heddle}.mixer.indexer", INDEXER)


DEEPSEEK_V32 = with_modules("deepseek_v32", "DeepseekV32ForCausalLM", read_v32, write_v32, map_v32)


OWN, SHARED = "full", "shared"  # in `indexer_types`


def read_dsa(config: ConfigReader) -> dict[str, Any]:
    """GLM-5 (Z.ai 2026): DeepSeek-V3.2, with indexers that rotate neighboring dims; layers may share a selection."""
    config.expect("indexer_rope_interleave", True, None)
    indexer = {"rope_layout": "interleaved"}
    design = read_indexed_design(config, 1e-5, query_rank=2048, heads=32, indexer=indexer)
    types = _layer_types.read_kinds(config, "indexer_types", usual_indexers(config), (OWN, SHARED))
    return design | {"layers": with_shared_indexes(design["layers"], types)}


def with_shared_indexes(layers: list[dict[str, Any]], types: Sequence[str]) -> list[dict[str, Any]]:
    """Layers with indexers, those of type SHARED with the last earlier layer's selection in its place."""
    each = [{**layer, "repeat": 1} for layer in layers for _ in range(layer["repeat"])]
    for layer, kind in zip(each, types, strict=True):
        if kind == SHARED:
            mixer = {name: value for name, value in layer["mixer"].items() if name != "indexer"}
            layer["mixer"] = mixer | {"shared_index": True}
    return _layer_types.merge_repeats(each)


def usual_indexers(config: ConfigReader) -> list[str]:
    """The types where `indexer_types` is absent: a pattern of F and S, or every `index_topk_freq`-th after some."""
    depth, pattern = _layer_types.read_depth(config), config.optional("index_topk_pattern")
    every, first = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
    if isinstance(pattern, str):
        return [SHARED if letter == "S" else OWN for letter in pattern]
    usual = [SHARED if max(index - first + 1, 0) % every else OWN for index in range(depth)]
    return usual if pattern is None else pattern


def write_dsa(design: ModelConfig) -> dict[str, Any]:
    shared = [getattr(layer.mixer, "shared_index", False) for layer in design_parts.layers(design)]
    return write_v32(design) | {"indexer_types": [SHARED if each else OWN for each in shared]}


GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    read_dsa,
    write_dsa,
    map_v32,
    ignored_tensors=("model.layers.{depth}.",),
)


# Fields of DeepSeek's files that later classes lack.
UNKNOWN = "scoring_func", "topk_method", "num_nextn_predict_layers", "first_k_dense_replace", "moe_layer_freq"
GATED_LATENTS = {name: own for name, own in LATENTS.items() if own != "q_up"}
NORM_GATES = {"W_down": "down", "W_up": "up"}


def read_axk2(config: ConfigReader) -> dict[str, Any]:
    """A.X K2 (SK Telecom 2026): V3.2, with gated norms, and queries and gates that read a latent and its norm.

    In transformers the experts of other groups have a score of 0: where fewer than `num_experts_per_tok` experts of the
    best groups have more, after their biases, it takes some of those. heddle stays within the groups, as V3.2 does.
    """
    mixer = read_attention(config, "interleaved", query_rank=384)
    if mixer["query_rank"] is None:
        raise config.invalid("q_lora_rank", "its class projects queries from a latent; give its width")
    mixer |= {"indexer": read_indexer(config, heads=16), "query_norm": "beside"}
    mixer |= {"gate": "channel", "gate_input": "queries"}
    layers = read_listed_layers(config, mixer, config.get("first_k_dense_replace", 1))
    gates = {"gate_rank": config.get("gated_norm_rank", 16), "gated_feedforwards": "mixtures"}
    return _common.rms_design(config, 1e-6, layers, residual={"kind": "pre_norm", **gates})


def write_axk2(design: ModelConfig) -> dict[str, Any]:
    moe, residual = design_parts.first_moe(design), design.residual
    rank = residual.gate_rank if isinstance(residual, PreNormConfig) else None
    groups = {"n_group": moe.groups, "topk_group": moe.top_groups, "gated_norm_rank": rank or 16}
    return _common.without(write_v32(design), *UNKNOWN) | groups


def map_axk2(design: ModelConfig, weights: WeightMap) -> None:
    """V3.2's, with queries and gates in one tensor, head by head, and the gates of norms."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design):
        attention, mixer, heads = f"{hf}.self_attn", f"{heddle}.mixer", getattr(layer.mixer, "heads", 1)
        map_attention(weights, attention, mixer, heads, GATED_LATENTS)
        queries = [f"{mixer}.q_up", f"{mixer}.gate"]
        weights.add_module(f"{attention}.q_b_proj", *queries, transform=interleaved_by_group(heads))
        weights.add_modules(f"{attention}.indexer", f"{mixer}.indexer", INDEXER)
        map_feedforward(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        for name, own in (("input_layernorm", "mixer"), ("post_attention_layernorm", "feedforward")):
            gate = f"{heddle}.residual.gates.{own}"
            is_gated = f"{gate}.down.weight" in weights.shapes
            norm = f"{hf}.{name}.norm" if is_gated else f"{hf}.{name}"
            weights.add_module(norm, f"{heddle}.residual.norms.{own}")
            weights.add_modules(f"{hf}.{name}", gate, NORM_GATES)


AXK2 = Family("axk2", "AXK2ForCausalLM", read_axk2, write_axk2, map_axk2)


def read_youtu(config: ConfigReader) -> dict[str, Any]:
    """Youtu-LLM (Tencent 2025): DeepSeek-V3's latent attention and a gated feed-forward in every layer."""
    config.note("embedding_initializer_range")  # of training from scratch
    layers = _common.same_layers(config, read_attention(config, read_layout(config)), _common.read_gated(config))
    return _common.rms_design(config, 1e-6, layers, tied=True)


def write_youtu(design: ModelConfig) -> dict[str, Any]:
    return write_dense(design) | write_layout(design)


YOUTU = Family("youtu", "YoutuForCausalLM", read_youtu, write_youtu, map_deepseek)


def read_minicpm3(config: ConfigReader) -> dict[str, Any]:
    """MiniCPM3 (OpenBMB 2024): latent attention and a gated feed-forward, with multipliers of branches and logits."""
    # Branches are multiplied by `scale_depth / sqrt(layers)`, logits by `dim_model_base / hidden_size`; null is 1.
    config.get("pretraining_tp", 1)  # as in Llama
    width, heads = config.require_count("hidden_size"), config.require_count("num_attention_heads")
    depth = config.require_count("num_hidden_layers")
    branches, base = config.get_nullable("scale_depth", 1.4), config.get_nullable("dim_model_base", 256)
    branches = 1.0 if branches is None else branches / depth**0.5
    mixer = read_attention(config, "half", query_rank=768, value_dim=width // heads)
    return _common.rms_design(
        config,
        1e-5,
        _common.same_layers(config, mixer, _common.read_gated(config, bias=config.get("mlp_bias", False))),
        embedding={"multiplier": _common.multiplier(config.get("scale_emb", 12.0))},
        residual={"kind": "pre_norm", "multiplier": _common.multiplier(branches)},
        head={"tied": config.get("tie_word_embeddings", True), "scale": (width if base is None else base) / width},
    )


def write_minicpm3(design: ModelConfig) -> dict[str, Any]:
    branches = granite.branch_multiplier(design)
    return write_dense(design) | {
        "mlp_bias": design_parts.first_gated(design).bias,
        "scale_emb": design.embedding.multiplier or 1.0,
        "scale_depth": None if branches == 1.0 else float(f"{branches * design.depth**0.5:.12g}"),
        "dim_model_base": max(1, round(design.head.scale * design.width)),
    }


MINICPM3 = Family("minicpm3", "MiniCPM3ForCausalLM", read_minicpm3, write_minicpm3, map_deepseek)


DOTS1_WINDOW, DOTS1_FIRST = 4096, 62  # of layers from the second number on


def read_dots1(config: ConfigReader) -> dict[str, Any]:
    """dots.llm1 (rednote 2025): Qwen3's attention, and DeepSeek-V3's experts after some dense layers."""
    window, first = config.get_nullable("sliding_window", DOTS1_WINDOW), config.get("max_window_layers", DOTS1_FIRST)
    usual = [FULL if window is None or index < first else SLIDING for index in range(_layer_types.read_depth(config))]
    windows = _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)
    mixer = _common.read_attention(config, qk_norm="head", bias=config.get("attention_bias", False))
    groups = read_layers(config, mixer, read_sigmoid_routing(config, renormalize=False), False)
    feedforwards = [group["feedforward"] for group in groups for _ in range(group["repeat"])]
    mixers = [mixer | {"window": width} for width in windows]
    return _common.rms_design(config, 1e-6, _layer_types.layers_of(mixers, feedforwards))


def write_dots1(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | write_layers(design)
        | write_sigmoid_routing(design)
        | _common.written(design, "attention_bias", "sliding_window", "layer_types")
    )


# Llama's tensor names, and DeepSeek-V3's names of experts and multi-token modules.
map_dots1 = partial(_common.map_weights, map_feedforward=map_feedforward, modules=MODULES)
DOTS1 = Family("dots1", "Dots1ForCausalLM", read_dots1, write_dots1, map_dots1)


def read_solar_open(config: ConfigReader) -> dict[str, Any]:
    """Solar Open (Upstage 2026): grouped queries, biases of q, k and v or none, DeepSeek-V3's experts in all layers."""
    config.require("num_key_value_heads", int)
    config.expect("first_k_dense_replace", 0, default=0)
    config.expect("use_qk_norm", False, default=False)
    config.note("intermediate_size")  # of dense layers, which it lacks
    bias = "qkv" if config.get("attention_bias", False) else False
    mixer = _common.read_attention(config, 1e6, head_dim=128, partial_rotary_factor=1.0, bias=bias)
    feedforward = read_experts(config, read_sigmoid_routing(config))
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, feedforward))


def write_solar_open(design: ModelConfig) -> dict[str, Any]:
    experts = write_layers(design) | write_sigmoid_routing(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=1.0)
        | _common.without(experts, "intermediate_size", "first_k_dense_replace", "moe_layer_freq")
        | {"attention_bias": design_parts.first_attention(design).bias == "qkv"}
    )


SOLAR_OPEN = Family("solar_open", "SolarOpenForCausalLM", read_solar_open, write_solar_open, map_dots1)
