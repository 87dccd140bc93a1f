"""GLM-4 and 4.5, with ordinary attention and partial RoPE: gate and up in one matrix, or DeepSeek-V3's experts.

GLM-5.3-Flash has delta rules, latent attention with pooled indexers, and hyper-connections.
"""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, deepseek, deepseek_v4, kimi_linear
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL
from heddle.model.config import ModelConfig
from heddle.parts.mixers.kda import KDAConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.residuals.hyper_connections import HyperConnectionsConfig

ROTARY_FACTOR = 0.5  # if the config has none


def read_glm(config: ConfigReader) -> dict[str, Any]:
    """GLM-4 9B (Team GLM 2024): Llama with interleaved partial RoPE, and gate and up in one matrix."""
    # `attention_bias` applies to q, k and v.
    bias = "qkv" if config.get("attention_bias", True) else False
    mixer = _common.read_attention(config, partial_rotary_factor=ROTARY_FACTOR, bias=bias)
    mixer["position"]["layout"] = "interleaved"
    return _common.rms_design(config, 1.5625e-07, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_glm(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_decoder(design)
        | _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
        | {"attention_bias": design_parts.first_attention(design).bias == "qkv"}
    )


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The feed-forward, with gate and up in one matrix."""
    weights.add_module(f"{hf}.gate_up_proj", f"{heddle}.gate", f"{heddle}.up")
    weights.add_module(f"{hf}.down_proj", f"{heddle}.down")


GLM = Family("glm", "GlmForCausalLM", read_glm, write_glm, partial(_common.map_weights, map_feedforward=map_gated))


def read_glm4(config: ConfigReader) -> dict[str, Any]:
    """GLM-4 0414 (Zhipu AI 2025): GLM-4 with norms before and after each branch."""
    return read_glm(config) | {"residual": {"kind": "sandwich"}}


AFTER = {
    "post_self_attn_layernorm": "residual.after.mixer", "post_mlp_layernorm": "residual.after.feedforward",
}  # fmt: skip
map_glm4 = partial(_common.map_weights, names=_common.PRE_NORMS | AFTER, map_feedforward=map_gated)
GLM4 = Family("glm4", "Glm4ForCausalLM", read_glm4, write_glm, map_glm4)


def read_glm4_moe(config: ConfigReader) -> dict[str, Any]:
    """GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team 2025): partial RoPE, optional norms of q and k, DeepSeek-V3's experts."""
    config.require("num_key_value_heads", int)
    norm, bias = ("head" if config.get("use_qk_norm", False) else None), config.get("attention_bias", False) and "qkv"
    mixer = _common.read_attention(config, partial_rotary_factor=ROTARY_FACTOR, qk_norm=norm, bias=bias)
    layers = deepseek.read_layers(config, mixer, deepseek.read_sigmoid_routing(config), False)
    return _common.rms_design(config, 1e-5, layers)


def write_glm4_moe(design: ModelConfig) -> dict[str, Any]:
    mixer = design_parts.first_attention(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
        | deepseek.write_layers(design)
        | deepseek.write_sigmoid_routing(design)
        | {"attention_bias": mixer.bias == "qkv", "use_qk_norm": mixer.qk_norm is not None}
    )


GLM4_MOE = deepseek.with_modules("glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe, write_glm4_moe, deepseek.map_dots1)


LINEAR, INDEXED, OWN, SHARED = _layer_types.LINEAR, deepseek.INDEXED, deepseek.OWN, deepseek.SHARED
OLDER_TYPES = {FULL: INDEXED, "deepseek_sparse_attention": INDEXED}
DELTA = _common.Fields(
    heads=("linear_num_heads", 64), head_dim=("linear_head_dim", 128), conv_kernel=("linear_conv_kernel_dim", 4)
)
OLDER_DELTA = {"num_heads": "heads", "head_dim": "head_dim", "short_conv_kernel_size": "conv_kernel"}
BOUND = 5.0
INDEXER = deepseek.INDEXER | {
    "index_kpool_compress_gate": "pool_gates.weight", "index_kpool_compress_ape": "pool_bias",
}  # fmt: skip


def read_glm5_next(config: ConfigReader) -> dict[str, Any]:
    """GLM-5.3-Flash's text model (Z.ai 2026): delta rules, and in every fourth layer sparse latent attention.

    Its indexers pool keys; it has hyper-connections and no positions.
    """
    for name in ("mhc", "mla_use_nope", "index_kpool_compress", "index_kpool_always_select_tail"):
        config.expect(name, True, None)
    config.expect_all(qk_rope_head_dim=0, head_dim=0, output_router_logits=False, hidden_act="silu")
    config.ignore("first_k_dense_replace", "router_aux_loss_coef", "moe_router_dtype", "index_share_for_mtp_iteration")
    config.ignore("indexer_rope_interleave")
    eps, limit = config.get("rms_norm_eps", 1e-5), config.get("swiglu_limit", 10.0)
    block, top_k = config.get("index_kpool", 16), config.get("index_topk", 2048)
    if block < 2 or top_k < block or top_k % block:
        raise config.invalid("index_kpool", f"should be at least 2 and divide index_topk = {top_k}")
    indexer: dict[str, Any] = {"top_k": top_k // block, "block": block, "pool": "gated"}
    indexer |= {"heads": config.get("index_n_heads", 32), "head_dim": config.get("index_head_dim", 128)}
    latents = deepseek.read_latents(config, query_rank=1536) | {"rope_dim": None, "norm_eps": eps}
    if latents["query_rank"] is None:
        raise config.invalid("q_lora_rank", "its class projects queries from a latent; give its width")
    kinds = {LINEAR: _read_delta(config, eps), OWN: latents | {"indexer": indexer}}
    kinds[SHARED] = latents | {"shared_index": True}
    routing = deepseek.read_sigmoid_routing(config)
    clamped = {"activation": "swiglu_limited", "limit": limit}
    feedforwards = [each | clamped for each in deepseek.read_feedforwards(config, routing, dense=3, bias=False)]
    residual = {"kind": "hyper_connections", **deepseek_v4.STREAMS.read(config), "norm_weight": False}
    layers = _layer_types.layers_of([kinds[kind] for kind in _read_kinds(config)], feedforwards)
    return _common.rms_design(config, 1e-5, layers, residual=residual | {"whole_bias": True})


def _read_kinds(config: ConfigReader) -> list[str]:
    """For each layer, whether it has a delta rule, an indexer of its own, or the selection of the layer before."""
    depth = _layer_types.read_depth(config)
    usual = [LINEAR if index % 4 != 3 else INDEXED for index in range(depth)]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, INDEXED, *OLDER_TYPES))
    indexers = _layer_types.read_kinds(config, "indexer_types", deepseek.usual_indexers(config), (OWN, SHARED))
    kinds = [LINEAR if kind == LINEAR else indexer for kind, indexer in zip(types, indexers, strict=True)]
    if any(kind == SHARED and before != OWN for before, kind in zip([LINEAR, *kinds], kinds, strict=False)):
        raise config.invalid("indexer_types", "in transformers a layer shares only the selection of the layer before")
    return kinds


def _read_delta(config: ConfigReader, eps: float) -> dict[str, Any]:
    """The delta rule. Fields of `linear_attn_config` take precedence, as in transformers."""
    table = config.get("linear_attn_config", dict[str, Any]())
    bound = table.get("gate_lower_bound", config.get_nullable("linear_lower_bound", -BOUND))
    if table and table.get("safe_gate", True) and bound is None:
        bound = -BOUND
    if bound is not None and not bound < 0:
        raise config.invalid("linear_lower_bound", "should be below 0, or null")
    older = {own: table[name] for name, own in OLDER_DELTA.items() if name in table}
    fields = DELTA.read(config) | older | {"decay_bound": None if bound is None else -bound}
    return {"kind": "kda", **fields, "norm": {"kind": "rms", "eps": eps}}


def write_glm5_next(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_glm5_next` reads."""
    delta, latents = design_parts.first_mixer(design, KDAConfig(heads=1)), design_parts.first_latent_attention(design)
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    indexers = [getattr(mixer, "indexer", None) for mixer in mixers]
    indexer = next((each for each in indexers if each), IndexerConfig(top_k=1, heads=1, head_dim=2, block=2))
    moe, dense = design_parts.first_moe(design), design_parts.first_gated(design)
    clamped = moe if any(design_parts.has_experts(design)) else dense
    residual = design.residual if isinstance(design.residual, HyperConnectionsConfig) else HyperConnectionsConfig()
    fields = deepseek.write_feedforwards(design, {}) | deepseek.write_sigmoid_routing(design)
    return {
        **_common.write_common(design),
        **deepseek.write_latents(latents),
        **_common.without(fields, "scoring_func", "topk_method", "num_nextn_predict_layers"),
        **DELTA.write(delta),
        **deepseek_v4.STREAMS.write(residual),
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "swiglu_limit": clamped.limit or 10.0,
        "linear_lower_bound": None if delta.decay_bound is None else -delta.decay_bound,
        "layer_types": [LINEAR if isinstance(mixer, KDAConfig) else INDEXED for mixer in mixers],
        "indexer_types": [SHARED if getattr(mixer, "shared_index", False) else OWN for mixer in mixers],
        "index_topk": indexer.top_k * indexer.block,
        "index_n_heads": indexer.heads,
        "index_head_dim": indexer.head_dim,
        "index_kpool": indexer.block,
        "index_kpool_always_select_tail": True,
    }


def map_glm5_next(design: ModelConfig, weights: WeightMap) -> None:
    """Names of published files: DeepSeek's of latents and experts, Kimi's of delta rules, V4's of streams."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design):
        attention, mixer = f"{hf}.self_attn", f"{heddle}.mixer"
        if isinstance(layer.mixer, KDAConfig):
            weights.add_modules(attention, mixer, kimi_linear.DELTA | {"A_log": "decay.rate"})
            kimi_linear.map_convolutions(weights, attention, mixer)
        else:
            deepseek.map_attention(weights, attention, mixer, getattr(layer.mixer, "heads", 1))
            weights.add_modules(f"{attention}.indexer", f"{mixer}.indexer", INDEXER)
        deepseek.map_feedforward(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)
        for branch, own in (("attn", "mixer"), ("ffn", "feedforward")):
            deepseek_v4.map_streams(weights, f"{hf}.hc_{branch}", f"{heddle}.residual.maps.{own}", design.residual)


GLM5_NEXT = Family(
    "glm5_next_text", "Glm5NextForCausalLM", read_glm5_next, write_glm5_next, map_glm5_next,
    ignored_tensors=("model.layers.{depth}.",),
)  # fmt: skip
