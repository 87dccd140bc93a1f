"""MiniMax-01 and MiniMax-M1 in transformers' names (MiniMax 2025): lightning attention between layers of softmax.

A layer is `N(α x + β f(x))` for each branch, and the embedding has a norm. The decays follow from
the number of heads and the layer; stored slopes are ignored. Published files give `rotary_dim`, as the paper does;
transformers ignores it and rotates whole heads.
"""

import math
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, mixtral
from heddle.exchange.family import Family, WeightMap, interleaved_by_group
from heddle.exchange.rope import FULL, read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.retention import RetentionConfig
from heddle.parts.residuals.deep_norm import DeepNormConfig

LINEAR = "linear_attention"
DEFAULT_THETA = 1e6
LIGHTNING_EPS = 1e-6  # of the norm after lightning attention, whatever `rms_norm_eps` says
BRANCHES = {"alpha": "attn_alpha_factor", "multiplier": "attn_beta_factor"}
FEEDFORWARD = {"feedforward_alpha": "mlp_alpha_factor", "feedforward_multiplier": "mlp_beta_factor"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The factors of both kinds of attention must be the same, since a design has one residual."""
    depth = _layer_types.read_depth(config)
    usual = [LINEAR if index % 2 else FULL for index in range(depth)]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    config.expect("router_jitter_noise", 0.0, default=0.0)
    config.note("block_size")  # the length of the blocks that sums are computed in
    config.require("num_key_value_heads", int)
    heads = _common.read_heads(config, config.require("hidden_size", int))
    feedforward = _moe.read_experts(config, depth)
    attention = {
        "kind": "attention",
        **heads,
        "window": config.optional("sliding_window"),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_position(config, heads["head_dim"], DEFAULT_THETA),
    }
    lightning = {
        "kind": "retention",
        "heads": heads["heads"],
        "head_dim": heads["head_dim"],
        "activation": feedforward["activation"],
        "gate": "sigmoid",
        "norm": {"kind": "rms", "eps": LIGHTNING_EPS},
        "output_norm": "projection",
    }
    mixers = [
        attention if kind == FULL else lightning | {"decay": _decays(heads["heads"], index, depth)}
        for index, kind in enumerate(types)
    ]
    layers = [{"mixer": mixer, "feedforward": feedforward} for mixer in mixers]
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-5)},
        _layer_types.merge_repeats(layers),
        residual={"kind": "deep_norm", **_read_factors(config, types)},
        embedding={"norm": True},
    )


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


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, attention, residual = design_parts.first_moe(design), design_parts.first_attention(design), design.residual
    lightning = next((mixer for mixer in design_parts.mixers(design) if isinstance(mixer, RetentionConfig)), None)
    is_deep = isinstance(residual, DeepNormConfig)
    factors = {field: getattr(residual, field) if is_deep else 1.0 for field in (*BRANCHES, *FEEDFORWARD)}
    written = _common.write_common(design) | _common.write_attention(design)
    if lightning is not None and attention not in design_parts.mixers(design):
        written |= {"num_attention_heads": lightning.heads, "head_dim": lightning.head_dim}
        written |= {"num_key_value_heads": lightning.heads}
    if (rotary_dim := design_parts.rope_of(attention).rotary_dim) is not None:
        written |= {"rotary_dim": rotary_dim}
    return (
        written
        | {f"{kind}_{name}": factors[field] for field, name in BRANCHES.items() for kind in ("linear", "full")}
        | {name: factors[field] for field, name in FEEDFORWARD.items()}
        | _moe.write_experts(design)
        | {
            "layer_types": [
                LINEAR if isinstance(layer.mixer, RetentionConfig) else FULL for layer in design_parts.layers(design)
            ],
            "sliding_window": attention.window,
            "rms_norm_eps": design_parts.norm_eps(design),
            "router_jitter_noise": 0.0,
        }
        | _moe.write_aux_loss(design, moe)
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Mixtral's names of attention and experts. A norm before a layer's branch is the one after the branch before."""
    weights.add_module("model.embed_tokens", "embed")
    weights.add_module("model.layers.0.input_layernorm", "embed.norm")
    if not design.head.tied:
        weights.add_module("lm_head", "head")
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        if isinstance(layer.mixer, RetentionConfig):
            _map_lightning(weights, f"{hf}.self_attn", f"{heddle}.mixer", layer.mixer.heads)
        else:
            _common.map_attention(weights, hf, heddle)
        _moe.map_experts(weights, f"{hf}.block_sparse_moe", f"{heddle}.feedforward", mixtral.EXPERT_NAMES)
        after = "model.norm" if index == design.depth - 1 else f"model.layers.{index + 1}.input_layernorm"
        weights.add_module(f"{hf}.post_attention_layernorm", f"{heddle}.residual.norms.mixer")
        weights.add_module(after, f"{heddle}.residual.norms.feedforward")


def _map_lightning(weights: WeightMap, hf: str, heddle: str, heads: int) -> None:
    """One projection of q, k and v, head by head."""
    projections = (f"{heddle}.{name}" for name in "qkv")
    weights.add_module(f"{hf}.qkv_proj", *projections, transform=interleaved_by_group(heads))
    for name, role in (("out_proj", "out"), ("output_gate", "gate"), ("norm", "norm")):
        weights.add_module(f"{hf}.{name}", f"{heddle}.{role}")


FAMILY = Family(
    "minimax",
    "MiniMaxForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("model.layers.*.self_attn.slope_rate", "model.layers.*.self_attn.*_decay"),
)
