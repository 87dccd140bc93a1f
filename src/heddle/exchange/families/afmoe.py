"""AFMoE, Arcee's Trinity (2025): gated attention, RoPE only in windowed layers, sandwich norms, sigmoid experts."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, deepseek
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

PERIOD, DEFAULT_WINDOW = 4, 1024  # of layers without a window, and the others' if the field is absent
# Of groups, of which there is one, and of the loss that its own code adds.
UNUSED_FIELDS = ("load_balance_coeff", "output_router_logits", "use_grouped_mm")
NAMES = {
    "input_layernorm": "residual.norms.mixer", "post_attention_layernorm": "residual.after.mixer",
    "pre_mlp_layernorm": "residual.norms.feedforward", "post_mlp_layernorm": "residual.after.feedforward",
    "self_attn.gate_proj": "mixer.gate",
}  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Dense layers, then layers with experts. The balancing bias keeps its loaded value (`bias_update` 0)."""
    width = config.require_count("hidden_size")
    heads = _common.read_heads(config, head_dim=128)
    config.ignore(*UNUSED_FIELDS)
    for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        config.expect(name, 1, None)
    config.expect_all(score_func="sigmoid", route_norm=True)
    config.expect("attention_bias", False, None)  # its gate has none
    mixer = _common.attention(config, heads, qk_norm="head", gate="channel")
    rope = read_rope(config, heads["head_dim"])
    usual = _layer_types.full_every(config.get("global_attn_every_n_layers", PERIOD) or 1, config)
    types = _layer_types.read_types(config, usual)
    windows = _layer_types.layer_windows(config, types, config.get("sliding_window", DEFAULT_WINDOW))
    dense, first = _common.read_gated(config), config.get("num_dense_layers", 1)
    experts = {
        "kind": "moe",
        "experts": config.get("num_experts", 64, "num_local_experts"),
        "top_k": config.get("num_experts_per_tok", 6),
        "hidden": config.require("moe_intermediate_size", int),
        "activation": dense["activation"],
        "shared": config.get("num_shared_experts", 2),
        "scale": config.get("route_scale", 1.0),
        "routing": "sigmoid",
        "renormalize": True,
        "bias_update": 0.0,
    }
    mixers = [mixer | {"window": window, "position": None if window is None else rope} for window in windows]
    feedforwards = [dense if index < first else experts for index in range(len(mixers))]
    return _common.rms_design(
        config,
        1e-5,
        _layer_types.layers_of(mixers, feedforwards),
        cast="after",
        residual={"kind": "sandwich"},
        embedding={"multiplier": width**0.5} if config.get("mup_enabled", False) else {},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    moe, sparse = design_parts.first_moe(design), design_parts.has_experts(design)
    experts = deepseek.write_layers(design)
    shared = ("rms_norm_eps", "hidden_act", "intermediate_size", "num_experts_per_tok", "moe_intermediate_size")
    rotated = (layer.mixer for layer in design_parts.layers(design) if getattr(layer.mixer, "window", None))
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.rope_of(next(rotated, None)))
        | {name: experts[name] for name in shared}
        | {
            "num_dense_layers": sparse.index(True) if any(sparse) else design.depth,
            "num_experts": moe.experts,
            "num_shared_experts": deepseek.shared_experts(moe),
            "route_scale": moe.scale,
            **_layer_types.write_windows(design, DEFAULT_WINDOW),
            "mup_enabled": design.embedding.multiplier is not None,
        }
    )


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_experts", "router.gate")
    weights.add_tensor(f"{hf}.expert_bias", f"{heddle}.router.expert_bias")


map_weights = partial(_common.map_weights, names=NAMES, map_feedforward=_map_feedforward)
FAMILY = Family("afmoe", "AfmoeForCausalLM", read_config, write_config, map_weights)
