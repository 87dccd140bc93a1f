"""What DeepSeek-V2, V3 and GLM-4 share: dense layers, then routed and shared experts. V2 and V3: latent attention."""

from collections.abc import Mapping
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import ModuleNames, WeightMap, interleaved_by_group
from heddle.exchange.rope import read_rope, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.feedforwards.moe import MoEConfig
from heddle.parts.mixers.latent_attention import LatentAttentionConfig

DENSE, SPARSE = "dense", "sparse"  # in `mlp_layer_types`

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
    config.expect("head_dim", rope_dim, None)  # written as the width of the rotated part
    return read_latents(config, query_rank, value_dim) | {"position": _read_rope(config, rope_dim) | {"layout": layout}}


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


def _read_rope(config: ConfigReader, rope_dim: int) -> dict[str, Any]:
    table = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    if table.get("mscale_all_dim") and (table.get("attention_factor") or not table.get("mscale")):
        raise config.invalid(
            "rope_parameters", "mscale_all_dim is supported only with mscale, and without attention_factor"
        )
    rope = read_rope(config, rope_dim)
    if "rotary_dim" in rope:
        raise config.invalid("partial_rotary_factor", "all dims of qk_rope_head_dim are rotated; leave it out")
    return rope


def read_layers(
    config: ConfigReader, mixer: dict[str, Any], routing: dict[str, Any], bias: bool
) -> list[dict[str, Any]]:
    """Dense layers, then layers with experts. bias: of dense layers and shared experts; routed experts have none."""
    config.expect("moe_layer_freq", 1, default=1)
    depth, dense = config.require("num_hidden_layers", int), _common.read_gated(config, bias=bias)
    dense_layers = min(config.require("first_k_dense_replace", int), depth)
    groups = ((dense_layers, dense), (depth - dense_layers, read_experts(config, routing, bias)))
    return [{"repeat": count, "mixer": mixer, "feedforward": feedforward} for count, feedforward in groups if count]


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
        "experts": config.require("n_routed_experts", int),
        "top_k": config.require("num_experts_per_tok", int),
        "hidden": config.require("moe_intermediate_size", int),
        "activation": _common.read_activation(config),
        "shared": config.require("n_shared_experts", int) if shared else None,
        "scale": config.require("routed_scaling_factor", float) if shared else config.get("routed_scaling_factor", 1.0),
        "bias": "shared" if bias else False,
        "aux_loss": config.get("aux_loss_alpha", 0.0) or None,
        **routing,
    }


def read_sigmoid_routing(config: ConfigReader, renormalize: bool = True) -> dict[str, Any]:
    """Routing by sigmoid scores within groups, of which there is one by default.

    The balancing bias keeps its loaded value (`bias_update` 0). renormalize: the family's default.
    """
    for name in (MODULES.count_field, "num_mtp_layers"):
        config.optional(name)
    config.expect("scoring_func", "sigmoid", default="sigmoid")
    config.expect("topk_method", "noaux_tc", default="noaux_tc")
    return {
        "routing": "sigmoid",
        "renormalize": config.get("norm_topk_prob", renormalize),
        "groups": config.get("n_group", 1),
        "top_groups": config.get("topk_group", 1),
        "bias_update": 0.0,
    }


def write_sigmoid_routing(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_sigmoid_routing` reads."""
    moe = design_parts.first_moe(design)
    return {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": moe.groups or 1,
        "topk_group": moe.top_groups or 1,
        "norm_topk_prob": moe.renormalize,
        "num_nextn_predict_layers": 0,
    }


def write_common(design: ModelConfig) -> dict[str, Any]:
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
    moe, dense = design_parts.first_moe(design), design_parts.first_gated(design)
    is_moe_layer = design_parts.has_experts(design)
    dense_layers = is_moe_layer.index(True) if any(is_moe_layer) else len(is_moe_layer)
    activation = moe.activation if any(is_moe_layer) else dense.activation
    loss = {} if moe.aux_loss is None else {"aux_loss_alpha": moe.aux_loss, "seq_aux": True}
    return {
        "rms_norm_eps": design_parts.norm_eps(design),
        "hidden_act": design_parts.HF_ACTIVATIONS[activation or "silu"],
        "intermediate_size": dense.hidden,
        "first_k_dense_replace": dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.hidden,
        "n_shared_experts": shared_experts(moe),
        "routed_scaling_factor": moe.scale,
        **loss,
    }


def write_feedforwards(design: ModelConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The fields that `read_feedforwards` reads, by the family's own `names`, and the epsilon of the norms."""
    types = [SPARSE if is_sparse else DENSE for is_sparse in design_parts.has_experts(design)]
    fields = write_layers(design) | {"mlp_layer_types": types}
    for name in ("first_k_dense_replace", "moe_layer_freq"):
        del fields[name]
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
        | {"rms_norm_eps": design_parts.norm_eps(design)}
    )


def shared_experts(moe: MoEConfig) -> int:
    """The width of the shared expert as a number of routed experts."""
    return max((moe.shared_hidden or moe.hidden) // moe.hidden, 1)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
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


def map_attention(weights: WeightMap, hf: str, heddle: str, heads: int) -> None:
    """The projections of latent attention; those to keys and to values are one tensor, interleaved by head."""
    weights.add_module(f"{hf}.q_proj", f"{heddle}.q")
    weights.add_module(f"{hf}.q_a_proj", f"{heddle}.q_down")
    weights.add_module(f"{hf}.q_a_layernorm", f"{heddle}.q_norm")
    weights.add_module(f"{hf}.q_b_proj", f"{heddle}.q_up")
    weights.add_module(f"{hf}.kv_a_proj_with_mqa", f"{heddle}.kv_down", f"{heddle}.k_rope")
    weights.add_module(f"{hf}.kv_a_layernorm", f"{heddle}.kv_norm")
    weights.add_module(f"{hf}.kv_b_proj", f"{heddle}.k_up", f"{heddle}.v_up", transform=interleaved_by_group(heads))
    weights.add_module(f"{hf}.o_proj", f"{heddle}.out")
