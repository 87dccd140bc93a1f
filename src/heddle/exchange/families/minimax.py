"""MiniMax-01, M1, M2 and M3: lightning attention, partial RoPE or blocks of an indexer, and experts."""

import math
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, _moe, glm, mistral
from heddle.exchange.family import CONCATENATED, STACKED, Family, WeightMap, interleaved_by_group
from heddle.exchange.rope import FULL, read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.retention import RetentionConfig
from heddle.parts.modules.indexer import IndexerConfig
from heddle.parts.residuals.deep_norm import DeepNormConfig

LINEAR = _layer_types.LINEAR

LIGHTNING_EPS = 1e-6  # of the norm after lightning attention, whatever `rms_norm_eps` says
BRANCHES = {"alpha": "attn_alpha_factor", "multiplier": "attn_beta_factor"}
FEEDFORWARD = {"feedforward_alpha": "mlp_alpha_factor", "feedforward_multiplier": "mlp_beta_factor"}


def read_minimax(config: ConfigReader) -> dict[str, Any]:
    """MiniMax-01 and MiniMax-M1, with transformers' names (MiniMax 2025): lightning attention between softmax layers.

    A layer is `N(α x + β f(x))` for each branch, and the embedding has a norm. The decays follow from the number of
    heads and the layer; stored slopes are ignored. Published files give `rotary_dim`, as the paper does; transformers
    ignores it and rotates whole heads.
    """
    # The factors of both kinds of attention must be the same, since a design has one residual.
    depth = _layer_types.read_depth(config)
    usual = [LINEAR if index % 2 else FULL for index in range(depth)]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    config.expect("router_jitter_noise", 0.0, default=0.0)
    config.note("block_size")  # the length of the blocks that sums are computed in
    config.require("num_key_value_heads", int)
    heads = _common.read_heads(config)
    experts, rope = _moe.read_experts(config, depth), read_position(config, heads["head_dim"], 1e6)
    attention = _common.attention(config, heads, rope, window=config.optional("sliding_window"))
    lightning = {
        "kind": "retention",
        "heads": heads["heads"],
        "head_dim": heads["head_dim"],
        "activation": experts["activation"],
        "gate": "sigmoid",
        "norm": {"kind": "rms", "eps": LIGHTNING_EPS},
        "output_norm": "projection",
    }
    mixers = [
        attention if kind == FULL else lightning | {"decay": _decays(heads["heads"], index, depth)}
        for index, kind in enumerate(types)
    ]
    residual = {"kind": "deep_norm", **_read_factors(config, types)}
    layers = _layer_types.layers_of(mixers, experts)
    return _common.rms_design(config, 1e-5, layers, residual=residual, embedding={"norm": True})


def read_position(config: ConfigReader, head_dim: int, theta: float) -> dict[str, Any]:
    """Published files have `rotary_dim`; a `partial_rotary_factor` beside it takes precedence, as in transformers."""
    rotary_dim = config.get("rotary_dim", head_dim)
    if not 0 < rotary_dim <= head_dim:
        raise config.invalid("rotary_dim", f"should be above 0 and at most head_dim = {head_dim}")
    return read_rope(config, head_dim, theta, partial_rotary_factor=rotary_dim / head_dim)


def _read_factors(config: ConfigReader, types: list[str]) -> dict[str, float]:
    """The fields of the residual."""
    kinds = {LINEAR: "linear", FULL: "full"}
    first, *others = dict.fromkeys([*types, LINEAR, FULL])
    factors = {field: config.get(name, 1.0) for field, name in FEEDFORWARD.items()}
    for field, name in BRANCHES.items():
        factors[field] = config.get(f"{kinds[first]}_{name}", 1.0)
        for other in others:
            value = config.get(f"{kinds[other]}_{name}", 1.0)
            if other in types and value != factors[field]:
                reason = f"a design has one residual, so it should be {kinds[first]}_{name} = {factors[field]}"
                raise config.invalid(f"{kinds[other]}_{name}", reason)
    return factors


def _decays(heads: int, layer: int, depth: int) -> list[float]:
    """The factor of each head of a layer: slopes of ALiBi's series, smaller in later layers."""
    scale = 1 - layer / (depth - 1 + 1e-5) + 1e-5
    return [math.exp(-(2.0 ** (-8 * (head + 1) / heads)) * scale) for head in range(heads)]


def write_minimax(design: ModelConfig) -> dict[str, Any]:
    mixers, attention, residual = design_parts.mixers(design), design_parts.first_attention(design), design.residual
    lightning = next((mixer for mixer in mixers if isinstance(mixer, RetentionConfig)), None)
    is_deep = isinstance(residual, DeepNormConfig)
    factors = {field: getattr(residual, field) if is_deep else 1.0 for field in (*BRANCHES, *FEEDFORWARD)}
    fields = _common.write_common(design) | _common.write_attention(design)
    if lightning is not None and attention not in mixers:
        fields |= {"num_attention_heads": lightning.heads, "head_dim": lightning.head_dim}
        fields |= {"num_key_value_heads": lightning.heads}
    if (rotary_dim := design_parts.rope_of(attention).rotary_dim) is not None:
        fields |= {"rotary_dim": rotary_dim}
    return (
        fields
        | {f"{kind}_{name}": factors[field] for field, name in BRANCHES.items() for kind in ("linear", "full")}
        | {name: factors[field] for field, name in FEEDFORWARD.items()}
        | _moe.write_experts(design)
        | {"layer_types": _layer_types.types_of(design, RetentionConfig), "sliding_window": attention.window}
        | {"rms_norm_eps": design_parts.norm_eps(design), "router_jitter_noise": 0.0}
        | _moe.write_aux_loss(design, design_parts.first_moe(design))
    )


def map_minimax(design: ModelConfig, weights: WeightMap) -> None:
    """Mixtral's names of attention and experts.

    The files' norm before a branch is heddle's norm after the previous branch.
    """
    weights.add_module("model.embed_tokens", "embed")
    weights.add_module("model.layers.0.input_layernorm", "embed.norm")
    if not design.head.tied:
        weights.add_module("lm_head", "head")
    layers = _common.named_layers(design)
    after = [*(f"{hf}.input_layernorm" for hf, *_ in layers[1:]), "model.norm"]
    for (hf, heddle, layer), norm in zip(layers, after, strict=True):
        if isinstance(layer.mixer, RetentionConfig):
            _map_lightning(weights, f"{hf}.self_attn", f"{heddle}.mixer", layer.mixer.heads)
        else:
            _common.map_attention(weights, hf, heddle)
        mistral.map_experts(weights, f"{hf}.block_sparse_moe", f"{heddle}.feedforward")
        weights.add_module(f"{hf}.post_attention_layernorm", f"{heddle}.residual.norms.mixer")
        weights.add_module(norm, f"{heddle}.residual.norms.feedforward")


def _map_lightning(weights: WeightMap, hf: str, heddle: str, heads: int) -> None:
    """One projection of q, k and v, head by head."""
    projections = (f"{heddle}.{name}" for name in "qkv")
    weights.add_module(f"{hf}.qkv_proj", *projections, transform=interleaved_by_group(heads))
    weights.add_modules(hf, heddle, {"out_proj": "out", "output_gate": "gate", "norm": "norm"})


MINIMAX = Family(
    "minimax",
    "MiniMaxForCausalLM",
    read_minimax,
    write_minimax,
    map_minimax,
    ignored_tensors=("model.layers.*.self_attn.slope_rate", "model.layers.*.self_attn.*_decay"),
)


SOFTMAX = 1  # in `attn_type_list`


def read_m2(config: ConfigReader) -> dict[str, Any]:
    """MiniMax-M2 (MiniMax 2025): norms over whole q and k projections, partial RoPE, experts by sigmoid scores.

    Its balancing loss (`output_router_logits`) is refused, since it differs from heddle's loss of sigmoid scores.
    """
    depth = _layer_types.read_depth(config)
    config.require("num_key_value_heads", int)
    heads = _common.read_heads(config, head_dim=128)
    config.expect_all(attn_type_list=[SOFTMAX] * depth, use_qk_norm=True, qk_norm_type="per_layer")
    mixer = _common.attention(config, heads, read_position(config, heads["head_dim"], 5e6), qk_norm="projection")
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, _read_experts(config, depth)))


def _read_experts(config: ConfigReader, depth: int) -> dict[str, Any]:
    """The feed-forward of every layer; `intermediate_size` is the width of one expert."""
    config.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    config.expect_all(output_router_logits=False, router_jitter_noise=0.0, scoring_func="sigmoid")
    config.expect_all(use_routing_bias=True, shared_intermediate_size=0)
    return _moe.read_experts(config, depth) | {"routing": "sigmoid", "bias_update": 0.0}


def write_m2(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=1.0)
        | _moe.write_experts(design)
        | {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "rms_norm_eps": design_parts.norm_eps(design),
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
        }
    )


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    mistral.map_experts(weights, hf, heddle)
    weights.add_tensor(f"{hf}.e_score_correction_bias", f"{heddle}.router.expert_bias")


map_m2 = partial(_common.map_weights, map_feedforward=_map_experts, feedforward="block_sparse_moe")


MINIMAX_M2 = Family(
    "minimax_m2", "MiniMaxM2ForCausalLM", read_m2, write_m2, map_m2, ignored_tensors=("model.layers.{depth}.",)
)


SPARSE_LAYER = "minimax_m3_sparse"
M3_INDEX = _common.Fields(
    heads=("index_n_heads", 4), head_dim=("index_head_dim", 128), block=("index_block_size", 128),
    top_k=("index_topk_blocks", 16), local=("index_local_blocks", 1),
)  # fmt: skip
M3_TABLE = {  # of `sparse_attention_config`
    "heads": "sparse_num_index_heads", "head_dim": "sparse_index_dim", "block": "sparse_block_size",
    "top_k": "sparse_topk_blocks", "local": "sparse_local_block",
}  # fmt: skip
M3_EXPERTS = _common.Fields(
    experts=("num_local_experts", 128, "num_experts"), top_k=("num_experts_per_tok", 4),
    hidden=("intermediate_size", 3072), shared_hidden=("shared_intermediate_size", 3072),
    scale=("routed_scaling_factor", 2.0),
)  # fmt: skip
DEFAULT_INDEXER = IndexerConfig(top_k=16, heads=4, head_dim=128, block=128, local=1)
CLAMPED = _common.Fields(limit=("swiglu_limit", 7.0), alpha=("swiglu_alpha", 1.702))


def read_m3(config: ConfigReader) -> dict[str, Any]:
    """MiniMax M3 (MiniMax 2026): an indexer selects blocks for each key head; Gemma's norms, clamped SwiGLU.

    `partial_rotary_factor` says how many dims are rotated; `rotary_dim` is ignored, as in transformers. The balancing
    loss is refused as in M2, and layers that predict further tokens are ignored.
    """
    depth, heads = _layer_types.read_depth(config), _common.read_heads(config, head_dim=128)
    table = config.get("sparse_attention_config", dict[str, Any]())
    config.ignore("rotary_dim", "hidden_act", "router_aux_loss_coef")
    config.expect_all(output_router_logits=False, router_jitter_noise=0.0)
    usual = _by_flags(table.get("sparse_attention_freq", [0] * depth), FULL, SPARSE_LAYER)
    types = _layer_types.read_kinds(config, "layer_types", usual, (FULL, SPARSE_LAYER))
    usual = _by_flags(config.get("moe_layer_freq", [1] * depth), DENSE, SPARSE)
    kinds = _layer_types.read_kinds(config, "mlp_layer_types", usual, (DENSE, SPARSE))
    if len(types) != depth or len(kinds) != depth:
        raise config.invalid("num_hidden_layers", "the lists of its layers have another length")
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-6), "offset": 1.0, "cast": "after"}
    index = M3_INDEX.read(config) | {own: table[name] for own, name in M3_TABLE.items() if name in table}
    rope = read_rope(config, heads["head_dim"], 5e6, partial_rotary_factor=1.0)
    mixer = _common.attention(config, heads, rope, qk_norm="head")
    indexed = mixer | {"indexer": index | {"per_head": True, "norm": norm, "query_norm": True}}
    activation = {"activation": "swiglu_clamped", **CLAMPED.read(config)}
    dense = {"kind": "gated", "hidden": config.get("dense_intermediate_size", 12288), **activation}
    experts = {"kind": "moe", "routing": "sigmoid", "bias_update": 0.0, "shared": 1, **M3_EXPERTS.read(config)}
    feedforwards = {DENSE: dense, SPARSE: experts | activation}
    mixers = [indexed if kind == SPARSE_LAYER else mixer for kind in types]
    return _common.design_fields(config, norm, _layer_types.layers_of(mixers, [feedforwards[kind] for kind in kinds]))


def _by_flags(flags: list[Any], off: str, on: str) -> list[str]:
    return [on if flag else off for flag in flags]


def write_m3(design: ModelConfig) -> dict[str, Any]:
    mixers, moe, dense = design_parts.mixers(design), design_parts.first_moe(design), design_parts.first_gated(design)
    clamped = moe if any(design_parts.has_experts(design)) else dense
    indexed = [getattr(mixer, "indexer", None) for mixer in mixers]
    indexer = next((each for each in indexed if each is not None and each.heads is not None), DEFAULT_INDEXER)
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=1.0)
        | M3_INDEX.write(indexer)
        | M3_EXPERTS.write(moe)
        | CLAMPED.write(clamped)
        | {
            "dense_intermediate_size": dense.hidden,
            "layer_types": _by_flags(indexed, FULL, SPARSE_LAYER),
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
        }
        | _common.written(design, "mlp_layer_types", "rms_norm_eps")
    )


M3_INDEXER = {"q_proj": "q", "k_proj": "k", "q_norm": "q_norm", "k_norm": "k_norm"}


def map_m3(design: ModelConfig, weights: WeightMap) -> None:
    """Stacks of experts, and gate and up in one matrix; published files have other names for mixtures and indexers."""
    _common.map_weights(design, weights, map_feedforward=_map_m3_feedforward)
    for hf, heddle, _ in _common.named_layers(design):
        weights.add_modules(f"{hf}.self_attn.indexer", f"{heddle}.mixer.indexer", M3_INDEXER)
        _map_m3_published(weights, hf, heddle)


def _map_m3_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    if f"{heddle}.router.weight" not in weights.shapes:
        glm.map_gated(weights, hf, heddle)
        return
    weights.add_tensor(f"{hf}.gate.weight", f"{heddle}.router.weight")
    weights.add_tensor(f"{hf}.gate.e_score_correction_bias", f"{heddle}.router.expert_bias")
    both = f"{heddle}.gate.weight", f"{heddle}.up.weight"
    weights.add_tensor(f"{hf}.experts.gate_up_proj", *both, transform=STACKED)
    weights.add_tensor(f"{hf}.experts.down_proj", f"{heddle}.down.weight", transform=STACKED)
    glm.map_gated(weights, f"{hf}.shared_experts", f"{heddle}.shared")


def _map_m3_published(weights: WeightMap, hf: str, heddle: str) -> None:
    """The names of published files, of a layer: a tensor for each expert, and gate and up apart."""
    for name in M3_INDEXER:
        if f"{hf}.self_attn.indexer.{name}.weight" in weights.rules:
            weights.add_renamed(f"{hf}.self_attn.index_{name}.weight", f"{hf}.self_attn.indexer.{name}.weight")
    mlp, moe, feedforward = f"{hf}.mlp", f"{hf}.block_sparse_moe", f"{heddle}.feedforward"
    pairs = [(mlp, mlp, feedforward)]
    if f"{mlp}.gate.weight" in weights.rules:
        pairs = [(f"{moe}.shared_experts", f"{mlp}.shared_experts", f"{feedforward}.shared")]
        weights.add_renamed(f"{moe}.gate.weight", f"{mlp}.gate.weight")
        weights.add_renamed(f"{moe}.e_score_correction_bias", f"{mlp}.gate.e_score_correction_bias")
        weights.add_renamed(f"{moe}.shared_experts.down_proj.weight", f"{mlp}.shared_experts.down_proj.weight")
        for index in range(weights.shapes[f"{feedforward}.up.weight"][0]):
            for role, name in mistral.EXPERT_NAMES.items():
                stack = f"{mlp}.experts.{'down_proj' if role == 'down' else 'gate_up_proj'}"
                expert = (f"{feedforward}.{role}.weight", index)
                weights.add_alternative(
                    f"{moe}.experts.{index}.{name}.weight", expert, transform=CONCATENATED, replace=[stack]
                )
    for published, own, module in pairs:
        for role in ("gate", "up"):
            weights.add_alternative(
                f"{published}.{role}_proj.weight",
                f"{module}.{role}.weight",
                transform=CONCATENATED,
                replace=[f"{own}.gate_up_proj.weight"],
            )


MINIMAX_M3 = Family(
    "minimax_m3_vl_text", "MiniMaxM3VLForCausalLM", read_m3, write_m3, map_m3, ignored_tensors=("mtp.", "model.mtp.")
)
