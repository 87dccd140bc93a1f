"""Liquid AI's models: gated short convolutions, and attention with normed heads in some of the layers."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, olmo
from heddle.exchange.family import DEPTHWISE_CONV, Family, TensorTransform, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_rope, read_rope_table, write_rope_table
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.short_conv import ShortConvConfig
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.residuals.sandwich import SandwichConfig
from heddle.parts.scalings.linear import LinearConfig

CONV, THETA = "conv", 1e6

# Of the first weights, or never read by transformers.
UNUSED_FIELDS = """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init model_name num_heads use_pos_enc""".split()  # noqa: SIM905
LAYER = {
    "operator_norm": "residual.norms.mixer", "ffn_norm": "residual.norms.feedforward",
    "post_operator_norm": "residual.after.mixer", "post_ffn_norm": "residual.after.feedforward",
}  # fmt: skip
FEEDFORWARD = {"w1": "gate", "w3": "up", "w2": "down"}


def read_lfm2(config: ConfigReader) -> dict[str, Any]:
    """LFM2 and LFM2.5 (Liquid AI 2025): gated short convolutions, and attention with normed heads in some layers.

    With `block_auto_adjust_ff_dim`, the width of the feed-forward is two thirds of `intermediate_size`, rounded up; an
    export writes the width itself.
    """
    return read_decoder(config, {"kind": "gated", "hidden": _read_hidden(config)})


def read_decoder(config: ConfigReader, feedforwards: dict[str, Any] | list[dict[str, Any]]) -> dict[str, Any]:
    """The design with this feed-forward, or one for each layer."""
    heads, eps = _common.read_heads(config), config.get("norm_eps", 1e-5)
    rope = read_rope(config, heads["head_dim"], THETA)
    attention = {"kind": "attention", **heads, "qk_norm": "head", "position": rope}
    mixers = {FULL: attention, CONV: _read_convolution(config, kernel=3)}
    config.note(*UNUSED_FIELDS)
    layers = _layer_types.layers_of([mixers[kind] for kind in _read_types(config)], feedforwards)
    head = {"tied": config.get("tie_word_embeddings", True, "tie_embedding")}
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, layers, head=head)


def _read_convolution(config: ConfigReader, kernel: int) -> dict[str, Any]:
    """The short convolution; `kernel` is the family's default."""
    bias, kernel = config.get("conv_bias", False), config.get("conv_L_cache", kernel)
    return {"kind": "short_conv", "conv_kernel": kernel, "conv_bias": bias, "bias": bias}


def _read_hidden(config: ConfigReader) -> int:
    """The width of the feed-forward."""
    hidden = config.require("intermediate_size", int, "block_ff_dim")
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    if not config.get("block_auto_adjust_ff_dim", True):
        return hidden
    if multiple < 1:
        raise config.invalid("block_multiple_of", "should be at least 1")
    return -int(factor * int(2 * hidden / 3)) // multiple * -multiple


def _read_types(config: ConfigReader) -> list[str]:
    """`layer_types`, or in older files `full_attn_idxs`, says which layers have attention."""
    depth = _layer_types.read_depth(config)
    full = config.get("full_attn_idxs", list(range(depth)))
    usual = [FULL if index in full else CONV for index in range(depth)]
    return _layer_types.read_kinds(config, "layer_types", usual, (FULL, CONV))


def write_lfm2(design: ModelConfig) -> dict[str, Any]:
    conv = design_parts.first_mixer(design, ShortConvConfig())
    return (
        _common.write_common(design)
        | _common.without(_common.write_attention(design), "attention_dropout")  # it has none
        | {
            "intermediate_size": design_parts.first_gated(design).hidden,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": conv.conv_kernel,
            "conv_bias": conv.conv_bias,
            "layer_types": _layer_types.types_of(design, ShortConvConfig, CONV),
            "norm_eps": design_parts.norm_eps(design),
        }
    )


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The three projections of a feed-forward."""
    weights.add_modules(hf, heddle, FEEDFORWARD)


def map_lfm2(
    design: ModelConfig,
    weights: WeightMap,
    out: str = "out_proj",
    norms: tuple[str, str] = ("q_layernorm", "k_layernorm"),
    map_feedforward: _common.MapModule = map_gated,
) -> None:
    """Its own names; k, v and q of a convolution are its B, x and C, and one tensor; out, norms: of attention."""
    _common.map_embedding_and_head(design, weights, norm="model.embedding_norm")
    for hf, heddle, layer in _common.named_layers(design):
        mixer = f"{heddle}.mixer"
        if isinstance(layer.mixer, ShortConvConfig):
            weights.add_module(f"{hf}.conv.in_proj", f"{mixer}.k", f"{mixer}.q", f"{mixer}.v")
            weights.add_tensor(f"{hf}.conv.conv.weight", f"{mixer}.convolution.weight", transform=DEPTHWISE_CONV)
            weights.add_tensor(f"{hf}.conv.conv.bias", f"{mixer}.convolution.bias")
            weights.add_module(f"{hf}.conv.out_proj", f"{mixer}.out")
        else:
            _common.map_attention(weights, hf, heddle, out, norms)
        map_feedforward(weights, f"{hf}.feed_forward", f"{heddle}.feedforward")
        weights.add_modules(hf, heddle, LAYER)


LFM2 = Family("lfm2", "Lfm2ForCausalLM", read_lfm2, write_lfm2, map_lfm2)


SUM_EPS = 1e-6  # beside the sum of the gates
EXPERTS = _common.Fields(
    experts=("num_experts", int),
    top_k=("num_experts_per_tok", int),
    hidden=("moe_intermediate_size", int),
    renormalize=("norm_topk_prob", True),
    scale=("routed_scaling_factor", 1.0),
)


def read_lfm2_moe(config: ConfigReader) -> dict[str, Any]:
    """LFM2-MoE (Liquid AI 2025): LFM2's mixers, and after some dense layers experts chosen by sigmoid scores."""
    config.get("output_router_logits", False)
    experts = {"kind": "moe", "routing": "sigmoid", **EXPERTS.read(config)}
    experts["renormalize_eps"] = SUM_EPS if experts["renormalize"] else None
    experts["bias_update"] = 0.0 if config.get("use_expert_bias", True) else None
    dense = {"kind": "gated", "hidden": config.require("intermediate_size", int)}
    first, depth = config.get("num_dense_layers", 2), _layer_types.read_depth(config)
    return read_decoder(config, [dense if index < first else experts for index in range(depth)])


def write_lfm2_moe(design: ModelConfig) -> dict[str, Any]:
    moe, sparse = design_parts.first_moe(design), design_parts.has_experts(design)
    first = sparse.index(True) if True in sparse else design.depth
    own = {"num_dense_layers": first, "use_expert_bias": moe.bias_update is not None}
    return _common.without(write_lfm2(design), "block_auto_adjust_ff_dim") | EXPERTS.write(moe) | own


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """A layer's feed-forward, dense or with experts, and the balancing bias."""
    if f"{heddle}.router.weight" not in weights.shapes:
        map_gated(weights, hf, heddle)
        return
    _moe.map_experts(weights, hf, heddle, {role: name for name, role in FEEDFORWARD.items()})
    weights.add_tensor(f"{hf}.expert_bias", f"{heddle}.router.expert_bias")


map_lfm2_moe = partial(map_lfm2, map_feedforward=_map_experts)
LFM2_MOE = Family("lfm2_moe", "Lfm2MoeForCausalLM", read_lfm2_moe, write_lfm2_moe, map_lfm2_moe)


PROPORTIONAL = "proportional"
WINDOW = 256
TABLES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": PROPORTIONAL, "rope_theta": THETA, "partial_rotary_factor": 0.5},
}


def read_lfm3(config: ConfigReader) -> dict[str, Any]:
    """LFM3 (Liquid AI 2026): LFM2's convolutions, full and windowed attention with gated heads, and sandwich norms.

    Its full layers rotate the first `partial_rotary_factor` of the pairs of a whole head (`proportional`). heddle puts
    these dims first in every head, and names the base that has the same frequencies.
    """
    depth, eps = _layer_types.read_depth(config), config.get("norm_eps", 1e-5, "rms_norm_eps")
    usual = [{0: SLIDING if index else CONV, 2: FULL}.get(index % 4, CONV) for index in range(depth)]
    types = _layer_types.read_kinds(config, "layer_types", usual, (FULL, SLIDING, CONV))
    heads, gate = _common.read_heads(config, head_dim=128), config.get("use_attention_gate", True) and "head"
    if gate:
        config.expect("attention_bias", False, None)  # the gate has none
    bias = config.get("attention_bias", False)
    attention = _common.attention(config, heads, qk_norm="head", gate=gate or None, bias=bias)
    tables, window = config.get("rope_parameters", TABLES), config.get("sliding_window", WINDOW)
    mixers: dict[str, Any] = {
        kind: attention | {"position": _read_rope(config, tables.get(kind, {}), heads["head_dim"]) | olmo.ROPE_CAST}
        for kind in (FULL, SLIDING)
    }
    mixers[SLIDING]["window"] = window
    mixers[CONV] = _read_convolution(config, kernel=7)
    feedforward = {"kind": "gated", "hidden": config.require("intermediate_size", int)}
    return _common.design_fields(
        config,
        {"kind": "rms", "eps": eps},
        _layer_types.layers_of([mixers[kind] for kind in types], feedforward),
        residual={"kind": "sandwich" if config.get("use_sandwich_norm", True) else "pre_norm"},
        head={"tied": config.get("tie_word_embeddings", True)},
    )


def _read_rope(config: ConfigReader, table: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """RoPE from the table of one type of layers."""
    if table.get("rope_type") != PROPORTIONAL:
        return read_rope_table(config, table, head_dim, THETA)
    plain = {name: value for name, value in table.items() if name not in ("partial_rotary_factor", "factor")}
    rope = read_rope_table(config, plain | {"rope_type": "default"}, head_dim, THETA)
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


def write_lfm3(design: ModelConfig) -> dict[str, Any]:
    mixer = design_parts.first_attention(design)
    fields = _common.without(write_lfm2(design), "block_auto_adjust_ff_dim", "rope_theta", "rope_scaling")
    mixers = [mixer for mixer in design_parts.mixers(design) if isinstance(mixer, AttentionConfig)]
    ropes = {FULL if each.window is None else SLIDING: design_parts.rope_of(each) for each in reversed(mixers)}
    kinds = zip(fields["layer_types"], design_parts.layer_types(design), strict=True)
    return fields | {
        "rope_parameters": TABLES | {kind: _write_rope(rope, mixer.head_dim or 2) for kind, rope in ropes.items()},
        "layer_types": [kind if kind == CONV else window for kind, window in kinds],
        "sliding_window": design_parts.first_window(design) or WINDOW,
        "use_attention_gate": mixer.gate == "head",
        "use_sandwich_norm": isinstance(design.residual, SandwichConfig),
        "attention_bias": design_parts.first_attention(design).bias is True,
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


def map_lfm3(design: ModelConfig, weights: WeightMap) -> None:
    """LFM2's tensor names except attention's, and a norm after each branch."""
    map_lfm2(design, weights, out="o_proj", norms=("q_norm", "k_norm"))
    for hf, heddle, layer in _common.named_layers(design):
        if not isinstance(layer.mixer, AttentionConfig):
            continue
        weights.add_module(f"{hf}.self_attn.gate_proj", f"{heddle}.mixer.gate")
        head_dim = layer.mixer.head_dim or 2
        order = rotated_first(head_dim, design_parts.rope_of(layer.mixer).rotary_dim or head_dim)
        for name, role in (("q_proj", "q"), ("k_proj", "k"), ("q_norm", "q_norm"), ("k_norm", "k_norm")):
            weights.add_module(f"{hf}.self_attn.{name}", f"{heddle}.mixer.{role}", transform=order)


LFM3 = Family("lfm3", "Lfm3ForCausalLM", read_lfm3, write_lfm3, map_lfm3)
