"""Granite 4.0 (IBM 2025): Mamba-2 or attention, then experts or an MLP, with multipliers of embeddings and branches.

Attention has no positions, except with `position_embedding_type: rope`. `num_local_experts: 0` is a model without
experts, whose MLP is what is elsewhere the shared expert.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _mamba, granite, granitemoe
from heddle.exchange.families._mamba import PREFIXED_NAMES as NAMES
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import FULL
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba2 import Mamba2Config
from heddle.parts.positions.rope import RopeConfig

LINEAR = "linear_attention"
ALIASES = {"mamba": LINEAR, "attention": FULL}
ROTARY, NO_POSITION = "rope", "nope"


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layer_types` says which mixer each layer has."""
    eps = config.get("rms_norm_eps", 1e-6)
    types, activation = _read_types(config), _common.read_activation(config)
    if LINEAR in types and activation != "silu":
        raise config.invalid("hidden_act", f"layers of type {LINEAR} need silu")
    config.optional("mamba_chunk_size")
    config.expect("normalization_function", "rmsnorm", default="rmsnorm")
    mixers = {LINEAR: read_mamba(config, eps), FULL: _read_attention(config)}
    feedforward = _read_feedforward(config, activation, len(types))
    layers = [{"mixer": mixers[kind], "feedforward": feedforward} for kind in types]
    layers = _layer_types.merge_repeats(layers)
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, layers, **granite.read_multipliers(config))


def _read_types(config: ConfigReader) -> list[str]:
    depth = _layer_types.read_depth(config)
    types = config.get("layer_types", [LINEAR] * depth, "layers_block_type")
    types = [ALIASES.get(kind, kind) for kind in types]
    if len(types) != depth or set(types) - {LINEAR, FULL}:
        raise config.invalid("layer_types", f"should say {LINEAR} or {FULL} of each of {depth} layers")
    return types


def read_mamba(config: ConfigReader, eps: float) -> dict[str, Any]:
    """The Mamba-2 mixer; `mamba_d_head: auto` divides the inner width by the heads."""
    inner: int = config.get("mamba_expand", 2) * config.require_count("hidden_size")
    heads: int = config.get("mamba_n_heads", 128)
    if heads < 1:
        raise config.invalid("mamba_n_heads", "should be above 0")
    names = NAMES._replace(head_dim=("mamba_d_head", inner // heads))
    return _mamba.read_mixer(config, names, eps)


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    rotary = config.expect("position_embedding_type", None, NO_POSITION, ROTARY) == ROTARY
    mixer = granite.read_mixer(config)
    return mixer if rotary else mixer | {"position": None}


def _read_feedforward(config: ConfigReader, activation: str, depth: int) -> dict[str, Any]:
    """The feed-forward of every layer: experts and a shared one, or a gated one."""
    hidden, shared = config.get("intermediate_size", 11008), config.get("shared_intermediate_size", 1024)
    if config.get("num_local_experts", 8, "num_experts"):
        return granitemoe.read_experts(config, hidden, depth) | {"shared": 1, "shared_hidden": shared}
    config.get("num_experts_per_tok", 2)
    config.optional("router_aux_loss_coef")
    config.expect("output_router_logits", False, default=False)
    return {"kind": "gated", "hidden": shared, "activation": activation}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    is_rotary = isinstance(design_parts.first_attention(design).position, RopeConfig)
    types = [LINEAR if isinstance(layer.mixer, Mamba2Config) else FULL for layer in design_parts.layers(design)]
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | (_mamba.write_mixer(design, NAMES) if LINEAR in types else {NAMES.heads[0]: 1})
        | _write_feedforward(design)
        | granite.write_multipliers(design)
        | {
            "layer_types": types,
            "position_embedding_type": ROTARY if is_rotary else None,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def _write_feedforward(design: ModelConfig) -> dict[str, Any]:
    if any(design_parts.has_experts(design)):
        moe = design_parts.first_moe(design)
        return granitemoe.write_experts(design) | {"shared_intermediate_size": moe.shared_hidden or moe.hidden}
    dense = design_parts.first_gated(design)
    return {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": dense.hidden,
        "shared_intermediate_size": dense.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[dense.activation],
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of embeddings, norms and attention; gate and up are one matrix."""
    _common.map_embedding_and_head(design, weights)
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        _common.map_pre_norms(weights, hf, heddle)
        if f"{heddle}.mixer.convolution.weight" in weights.shapes:
            _mamba.map_mixer(weights, f"{hf}.mamba", f"{heddle}.mixer")
        else:
            _common.map_attention(weights, hf, heddle)
        experts, own = f"{hf}.block_sparse_moe", f"{heddle}.feedforward"
        shared = own
        if f"{own}.router.weight" in weights.shapes:
            shared = f"{own}.shared"
            granitemoe.map_experts(weights, experts, own)
        weights.add_module(f"{hf}.shared_mlp.input_linear", f"{shared}.gate", f"{shared}.up")
        weights.add_module(f"{hf}.shared_mlp.output_linear", f"{shared}.down")


FAMILY = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", read_config, write_config, map_weights)
