"""LFM3 (Liquid AI 2026): LFM2's convolutions beside full and windowed attention with gated heads, and sandwich norms.

Its full layers rotate the first `partial_rotary_factor` of the pairs of a whole head (`proportional`). heddle puts
these dims first in every head, and names the base that has the same frequencies.
"""

from typing import Any

import torch
from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, lfm2, olmo2
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_rope_table, write_rope_table
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.residuals.sandwich import SandwichConfig
from heddle.parts.scalings.linear import LinearConfig

CONV, PROPORTIONAL = lfm2.CONV, "proportional"
DEFAULT_THETA, DEFAULT_WINDOW = 1e6, 256
TABLES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": PROPORTIONAL, "rope_theta": DEFAULT_THETA, "partial_rotary_factor": 0.5},
}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layer_types` says which mixer each layer has."""
    depth, eps = _layer_types.read_depth(config), config.get("norm_eps", 1e-5, "rms_norm_eps")
    usual = [{0: SLIDING if index else CONV, 2: FULL}.get(index % 4, CONV) for index in range(depth)]
    types = config.get("layer_types", usual)
    if len(types) != depth or set(types) - {FULL, SLIDING, CONV}:
        raise config.invalid("layer_types", f"should say {FULL}, {SLIDING} or {CONV} of each of {depth} layers")
    bias, gated = config.get("conv_bias", False), config.get("use_attention_gate", True)
    heads = _common.read_heads(config, config.require("hidden_size", int), head_dim=128)
    if gated:
        config.expect("attention_bias", False, None)  # the gate has none
    attention = {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "gate": "head" if gated else None,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }
    tables, window = config.get("rope_parameters", TABLES), config.get("sliding_window", DEFAULT_WINDOW)
    mixers: dict[str, Any] = {
        kind: attention | {"position": _read_rope(config, tables.get(kind, {}), heads["head_dim"]) | olmo2.ROPE_CAST}
        for kind in (FULL, SLIDING)
    }
    mixers[SLIDING]["window"] = window
    mixers[CONV] = {
        "kind": "short_conv", "conv_kernel": config.get("conv_L_cache", 7), "conv_bias": bias, "bias": bias,
    }  # fmt: skip
    feedforward = {"kind": "gated", "hidden": config.require("intermediate_size", int)}
    layers = [{"mixer": mixers[kind], "feedforward": feedforward} for kind in types]
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": eps},
        _layer_types.merge_repeats(layers),
        residual={"kind": "sandwich" if config.get("use_sandwich_norm", True) else "pre_norm"},
        head={"tied": config.get("tie_word_embeddings", True)},
    )


def _read_rope(config: ConfigReader, table: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """RoPE from the table of one type of layers."""
    if table.get("rope_type") != PROPORTIONAL:
        return read_rope_table(config, table, head_dim, DEFAULT_THETA)
    plain = {name: value for name, value in table.items() if name not in ("partial_rotary_factor", "factor")}
    rope = read_rope_table(config, plain | {"rope_type": "default"}, head_dim, DEFAULT_THETA)
    reader = ConfigReader(table, f"{config.source}, rope_parameters")
    pairs, factor = int(reader.get("partial_rotary_factor", 1.0) * head_dim // 2), reader.get("factor", 1.0)
    if not 0 < pairs <= head_dim // 2:
        raise reader.invalid("partial_rotary_factor", f"rotates {pairs} of {head_dim // 2} pairs; choose 1 to all")
    if 2 * pairs < head_dim:
        rope |= {"rotary_dim": 2 * pairs, "base": rope["base"] ** (2 * pairs / head_dim)}
    return rope if factor == 1.0 else rope | {"scaling": {"kind": "linear", "factor": factor}}


def _write_rope(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The table that `_read_rope` reads."""
    rotated = (rope.rotary_dim or head_dim) / head_dim
    if rotated == 1.0:
        return write_rope_table(rope, head_dim)
    theta = float(f"{rope.base ** (1 / rotated):.12g}")
    table = {"rope_type": PROPORTIONAL, "rope_theta": theta, "partial_rotary_factor": rotated}
    return table | ({"factor": rope.scaling.factor} if isinstance(rope.scaling, LinearConfig) else {})


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, fields = design_parts.first_attention(design), lfm2.write_config(design)
    for name in ("block_auto_adjust_ff_dim", "rope_theta", "rope_scaling"):
        del fields[name]
    mixers = [mixer for mixer in design_parts.mixers(design) if isinstance(mixer, AttentionConfig)]
    ropes = {FULL if each.window is None else SLIDING: design_parts.rope_of(each) for each in reversed(mixers)}
    kinds = zip(fields["layer_types"], design_parts.layer_types(design), strict=True)
    return fields | {
        "rope_parameters": TABLES | {kind: _write_rope(rope, mixer.head_dim or 2) for kind, rope in ropes.items()},
        "layer_types": [kind if kind == CONV else window for kind, window in kinds],
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
        "use_attention_gate": mixer.gate == "head",
        "use_sandwich_norm": isinstance(design.residual, SandwichConfig),
        "attention_bias": mixer.bias is True,
        "attention_dropout": mixer.dropout,
    }


def rotated_first(head_dim: int, rotary_dim: int) -> TensorTransform:
    """Rows of each head with the rotated dims first <-> both of each pair half a head apart."""
    half, pairs = head_dim // 2, rotary_dim // 2
    first = [*range(pairs), *range(half, half + pairs)]
    order = torch.tensor(first + [dim for dim in range(head_dim) if dim not in first])

    def reordered(tensor: Tensor, dims: Tensor) -> Tensor:
        rows: Tensor = tensor.unflatten(0, (-1, head_dim))[:, dims.to(tensor.device)].flatten(0, 1)
        return rows

    return TensorTransform(
        lambda parameters: reordered(parameters[0], order.argsort()), lambda tensor, shapes: [reordered(tensor, order)]
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """LFM2's tensor names but for those of attention, and a norm after each branch."""
    lfm2.map_weights(design, weights, out="o_proj", norms=("q_norm", "k_norm"))
    for index, layer in enumerate(design_parts.layers(design)):
        hf, mixer = f"model.layers.{index}", f"layers.{index}.mixer"
        weights.add_module(f"{hf}.post_operator_norm", f"layers.{index}.residual.after.mixer")
        weights.add_module(f"{hf}.post_ffn_norm", f"layers.{index}.residual.after.feedforward")
        if not isinstance(layer.mixer, AttentionConfig):
            continue
        weights.add_module(f"{hf}.self_attn.gate_proj", f"{mixer}.gate")
        head_dim = layer.mixer.head_dim or 2
        rotary_dim = design_parts.rope_of(layer.mixer).rotary_dim or head_dim
        for name, role in (("q_proj", "q"), ("k_proj", "k"), ("q_norm", "q_norm"), ("k_norm", "k_norm")):
            order = rotated_first(head_dim, rotary_dim)
            weights.add_module(f"{hf}.self_attn.{name}", f"{mixer}.{role}", transform=order)


FAMILY = Family("lfm3", "Lfm3ForCausalLM", read_config, write_config, map_weights)
