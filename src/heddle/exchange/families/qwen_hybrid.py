"""Qwen3-Next and Qwen3.5: gated delta rule, and gated softmax attention in every fourth layer.

Norms multiply by `1 + γ`, except for the delta rule's head norm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, qwen
from heddle.exchange.family import DEPTHWISE_CONV, Family, ModuleNames, WeightMap, interleaved_by_group
from heddle.exchange.rope import FULL
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

LINEAR = _layer_types.LINEAR
DELTA = _common.Fields(
    heads=("linear_num_value_heads", int),
    key_heads=("linear_num_key_heads", int),
    head_dim=("linear_key_head_dim", int),
    value_dim=("linear_value_head_dim", int),
    conv_kernel=("linear_conv_kernel_dim", int),
)
DELTA_NAMES = {"A_log": "decay.rate", "dt_bias": "decay.bias", "norm": "norm", "out_proj": "out"}
DEFAULT_ROTARY_FACTOR = 0.25  # if the config has none


def _fits(design: ModelConfig) -> bool:
    """Whether the last layer has softmax attention, and experts if any layer has."""
    sparse = design_parts.has_experts(design)
    return isinstance(design.last_layer.mixer, AttentionConfig) and sparse[-1] == any(sparse)


def module_names(count_field: str) -> ModuleNames:
    """The names of the one multi-token module, whose layer has softmax attention; `count_field` says if there is one.

    Several would share their norms and their projection, as heddle's do not.
    """
    parts = {
        "pre_fc_norm_embedding": "embedding_norm",
        "pre_fc_norm_hidden": "hidden_norm",
        "fc": "projection",
        "norm": "final_norm.norm",
    }
    return ModuleNames(count_field, prefix="mtp", layer="mtp.layers.0", parts=parts, fits=_fits, most=1)


def read_hybrid_design(config: ConfigReader, feedforwards: list[dict[str, Any]]) -> dict[str, Any]:
    """A design with one layer for each feed-forward; `layer_types` says which mixer each layer has."""
    eps = config.get("rms_norm_eps", 1e-6)
    config.require("head_dim", int)
    config.require("num_key_value_heads", int)
    extra: dict[str, Any] = {"qk_norm": "head", "gate": "channel", "bias": config.get("attention_bias", False)}
    attention = _common.read_attention(config, partial_rotary_factor=DEFAULT_ROTARY_FACTOR, **extra)
    mixers = {FULL: attention, LINEAR: read_delta(config, eps)}
    usual = default_types(config.get("full_attention_interval", 4), len(feedforwards))
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    norm = {"kind": "rms", "eps": eps, "offset": 1.0, "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.layers_of([mixers[kind] for kind in types], feedforwards))


def default_types(interval: int, depth: int) -> list[str]:
    """The type of each layer if every `interval`th one has softmax attention."""
    return [LINEAR if (index + 1) % max(interval, 1) else FULL for index in range(depth)]


def read_delta(config: ConfigReader, eps: float) -> dict[str, Any]:
    """The gated delta rule; `eps` is of the norm of its heads."""
    config.expect("hidden_act", "silu", default="silu")  # the delta rule's convolution uses it too
    return {"kind": "gated_delta", **DELTA.read(config), "norm": {"kind": "rms", "eps": eps}}


def write_hybrid(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_hybrid_design` reads."""
    return (
        _common.write_common(design)
        | {"partial_rotary_factor": 1.0}  # written even if 1.0, because the default is 0.25
        | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | write_delta(design)
    )


def write_delta(design: ModelConfig) -> dict[str, Any]:
    """The types of the layers, and the fields of the first delta rule."""
    delta = DELTA.write(design_parts.first_gated_delta(design))
    return {"layer_types": _layer_types.types_of(design, GatedDeltaConfig), "hidden_act": "silu"} | delta


def map_hybrid(
    design: ModelConfig,
    weights: WeightMap,
    map_inputs: Callable[[WeightMap, str, str, int], None],
    modules: ModuleNames,
) -> None:
    """Llama's tensor names, those of the delta rule, and those of experts.

    map_inputs: maps the projections of the delta rule's input, given its key heads: each family has its own order.
    modules: the names of the multi-token module.
    """
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design, modules):
        qwen.map_experts(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)
        mixer, delta, own = layer.mixer, f"{hf}.linear_attn", f"{heddle}.mixer"
        if isinstance(mixer, GatedDeltaConfig):
            map_inputs(weights, delta, own, mixer.key_heads or mixer.heads)
            weights.add_module(f"{delta}.conv1d", f"{own}.convolution", transform=DEPTHWISE_CONV)
            weights.add_modules(delta, own, DELTA_NAMES)
        elif isinstance(mixer, AttentionConfig):  # q and its gate are one tensor, interleaved by head
            _common.map_attention(weights, hf, heddle)
            by_head = interleaved_by_group(mixer.heads)
            weights.add_module(f"{hf}.self_attn.q_proj", f"{own}.q", f"{own}.gate", transform=by_head)


QWEN3_NEXT_MODULES = module_names("num_nextn_predict_layers")


def read_qwen3_next(config: ConfigReader) -> dict[str, Any]:
    """Qwen3-Next (Qwen 2025): gated delta rule, gated softmax attention in every fourth layer, experts in every layer.

    Norms multiply by `1 + γ`, except for the delta rule's head norm. The multi-token module (`mtp.`) is read where the
    weights hold it and the model's last layer has softmax attention, as in published models.
    """
    config.expect("use_sliding_window", False, default=False)
    return read_hybrid_design(config, _moe.read_feedforwards(config, qwen.read_shared(config), renormalize=True))


def write_qwen3_next(design: ModelConfig) -> dict[str, Any]:
    types = _layer_types.types_of(design, GatedDeltaConfig)
    interval = types.index(FULL) + 1 if FULL in types else design.depth + 1
    is_usual = types == default_types(interval, design.depth)
    return (
        write_hybrid(design)
        | _moe.write_feedforwards(design)
        | qwen.write_shared(design)
        | {"use_sliding_window": False, "full_attention_interval": interval if is_usual else None, "hidden_act": "silu"}
    )


def _map_inputs_of_qwen3_next(weights: WeightMap, hf: str, heddle: str, groups: int) -> None:
    fused = [f"{heddle}.{name}" for name in ("q", "k", "v", "gate")]
    weights.add_module(f"{hf}.in_proj_qkvz", *fused, transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.in_proj_ba", f"{heddle}.beta", f"{heddle}.a", transform=interleaved_by_group(groups))


map_qwen3_next = partial(map_hybrid, map_inputs=_map_inputs_of_qwen3_next, modules=QWEN3_NEXT_MODULES)
QWEN3_NEXT = Family(
    "qwen3_next", "Qwen3NextForCausalLM", read_qwen3_next, write_qwen3_next, map_qwen3_next,
    ignored_tensors=("mtp.",), multi_token=QWEN3_NEXT_MODULES,
)  # fmt: skip


# What the dense Qwen3.5 and its mixture share: Qwen3-Next's layers with one tensor for each input projection.

QWEN3_5_MODULES = module_names("mtp_num_hidden_layers")
STATE_DTYPE = {"mamba_ssm_dtype": "float32"}  # vLLM reads it; heddle's states have at least float32


def check_fixed_fields(config: ConfigReader) -> None:
    """Fields with one value in every published model."""
    config.expect("attn_output_gate", True, default=True)
    config.expect("output_gate_type", "swish", None)
    config.expect("mamba_ssm_dtype", "float32", None)
    config.optional("mtp_use_dedicated_embeddings")  # a module with such tensors is not read
    config.expect("mlp_only_layers", [], None)


def _map_inputs_of_qwen3_5(weights: WeightMap, hf: str, heddle: str, _: int) -> None:
    weights.add_module(f"{hf}.in_proj_qkv", *(f"{heddle}.{role}" for role in "qkv"))
    weights.add_modules(hf, heddle, {"in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "a"})


map_qwen3_5 = partial(map_hybrid, map_inputs=_map_inputs_of_qwen3_5, modules=QWEN3_5_MODULES)
qwen3_5 = partial(Family, map_weights=map_qwen3_5, ignored_tensors=("mtp.",), multi_token=QWEN3_5_MODULES)


def read_qwen3_5(config: ConfigReader) -> dict[str, Any]:
    """The text model of Qwen3.5 and 3.6 (Qwen 2026): Qwen3-Next's two kinds of mixers, with a dense feed-forward.

    The multi-token module (`mtp.`) is read where the weights hold it. `mrope_section` is for images: a text has one
    position per axis.
    """
    check_fixed_fields(config)
    return read_hybrid_design(config, [_common.read_gated(config)] * _layer_types.read_depth(config))


def write_qwen3_5(design: ModelConfig) -> dict[str, Any]:
    return write_hybrid(design) | _common.write_gated(design) | {"hidden_act": "silu"} | STATE_DTYPE


QWEN3_5 = qwen3_5("qwen3_5_text", "Qwen3_5ForCausalLM", read_qwen3_5, write_qwen3_5)


def read_qwen3_5_moe(config: ConfigReader) -> dict[str, Any]:
    """The text model of Qwen3.5's and 3.6's mixtures (Qwen 2026): Qwen3.5 with experts and a shared one in every layer.

    The multi-token module (`mtp.`) is read where the weights hold it. `mrope_section` is for images: a text has one
    position per axis.
    """
    # Every layer has experts, whose gates sum to 1.
    check_fixed_fields(config)
    config.expect("norm_topk_prob", True, default=True)
    config.optional("intermediate_size")  # no layer is dense
    depth = _layer_types.read_depth(config)
    experts = _moe.read_experts(config, depth, "moe_intermediate_size") | qwen.read_shared(config)
    return read_hybrid_design(config, [experts] * depth)


def write_qwen3_5_moe(design: ModelConfig) -> dict[str, Any]:
    moe = design_parts.first_moe(design)
    fields = write_hybrid(design) | qwen.write_shared(design) | _moe.write_aux_loss(design, moe) | STATE_DTYPE
    sizes = {"num_experts": moe.experts, "num_experts_per_tok": moe.top_k, "moe_intermediate_size": moe.hidden}
    return fields | sizes


# After Qwen3-Next, which fits the same designs, for older readers.
QWEN3_5_MOE = qwen3_5("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", read_qwen3_5_moe, write_qwen3_5_moe, priority=101)
