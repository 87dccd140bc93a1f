"""OLMo: from OLMo 2 on, norms after each branch and over whole q and k projections; windows, experts, delta rule."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, qwen
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap
from heddle.exchange.rope import FULL, read_rope, read_ropes_by_layer_type, write_ropes_by_layer_type
from heddle.model.config import ModelConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

ROPE_CAST = {"cast": "after"}  # heads are rotated in float32, whatever the model's dtype
NORMS = {
    "post_attention_layernorm": "residual.norms.mixer", "post_feedforward_layernorm": "residual.norms.feedforward",
}  # fmt: skip


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """The attention of OLMo 2 and 3, without RoPE."""
    bias = config.get("attention_bias", False)
    return _common.attention(config, _common.read_heads(config), qk_norm="projection", bias=bias)


def read_design(
    config: ConfigReader, mixers: list[dict[str, Any]], feedforward: dict[str, Any] | None = None, eps: float = 1e-5
) -> dict[str, Any]:
    """A design with one layer for each mixer. feedforward: by default a gated one. eps: the family's default."""
    layers = _layer_types.layers_of(mixers, feedforward or _common.read_gated(config))
    return _common.rms_design(config, eps, layers, cast="after", residual={"kind": "reordered"})


def read_olmo2(config: ConfigReader) -> dict[str, Any]:
    """OLMo 2 (Team OLMo 2025): norms after each branch and over whole q and k projections; all layers are the same."""
    mixer = read_mixer(config)
    mixer["position"] = read_rope(config, mixer["head_dim"]) | ROPE_CAST
    return read_design(config, [mixer] * _layer_types.read_depth(config))


# Llama's tensor names, with a norm after each branch and none before.
map_olmo2 = partial(_common.map_weights, names=NORMS)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", read_olmo2, _common.write_decoder, map_olmo2, priority=6)


def read_olmo(config: ConfigReader) -> dict[str, Any]:
    """OLMo (Groeneveld et al. 2024): Llama's decoder with LayerNorm that has neither weights nor biases."""
    bias, clip = config.get("attention_bias", False), config.optional("clip_qkv")
    mixer = _common.read_attention(config, bias=bias, qkv_clip=clip)
    mixer["position"] |= ROPE_CAST
    norm = {"kind": "layer", "eps": 1e-5, "weight": False, "bias": False}
    return _common.design_fields(config, norm, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_olmo(design: ModelConfig) -> dict[str, Any]:
    return _common.without(_common.write_decoder(design), "rms_norm_eps") | {
        "clip_qkv": design_parts.first_attention(design).qkv_clip
    }


OLMO = Family("olmo", "OlmoForCausalLM", read_olmo, write_olmo, _common.map_weights)


WINDOW = 4096  # if the field is absent


def read_olmo3(config: ConfigReader) -> dict[str, Any]:
    """OLMo 3 (Team OLMo 2025): OLMo 2 with a sliding window and unscaled RoPE in three of four layers."""
    # One RoPE table per layer type. Older files have one theta for both, and a scaling for full layers only.
    mixer = read_mixer(config)
    theta = config.get("rope_theta", 5e5)
    ropes = read_ropes_by_layer_type(config, mixer["head_dim"], theta, theta)
    types = _layer_types.read_types(config, _layer_types.full_every(4, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", WINDOW))
    mixers = [
        mixer | {"window": window, "position": ropes[kind] | ROPE_CAST}
        for kind, window in zip(types, windows, strict=True)
    ]
    return read_design(config, mixers)


def write_olmo3(design: ModelConfig) -> dict[str, Any]:
    head_dim = design_parts.first_attention(design).head_dim or design.width
    ropes = write_ropes_by_layer_type(*_layer_types.ropes_by_layer_type(design), head_dim)
    return _common.write_decoder(design) | ropes | _layer_types.write_windows(design, WINDOW)


OLMO3 = Family("olmo3", "Olmo3ForCausalLM", read_olmo3, write_olmo3, map_olmo2, priority=7)


def read_olmoe(config: ConfigReader) -> dict[str, Any]:
    """OLMoE (Muennighoff et al. 2024): experts in every layer, and norms over whole q and k projections."""
    # Heads are as wide as width / heads, as their norms are.
    heads, bias = _common.read_equal_heads(config), config.get("attention_bias", False)
    config.expect("clip_qkv", None)
    mixer = _common.attention(config, heads, read_rope(config, heads["head_dim"]), qk_norm="projection", bias=bias)
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, read_experts(config)))


def read_experts(config: ConfigReader) -> dict[str, Any]:
    """The experts of every layer."""
    experts = _moe.read_experts(config, _layer_types.read_depth(config), default_loss=0.01)
    return experts | {"renormalize": config.get("norm_topk_prob", False)}


def write_experts(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_experts` reads."""
    loss = _moe.write_aux_loss(design, design_parts.first_moe(design))
    return _moe.write_experts(design) | _common.written(design, "norm_topk_prob") | loss


def write_olmoe(design: ModelConfig) -> dict[str, Any]:
    fields = _common.write_decoder(design) | write_experts(design) | {"clip_qkv": None}
    return _common.without(fields, "head_dim", "num_local_experts")


OLMOE = Family("olmoe", "OlmoeForCausalLM", read_olmoe, write_olmoe, _moe.map_weights)


def read_flex_olmo(config: ConfigReader) -> dict[str, Any]:
    """FlexOlmo (Shi et al. 2025): OLMo 2 with experts in every layer, each trained separately on its own data."""
    mixer, depth = read_mixer(config), _layer_types.read_depth(config)
    mixer["position"] = read_rope(config, mixer["head_dim"], 5e5) | ROPE_CAST
    return read_design(config, [mixer] * depth, read_experts(config), eps=1e-6)


def write_flex_olmo(design: ModelConfig) -> dict[str, Any]:
    return _common.write_decoder(design) | write_experts(design)


map_flex_olmo = partial(map_olmo2, map_feedforward=_moe.map_feedforward)
FLEX_OLMO = Family("flex_olmo", "FlexOlmoForCausalLM", read_flex_olmo, write_flex_olmo, map_flex_olmo)


LINEAR = _layer_types.LINEAR
# Of the first weights.
INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
DELTA = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "a_proj": "a", "b_proj": "beta", "g_proj": "gate", "o_proj": "out",
    "o_norm": "norm", "A_log": "decay.rate", "dt_bias": "decay.bias",
}  # fmt: skip


def read_olmo_hybrid(config: ConfigReader) -> dict[str, Any]:
    """OLMo Hybrid (Team OLMo 2026): OLMo 3 without windows, and the gated delta rule, norms first, in most layers.

    The delta rule may have β up to 2 (`linear_allow_neg_eigval`). Attention has no RoPE where the theta or the type of
    `rope_parameters` is null, as in published files.
    """
    config.ignore(*INITIAL)
    attention, depth = read_mixer(config), _layer_types.read_depth(config)
    table = config.data.get("rope_parameters") or {}
    has_rope = all(table.get(name, True) is not None for name in ("rope_theta", "rope_type"))
    rope = read_rope(config, attention["head_dim"]) | ROPE_CAST
    attention["position"] = rope if has_rope else None
    delta = qwen.read_delta(config, 1e-5)
    delta["negative_eigenvalues"] = config.get("linear_allow_neg_eigval", True)
    mixers = {FULL: attention, LINEAR: delta}
    usual = qwen.default_types(4, depth)
    usual = usual if FULL in usual else [*usual[:-1], FULL]
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    design = read_design(config, [mixers[kind] for kind in types], eps=1e-6)
    return design | {"residual": {"kind": "reordered", "norms_first": [delta["kind"]]}}


def write_olmo_hybrid(design: ModelConfig) -> dict[str, Any]:
    delta = design_parts.first_gated_delta(design)
    fields = _common.without(_common.write_decoder(design), "head_dim", "rope_theta")
    if not any(design_parts.has_rope(mixer) for mixer in design_parts.mixers(design)):
        fields |= {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "rope_scaling": None}
    return fields | qwen.write_delta(design) | {"linear_allow_neg_eigval": delta.negative_eigenvalues}


def map_olmo_hybrid(design: ModelConfig, weights: WeightMap) -> None:
    """OLMo 2's tensor names in layers of attention; published files have a convolution for each of q, k and v."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design):
        _common.map_gated(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        if isinstance(layer.mixer, GatedDeltaConfig):
            weights.add_module(f"{hf}.attention_layer_norm", f"{heddle}.residual.norms.mixer")
            weights.add_module(f"{hf}.feedforward_layer_norm", f"{heddle}.residual.norms.feedforward")
            _map_delta(layer.mixer, weights, f"{hf}.linear_attn", f"{heddle}.mixer")
        elif layer.mixer is not None:
            _common.map_attention(weights, hf, heddle)
            weights.add_modules(hf, heddle, NORMS)
            # As transformers saves it again.
            weights.add_renamed(f"{hf}.feedforward_layer_norm.weight", f"{hf}.post_attention_layernorm.weight")


def _map_delta(mixer: GatedDeltaConfig, weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, DELTA)
    keys = (mixer.key_heads or mixer.heads) * (mixer.head_dim or 1)
    ends = (keys, 2 * keys, 2 * keys + mixer.heads * (mixer.value_dim or mixer.head_dim or 1))
    for name, start, end in zip("qkv", (0, *ends[:2]), ends, strict=True):
        channels = (f"{heddle}.convolution.weight", slice(start, end))
        weights.add_tensor(f"{hf}.{name}_conv1d.weight", channels, transform=DEPTHWISE_CONV)


OLMO_HYBRID = Family("olmo_hybrid", "OlmoHybridForCausalLM", read_olmo_hybrid, write_olmo_hybrid, map_olmo_hybrid)
