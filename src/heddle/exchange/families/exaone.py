"""LG's EXAONE 4 and K-EXAONE, and Kolibri 1: norms of q and k; layers without a window have no RoPE."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, deepseek, olmo
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL
from heddle.model.config import ModelConfig

WINDOW, PERIOD = 4096, 4  # if the field is absent


def read_exaone4(config: ConfigReader) -> dict[str, Any]:
    """EXAONE 4 (LG AI Research 2025): norms after each branch and of q and k; layers without a window have no RoPE."""
    # With `sliding_window`: null, no layer has a window and all have RoPE.
    feedforwards = [_common.read_gated(config)] * _layer_types.read_depth(config)
    layers = read_layers(config, config.get_nullable("sliding_window", WINDOW), feedforwards)
    return _common.rms_design(config, 1e-5, layers, residual={"kind": "reordered"})


def read_layers(config: ConfigReader, window: int | None, feedforwards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries for layers with these feed-forwards. window: of the layers that have one; without any, all have RoPE."""
    config.require("num_key_value_heads", int)
    mixer, types = _common.read_attention(config, qk_norm="head"), _read_types(config, window)
    mixers = [
        mixer | {"window": width, "position": mixer["position"] if width or not window else None}
        for width in _layer_types.layer_windows(config, types, window)
    ]
    return _layer_types.layers_of(mixers, feedforwards)


def _read_types(config: ConfigReader, window: int | None) -> list[str]:
    """The type of each layer; `sliding_window_pattern` applies if `layer_types` is absent."""
    depth, pattern = _layer_types.read_depth(config), config.optional("sliding_window_pattern")
    if config.data.get("layer_types") is not None or window is None:
        return _layer_types.read_types(config, [FULL] * depth)
    if isinstance(pattern, str) or (pattern is not None and not pattern > 0):
        raise config.invalid("sliding_window_pattern", "give layer_types beside it, as transformers requires")
    return _layer_types.full_every(pattern or PERIOD, config)


def _period(types: list[str]) -> int:
    """The period that alone would give these types, or the default one."""
    period = types.index(FULL) + 1 if FULL in types else PERIOD
    is_regular = all((kind == FULL) == ((index + 1) % period == 0) for index, kind in enumerate(types))
    return period if is_regular else PERIOD


def write_layers(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_layers` and `rms_design` read."""
    types, window = design_parts.layer_types(design), design_parts.first_window(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | {
            "sliding_window": window or WINDOW,
            "sliding_window_pattern": _period(types),
            **_common.written(design, "layer_types", "rms_norm_eps"),
        }
    )


def write_exaone4(design: ModelConfig) -> dict[str, Any]:
    fields, mixers = write_layers(design) | _common.write_gated(design), design_parts.mixers(design)
    if all(getattr(mixer, "window", None) is None and design_parts.has_rope(mixer) for mixer in mixers):
        fields["sliding_window"] = None
    return fields


EXAONE4 = Family("exaone4", "Exaone4ForCausalLM", read_exaone4, write_exaone4, olmo.map_olmo2)


NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def read_exaone_moe(config: ConfigReader) -> dict[str, Any]:
    """K-EXAONE (LG AI Research 2026): EXAONE 4's attention with norms before the branches, DeepSeek-V3's experts."""
    # Layers without a window have no RoPE.
    config.names = NAMES
    window, dense = config.require_count("sliding_window"), config.get("first_k_dense_replace", 1)
    routing = deepseek.read_sigmoid_routing(config)
    feedforwards = deepseek.read_feedforwards(config, routing, dense, bias=False)
    config.expect("first_last_k_dense_replace", None, dense)  # of the first files, as the list after it
    config.expect("is_moe_layer", None, [feedforward["kind"] == "moe" for feedforward in feedforwards])
    return _common.rms_design(config, 1e-5, read_layers(config, window, feedforwards))


def write_exaone_moe(design: ModelConfig) -> dict[str, Any]:
    return write_layers(design) | deepseek.write_feedforwards(design, NAMES) | deepseek.write_sigmoid_routing(design)


def _map_exaone_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_experts")
    weights.add_tensor(f"{hf}.e_score_correction_bias", f"{heddle}.router.expert_bias")


map_exaone_moe = partial(_common.map_weights, map_feedforward=_map_exaone_experts)
EXAONE_MOE = Family(
    "exaone_moe", "ExaoneMoeForCausalLM", read_exaone_moe, write_exaone_moe, map_exaone_moe, ignored_tensors=("mtp.",)
)


KOLIBRI_WINDOW, KOLIBRI_PERIOD = 513, 5
KOLIBRI_NAMES = {
    "input_layernorm": "residual.norms.mixer", "post_attn_norm": "residual.after.mixer",
    "post_attention_layernorm": "residual.norms.feedforward", "post_ffn_norm": "residual.after.feedforward",
    "moe.router.expert_bias": "feedforward.router.expert_bias",
}  # fmt: skip


def read_kolibri(config: ConfigReader) -> dict[str, Any]:
    """Kolibri 1 (Aleph Alpha 2026): EXAONE 4's attention, sandwich norms, and sigmoid experts with a bias on logits."""
    window, depth = config.get("sliding_window", KOLIBRI_WINDOW), _layer_types.read_depth(config)
    config.ignore("output_router_logits")
    types = _layer_types.read_types(config, _layer_types.full_every(KOLIBRI_PERIOD, config))
    mixer = _common.read_attention(config, head_dim=128, qk_norm="head")
    mixers = [
        mixer | {"window": width, "position": mixer["position"] if width else None}
        for width in _layer_types.layer_windows(config, types, window)
    ]
    experts = _moe.read_experts(config, depth, "moe_intermediate_size") | {
        "routing": "sigmoid_logits",
        "renormalize": config.get("norm_topk_prob", False),
        "shared": 1,
        "shared_hidden": config.get("shared_expert_intermediate_size", 512),
        "bias_update": 0.0,
    }
    experts.pop("aux_loss", None)
    return _common.rms_design(config, 1e-6, _layer_types.layers_of(mixers, experts), residual={"kind": "sandwich"})


def write_kolibri(design: ModelConfig) -> dict[str, Any]:
    moe, fields = design_parts.first_moe(design), _common.without(write_layers(design), "sliding_window_pattern")
    experts = _common.without(_moe.write_experts(design), "intermediate_size")
    own = {"moe_intermediate_size": moe.hidden, "shared_expert_intermediate_size": moe.shared_hidden or moe.hidden}
    return fields | experts | own | _common.written(design, "norm_topk_prob")


map_kolibri = partial(
    _common.map_weights,
    names=KOLIBRI_NAMES,
    map_feedforward=partial(_moe.map_feedforward, shared_expert="shared_experts"),
)
KOLIBRI = Family("kolibri1", "Kolibri1ForCausalLM", read_kolibri, write_kolibri, map_kolibri)
