"""RWKV-7 "Goose" (Peng et al. 2025): time mixing and channel mixing, as in flash-linear-attention's class.

transformers finds the class where `fla` is imported. With `fuse_norm` that class adds 1e-6 to the squared length of a
removal key; heddle computes without it, as the authors do. Layers of attention (`attn`) are refused. Tests compare with
a plain float64 loop that computes what the class does.
"""

import math
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, WeightMap, reshaped
from heddle.model.config import ModelConfig
from heddle.parts.mixers.rwkv7 import SHIFTED, RWKV7Config
from heddle.parts.norms.layer import LayerNormConfig

SHIFT = {"of": ["input"], "conv_kernel": 2, "residual": False, "token_shift": True}
# By heddle's name: the config's, its default, and the factor of the square root of the width that null stands for.
RANKS = {
    "decay_rank": ("decay_low_rank_dim", 64, 2.5),
    "rate_rank": ("a_low_rank_dim", 64, 2.5),
    "gate_rank": ("gate_low_rank_dim", 128, 5.0),
    "value_rank": ("v_low_rank_dim", 16, 1.7),
}
UNUSED_FIELDS = """attn_mode fuse_norm fuse_cross_entropy fuse_linear_cross_entropy use_l2warp num_heads""".split()  # noqa: SIM905
TIME_MIXING = {
    "k_k": "removal", "k_a": "replacement", "r_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out",
    **{
        f"{hf}_lora.lora.{place}": f"{role}_{name}"
        for hf, role in (("w", "decay"), ("a", "rate"), ("v", "value"), ("g", "gate"))
        for place, name in ((0, "down"), (2, "up"), ("2.bias", "bias"))
    },
}  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Every layer but the first mixes its values with the first layer's."""
    width, depth = config.require_count("hidden_size"), _layer_types.read_depth(config)
    dim = config.get_nullable("head_dim", 64)
    dim = width // config.require_count("num_heads") if dim is None else config.get("head_dim", 64)
    if dim < 1 or width % dim:
        raise config.invalid("head_dim", f"should divide hidden_size = {width}")
    config.ignore(*UNUSED_FIELDS)
    config.expect("attn", None)
    config.expect("hidden_act", "sqrelu", default="sqrelu")
    eps, bias = config.get("norm_eps", 1e-5), config.get("norm_bias", True)
    mixer = {
        "kind": "rwkv7", "heads": width // dim, "head_dim": dim, "value_dim": _value_dim(config, width, depth) * dim,
        "norm": {"kind": "layer", "eps": dim * eps},
    }  # fmt: skip
    ranks = {own: _rank(config, own, dim) for own in RANKS}
    value_rank = ranks.pop("value_rank")
    ratio = config.optional("hidden_ratio")
    hidden = config.optional("intermediate_size") or 32 * math.ceil(int(width * (4 if ratio is None else ratio)) / 32)
    feedforward = {"kind": "mlp", "hidden": hidden, "activation": "relu2", "short_convolution": SHIFT}
    first = {"mixer": mixer | ranks, "feedforward": feedforward}
    mixed = mixer | ranks | {"value_residual": True, "value_rank": value_rank}
    others = [{"repeat": depth - 1, "mixer": mixed, "feedforward": feedforward}] if depth > 1 else []
    norm = {"kind": "layer", "eps": eps, "bias": bias}
    embedding = {"norm": config.get("norm_first", True)}
    return _common.design_fields(config, norm, [first, *others], embedding=embedding)


def _value_dim(config: ConfigReader, width: int, depth: int) -> int:
    """How many times as wide as the keys the values of every layer are."""
    given = config.optional("value_dim")
    widths = [width] * depth if given is None else given if isinstance(given, list) else [given] * depth
    if len(widths) != depth or any(type(each) is not int or each != widths[0] for each in widths):
        raise config.invalid("value_dim", "heddle builds one number for all layers")
    if widths[0] < width or widths[0] % width:
        raise config.invalid("value_dim", f"should be a multiple of hidden_size = {width}")
    return int(widths[0] // width)


def _rank(config: ConfigReader, own: str, head_dim: int) -> int:
    name, default, factor = RANKS[own]
    if config.get_nullable(name, default) is not None:
        rank: int = config.get(name, default)
        return rank
    near = factor * math.sqrt(config.require("hidden_size", int)) * (1.0 if own == "gate_rank" else head_dim / 64)
    return max(32, round(near / 32) * 32)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    default = RWKV7Config(heads=1, head_dim=design.width, value_dim=design.width)
    mixer = next((each for each in reversed(design_parts.mixers(design)) if isinstance(each, RWKV7Config)), default)
    return (
        _common.write_common(design)
        | {
            "head_dim": mixer.head_dim,
            "num_heads": mixer.heads,
            "value_dim": [mixer.heads * (mixer.value_dim or 1)] * design.depth,
            "intermediate_size": design_parts.first_mlp(design).hidden,
            "hidden_act": "sqrelu",
            "norm_bias": isinstance(design.norm, LayerNormConfig) and design.norm.bias,
            "norm_first": design.embedding.norm,
            "fuse_norm": False,
            "attn": None,
        }
        | {name: getattr(mixer, own) or rank for own, (name, rank, _) in RANKS.items()}
        | _common.written(design, "norm_eps")
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Its own names; μ of time mixing is six tensors, in the first files one."""
    _common.map_embedding_and_head(design, weights, "model.embeddings")
    weights.add_module("model.layers.0.pre_norm", "embed.norm")
    width = design.width
    for hf, heddle, layer in _common.named_layers(design):
        shift = f"{heddle}.mixer.shift"
        names = [f"{hf}.attn.x_{name}" for name in SHIFTED]
        for index, name in enumerate(names):
            weights.add_tensor(name, (shift, slice(index * width, (index + 1) * width)), transform=reshaped(1, 1, -1))
        weights.add_alternative(f"{hf}.attn.x_x", shift, transform=reshaped(len(names), -1), replace=names)
        heads = getattr(layer.mixer, "heads", 1)
        weights.add_tensor(f"{hf}.attn.r_k", f"{heddle}.mixer.bonus", transform=reshaped(heads, -1))
        for kind in ("weight", "bias"):
            weights.add_tensor(f"{hf}.attn.g_norm.{kind}", f"{heddle}.mixer.norm.{kind}", transform=reshaped(-1))
        weights.add_modules(f"{hf}.attn", f"{heddle}.mixer", TIME_MIXING)
        channel = {"x_k": "feedforward_convolution.input.weight", "key": "feedforward.up", "value": "feedforward.down"}
        weights.add_modules(f"{hf}.ffn", heddle, channel)
        weights.add_modules(hf, heddle, {"attn_norm": "residual.norms.mixer", "ffn_norm": "residual.norms.feedforward"})


FAMILY = Family("rwkv7", "RWKV7ForCausalLM", read_config, write_config, map_weights)
