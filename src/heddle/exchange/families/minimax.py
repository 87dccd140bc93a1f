"""MiniMax-01, M1 and M2: lightning attention or partial RoPE, and Mixtral's experts."""

import math
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, mistral
from heddle.exchange.family import Family, WeightMap, interleaved_by_group
from heddle.exchange.rope import FULL, read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.retention import RetentionConfig
from heddle.parts.residuals.deep_norm import DeepNormConfig

LINEAR = _layer_types.LINEAR

LIGHTNING_EPS = 1e-6  # of the norm after lightning attention, whatever `rms_norm_eps` says
BRANCHES = {"alpha": "attn_alpha_factor", "multiplier": "attn_beta_factor"}
FEEDFORWARD = {"feedforward_alpha": "mlp_alpha_factor", "feedforward_multiplier": "mlp_beta_factor"}


def read_minimax(config: ConfigReader) -> dict[str, Any]:
    """MiniMax-01 and MiniMax-M1 in transformers' names (MiniMax 2025): lightning attention between layers of softmax.

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
    """Published files say `rotary_dim`; a `partial_rotary_factor` beside it takes precedence, as in transformers."""
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
    """Mixtral's names of attention and experts. A norm before a layer's branch is the one after the branch before."""
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

    Its balancing loss (`output_router_logits`) is refused: heddle's, of sigmoid scores, is another. Layers that predict
    further tokens are ignored; they do not change the next token's logits.
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
