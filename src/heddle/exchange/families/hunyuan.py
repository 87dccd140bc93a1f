"""Tencent's Hunyuan, dense and with experts, Hy3 and Hy4."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, deepseek, deepseek_v4, exaone
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.exchange.rope import read_rope, read_rope_table
from heddle.model.config import ModelConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.residuals.hyper_connections import HyperConnectionsConfig
from heddle.parts.scalings.ntk import NtkConfig

ALPHA = "alpha"
UNUSED_FIELDS = frozenset({"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})


def read_hunyuan(config: ConfigReader) -> dict[str, Any]:
    """Hunyuan dense models and Hunyuan-MT (Tencent 2025): Llama's decoder with norms of q and k after the rotation.

    A `rope_type: dynamic` with `alpha` is `ntk` with the factor alpha, whatever the length of the text; `factor` and
    the other fields beside `alpha` are ignored, as in transformers.
    """
    layers = _common.same_layers(config, read_mixer(config), _common.read_gated(config))
    return _common.rms_design(config, 1e-5, layers)


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The attention of every layer. `attention_bias` gives biases to all four projections."""
    heads, bias = _common.read_heads(config), config.get("attention_bias", False)
    config.expect("use_qk_norm", True, None)
    config.get("pretraining_tp", 1)  # as in Llama
    config.expect("use_cla", False, None)
    config.note("cla_share_factor", "org_vocab_size")
    rope = _read_rope(config, heads["head_dim"])
    return _common.attention(config, heads, rope, qk_norm="head", norm_after_rotation=True, bias=bias)


def _read_rope(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    table = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    is_table = isinstance(table, dict) and "dynamic" in (table.get("rope_type"), table.get("type"))
    if not (is_table and table.get(ALPHA)):
        return read_rope(config, head_dim)
    alpha = ConfigReader(table, f"{config.source}, rope_parameters").require(ALPHA, float)
    config.unread -= {"rope_scaling", "rope_parameters"}
    plain = {name: value for name, value in table.items() if name not in UNUSED_FIELDS | {ALPHA, "type"}}
    theta = config.get("rope_theta", 10000.0)
    rope = read_rope_table(config, plain | {"rope_type": "default"}, head_dim, theta)
    return rope | {"scaling": {"kind": "ntk", "factor": alpha}}


def write_hunyuan(design: ModelConfig) -> dict[str, Any]:
    data = _common.write_decoder(design)
    scaling = design_parts.rope_of(design_parts.first_attention(design)).scaling
    if isinstance(scaling, NtkConfig) and scaling.original_length is None:
        data["rope_parameters"] |= {"factor": 1.0, ALPHA: scaling.factor}
        data["rope_scaling"] |= {"factor": 1.0, ALPHA: scaling.factor}
    return data


map_attention = partial(_common.map_attention, norms=("query_layernorm", "key_layernorm"))
map_hunyuan = partial(_common.map_weights, map_mixer=map_attention)


HUNYUAN = Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", read_hunyuan, write_hunyuan, map_hunyuan)


def read_hunyuan_moe(config: ConfigReader) -> dict[str, Any]:
    """Hunyuan-A13B (Tencent 2025): the dense models' attention, softmax experts and a shared one in every layer."""
    # `num_experts` and others may be lists with one number for each layer.
    depth = _layer_types.read_depth(config)
    config.expect_all(use_mixed_mlp_moe=True, moe_layer_num_skipped=0)
    config.get("output_router_logits", False)
    hidden = config.require("intermediate_size", int)
    experts = {
        "kind": "moe",
        "experts": _read_equal(config, "num_experts", depth, 1),
        "top_k": _read_equal(config, "moe_topk", depth, 1),
        "hidden": hidden,
        "activation": _common.read_activation(config),
        "shared": 1,
    }
    for name, value in (("moe_intermediate_size", hidden), ("num_shared_expert", 1)):
        if _read_equal(config, name, depth, value) != value:
            raise config.invalid(name, f"models of this family have {value}")
    return _common.rms_design(config, 1e-5, _common.same_layers(config, read_mixer(config), experts))


def _read_equal(config: ConfigReader, name: str, depth: int, default: int) -> int:
    """A number, or the equal entry of a list with one for each layer."""
    value = config.optional(name)
    values = value if isinstance(value, list) else [default if value is None else value] * depth
    if len(values) != depth or len(set(values)) != 1 or type(values[0]) is not int:
        raise config.invalid(name, f"should be a whole number, or {depth} equal ones")
    number: int = values[0]
    return number


def write_hunyuan_moe(design: ModelConfig) -> dict[str, Any]:
    moe = design_parts.first_moe(design)
    return write_hunyuan(design) | {
        "num_experts": moe.experts,
        "moe_topk": moe.top_k,
        "intermediate_size": moe.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
    }


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    if f"{heddle}.router.weight" in weights.shapes:
        _moe.map_experts(weights, hf, heddle)
        weights.add_tensor(f"{hf}.gate.wg.weight", f"{heddle}.router.weight")
        del weights.rules[f"{hf}.gate.weight"]
        _common.map_gated(weights, f"{hf}.shared_mlp", f"{heddle}.shared")


map_hunyuan_moe = partial(map_hunyuan, map_feedforward=_map_experts)


HUNYUAN_MOE = Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read_hunyuan_moe, write_hunyuan_moe, map_hunyuan_moe)


NAMES = exaone.NAMES | {"routed_scaling_factor": "router_scaling_factor"}
ROUTING = {"routing": "sigmoid", "renormalize": True, "bias_update": 0.0}
# Of the first files: what the class of transformers always has.
ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")


def read_hy_v3(config: ConfigReader) -> dict[str, Any]:
    """Hy3 (Tencent 2026): Qwen3's attention, and DeepSeek-V3's experts with gates that always sum to a constant."""
    # `mlp_bias` is of dense layers and shared experts.
    config.names = NAMES
    for name in ALWAYS:
        config.expect(name, None, True)
    config.ignore("enable_moe_fp32_combine", "num_nextn_predict_layers")  # the first one rounds a sum
    bias = config.get("attention_bias", False)
    mixer = _common.read_attention(config, 11_158_840.0, head_dim=128, qk_norm="head", bias=bias)
    config.expect("first_k_dense_replace", None, 1)
    feedforwards = deepseek.read_feedforwards(config, ROUTING, 1, config.get("mlp_bias", False))
    return _common.rms_design(config, 1e-5, _layer_types.layers_of([mixer] * len(feedforwards), feedforwards))


def write_hy_v3(design: ModelConfig) -> dict[str, Any]:
    moe, sparse = design_parts.first_moe(design), any(design_parts.has_experts(design))
    bias = moe.bias is not False if sparse else design_parts.first_gated(design).bias
    fields = _common.write_decoder(design) | deepseek.write_feedforwards(design, NAMES) | {"mlp_bias": bias}
    return _common.without(fields, "aux_loss_alpha", "seq_aux")


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_mlp", "router.gate")
    weights.add_tensor(f"{hf}.expert_bias", f"{heddle}.router.expert_bias")


map_hy_v3 = partial(_common.map_weights, map_feedforward=_map_feedforward)


HY_V3 = Family(
    "hy_v3", "HYV3ForCausalLM", read_hy_v3, write_hy_v3, map_hy_v3, ignored_tensors=("model.layers.{depth}.",)
)


OWN, SHARED = deepseek.OWN, deepseek.SHARED
STREAMS = _common.Fields(streams=("hc_mult", 4), magnitude=("hc_magnitude", 2.0), eps=("hc_eps", 1e-6))
LATENTS = deepseek.LATENTS | {"linear_gate": "gate", "learnable_sink_param": "sink"}
INDEXER = ("wq_b", "q"), ("wk", "k"), ("k_norm", "k_norm")  # whose rotated dims are last
WRITTEN = {  # by transformers, and in published files
    "model.hc_pre.hc_head.": "model.hc_head.", "hc_pre.hc_attn_layer": "hc_attn_layer.hc_pre",
    "hc_pre.hc_mlp_layer": "hc_mlp_layer.hc_pre",
    "mlp.linear_gate": "mlp.gate_proj", "mlp.shared_experts.linear_gate": "mlp.shared_experts.gate_proj",
}  # fmt: skip


def read_hy_v4(config: ConfigReader) -> dict[str, Any]:
    """Hy4 (Tencent 2026): latent attention with sinks, gates and shared selections, and streams that are not mixed.

    Layers that predict further tokens are ignored; they do not change the next token's logits.
    """
    config.expect_all(hidden_act="silu", output_router_logits=False)
    config.ignore("learnable_sink_init")  # of training from scratch
    norm = {"kind": "layer", "eps": config.get("rms_norm_eps", 1e-5)}
    mixer = deepseek.read_attention(config, "half") | {"gate": "channel", "sink": True}
    mixer["indexer"] = deepseek.read_indexer(config, heads=16) | {"norm": norm}
    if mixer["query_rank"] is None:
        raise config.invalid("q_lora_rank", "its class projects queries from a latent; give its width")
    limited = {"activation": "swiglu_limited", "limit": config.get("swiglu_limit", 10.0), "shared_limit": False}
    layers = deepseek.read_listed_layers(config, mixer, dense=1, **limited)
    usual = [OWN if not index or index % 4 == 1 else SHARED for index in range(_layer_types.read_depth(config))]
    types = _layer_types.read_kinds(config, "indexer_types", usual, (OWN, SHARED))
    residual = {"kind": "hyper_connections", **STREAMS.read(config), "mixing": False, "norm_weight": False}
    residual |= {"whole_bias": True, "collapse": "weighted"}
    return _common.rms_design(config, 1e-5, deepseek.with_shared_indexes(layers, types), residual=residual)


def write_hy_v4(design: ModelConfig) -> dict[str, Any]:
    residual = design.residual if isinstance(design.residual, HyperConnectionsConfig) else HyperConnectionsConfig()
    fields = _common.without(deepseek.write_dsa(design), *deepseek.UNKNOWN)
    limit = {"swiglu_limit": design_parts.first_moe(design).limit or 10.0, "hidden_act": "silu"}
    return fields | STREAMS.write(residual) | limit


def rolled(heads: int, rotated: int) -> TensorTransform:
    """The rows of each head, whose last `rotated` ones are heddle's first."""

    def turned(rows: Tensor, by: int) -> Tensor:
        return torch.roll(rows.unflatten(0, (heads, -1)), by, 1).flatten(0, 1)

    return TensorTransform(
        lambda parameters: turned(parameters[0], -rotated), lambda tensor, shapes: [turned(tensor, rotated)]
    )


def map_hy_v4(design: ModelConfig, weights: WeightMap) -> None:
    """The published names, and those that transformers writes."""
    _common.map_embedding_and_head(design, weights)
    deepseek_v4.map_streams(weights, "model.hc_head.hc_head", "final_norm.maps")
    for hf, heddle, layer in _common.named_layers(design):
        attention, mixer, config = f"{hf}.self_attn", f"{heddle}.mixer", layer.mixer
        deepseek.map_attention(weights, attention, mixer, getattr(config, "heads", 1), LATENTS)
        if isinstance(config, LatentAttentionConfig) and isinstance(config.indexer, IndexerConfig):
            for name, own in INDEXER:
                turned = rolled(config.indexer.heads or 1 if own == "q" else 1, config.rope_dim or 0)
                weights.add_module(f"{attention}.indexer.{name}", f"{mixer}.indexer.{own}", transform=turned)
        weights.add_module(f"{attention}.indexer.weights_proj", f"{mixer}.indexer.weights")
        deepseek.map_feedforward(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        weights.use_alternatives([f"{hf}.mlp.experts.gate_up_proj", f"{hf}.mlp.experts.down_proj"])
        _common.map_pre_norms(weights, hf, heddle)
        for branch, own in (("attn", "mixer"), ("mlp", "feedforward")):
            deepseek_v4.map_streams(weights, f"{hf}.hc_{branch}_layer.hc_pre.hc", f"{heddle}.residual.maps.{own}")
    for name in list(weights.rules):
        for theirs, published in WRITTEN.items():
            if published in name:
                weights.add_renamed(name.replace(published, theirs), name)


HY_V4 = Family("hy_v4", "HYV4ForCausalLM", read_hy_v4, write_hy_v4, map_hy_v4, ignored_tensors=("model.mtp_layers.",))
