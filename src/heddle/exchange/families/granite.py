"""IBM's Granite: multipliers of embeddings, scores, branches and logits; with experts, windows or Mamba-2."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, mamba2
from heddle.exchange.family import STACKED, Family, WeightMap
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba2 import Mamba2Config
from heddle.parts.positions.rope import RopeConfig
from heddle.parts.residuals.pre_norm import PreNormConfig
from heddle.parts.residuals.sandwich import SandwichConfig


def read_multipliers(config: ConfigReader, tied: bool = False) -> dict[str, Any]:
    """The embedding, residual and head of a design. tied: the family's default."""
    scaling = config.get("logits_scaling", 1.0)
    if not scaling > 0:
        raise config.invalid("logits_scaling", "divides the logits and should be above 0")
    return {
        "embedding": {"multiplier": _common.multiplier(config.get("embedding_multiplier", 1.0))},
        "residual": {"kind": "pre_norm", "multiplier": _common.multiplier(config.get("residual_multiplier", 1.0))},
        "head": {"tied": config.get("tie_word_embeddings", tied), "scale": 1 / scaling},
    }


def branch_multiplier(design: ModelConfig) -> float:
    """What branches are multiplied by."""
    return (isinstance(design.residual, PreNormConfig | SandwichConfig) and design.residual.multiplier) or 1.0


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """Attention with a multiplier of its scores."""
    bias, scale = config.get("attention_bias", False), config.get_nullable("attention_multiplier", 1.0)
    return _common.read_attention(config, bias=bias, scale=scale)


def write_multipliers(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_multipliers` and `read_mixer` read, without heads and RoPE."""
    return {
        **_common.written(design, "attention_bias"),
        "attention_multiplier": design_parts.first_attention(design).scale,
        "embedding_multiplier": design.embedding.multiplier or 1.0,
        "residual_multiplier": branch_multiplier(design),
        "logits_scaling": float(f"{1 / design.head.scale:.12g}"),
    }


def read_granite(config: ConfigReader) -> dict[str, Any]:
    """Granite 3 (IBM 2024): Llama's decoder with multipliers of embeddings, attention scores, branches and logits."""
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    layers = _common.same_layers(config, read_mixer(config), feedforward)
    return _common.rms_design(config, 1e-6, layers, **read_multipliers(config))


def write_granite(design: ModelConfig) -> dict[str, Any]:
    return _common.write_decoder(design) | write_multipliers(design) | _common.written(design, "mlp_bias")


GRANITE = Family("granite", "GraniteForCausalLM", read_granite, write_granite, _common.map_weights)


def read_hyperclovax(config: ConfigReader) -> dict[str, Any]:
    """HyperCLOVA X SEED (NAVER 2025): Granite with a norm after each branch too, and logits that are multiplied."""
    _common.check_width(config)
    mixer = _common.read_attention(config, bias=config.get("attention_bias", False))
    mixer["scale"] = config.optional("attention_multiplier")
    layers = _common.same_layers(config, mixer, _common.read_gated(config, bias=config.get("mlp_bias", False)))
    design = _common.rms_design(config, 1e-6, layers, **read_multipliers(config))
    design["residual"] |= {"kind": "sandwich"} if config.get("use_post_norm", True) else {}
    design["head"] |= {"scale": config.get("logits_scaling", 1.0)}
    return design


def write_hyperclovax(design: ModelConfig) -> dict[str, Any]:
    own = {"logits_scaling": design.head.scale, "use_post_norm": isinstance(design.residual, SandwichConfig)}
    return write_granite(design) | own


AFTER = {"post_norm1": "residual.after.mixer", "post_norm2": "residual.after.feedforward"}
HYPERCLOVAX = Family(
    "hyperclovax", "HyperCLOVAXForCausalLM", read_hyperclovax, write_hyperclovax,
    partial(_common.map_weights, names=_common.PRE_NORMS | AFTER),
)  # fmt: skip


def read_experts(config: ConfigReader, hidden: int, depth: int) -> dict[str, Any]:
    """The routed experts of every layer, of this width."""
    top_k = config.get("num_experts_per_tok", 2)
    return {
        "kind": "moe",
        "experts": config.get("num_local_experts", 8, "num_experts"),
        "top_k": top_k,
        "hidden": hidden,
        "activation": _common.read_activation(config),
        "routing": "topk_softmax",
        **_moe.read_aux_loss(config, top_k, depth),
    }


def write_experts(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_experts` reads, and their width."""
    moe = design_parts.first_moe(design)
    return {
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[moe.activation or "silu"],
        **_moe.write_aux_loss(design, moe),
    }


def read_moe(config: ConfigReader) -> dict[str, Any]:
    """Granite 3 with experts (IBM 2024): Granite's attention and multipliers, routed experts in every layer."""
    hidden, depth = config.require("intermediate_size", int), config.require("num_hidden_layers", int)
    layers = _common.same_layers(config, read_mixer(config), read_experts(config, hidden, depth))
    return _common.rms_design(config, 1e-6, layers, **read_multipliers(config))


def write_moe(design: ModelConfig) -> dict[str, Any]:
    return _common.write_decoder(design) | write_multipliers(design) | write_experts(design)


def map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """The router and the stacks of experts; gate and up are one stack."""
    weights.add_tensor(f"{hf}.router.layer.weight", f"{heddle}.router.weight")
    weights.add_tensor(f"{hf}.input_linear.weight", f"{heddle}.gate.weight", f"{heddle}.up.weight", transform=STACKED)
    weights.add_tensor(f"{hf}.output_linear.weight", f"{heddle}.down.weight")


map_moe = partial(_common.map_weights, map_feedforward=map_experts, feedforward="block_sparse_moe")
GRANITEMOE = Family("granitemoe", "GraniteMoeForCausalLM", read_moe, write_moe, map_moe)


def read_shared(config: ConfigReader) -> dict[str, Any]:
    """The fields of the shared expert; a width of 0 is a model without one."""
    shared = config.get("shared_intermediate_size", 0)
    return {"shared": 1, "shared_hidden": shared} if shared else {}


def read_moe_shared(config: ConfigReader) -> dict[str, Any]:
    """Granite 3 with a shared expert (IBM 2025): Granite's multipliers, routed experts and a shared one."""
    design = read_moe(config)
    design["layers"][0]["feedforward"] |= read_shared(config)
    return design


def write_moe_shared(design: ModelConfig) -> dict[str, Any]:
    moe = design_parts.first_moe(design)
    return write_moe(design) | {"shared_intermediate_size": (moe.shared_hidden or moe.hidden) if moe.shared else 0}


def map_moe_shared(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names of Granite's experts and of the shared one."""
    map_moe(design, weights)
    map_shared(design, weights)


def map_shared(design: ModelConfig, weights: WeightMap) -> None:
    """The shared expert of each layer; its gate and up are one matrix."""
    for index in range(design.depth):
        map_fused(weights, f"model.layers.{index}.shared_mlp", f"layers.{index}.feedforward.shared")


def map_fused(weights: WeightMap, hf: str, heddle: str) -> None:
    """A gated feed-forward with gate and up as one matrix."""
    weights.add_module(f"{hf}.input_linear", f"{heddle}.gate", f"{heddle}.up")
    weights.add_module(f"{hf}.output_linear", f"{heddle}.down")


GRANITEMOESHARED = Family(
    "granitemoeshared", "GraniteMoeSharedForCausalLM", read_moe_shared, write_moe_shared, map_moe_shared
)


WINDOW = 128  # if the field is absent
SINK = {"self_attn.sinks": "mixer.sink"}


def read_layers(config: ConfigReader, feedforward: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers with this feed-forward; a layer with a theta of 0 has no RoPE."""
    mixer, depth = read_mixer(config) | {"sink": True}, _layer_types.read_depth(config)
    usual = [SLIDING if index % 4 else FULL for index in range(depth)]
    windows = _layer_types.read_windows(config, usual, WINDOW)
    thetas = config.get("layer_rope_theta", [mixer["position"]["base"]] * depth)
    if len(thetas) != depth:
        raise config.invalid("layer_rope_theta", f"num_hidden_layers needs {depth} entries")
    positions = [mixer["position"] | {"base": float(theta)} if theta else None for theta in thetas]
    mixers = [mixer | {"window": w, "position": position} for w, position in zip(windows, positions, strict=True)]
    return _layer_types.layers_of(mixers, feedforward)


def read_granite_swa(config: ConfigReader) -> dict[str, Any]:
    """Granite with windows (IBM 2026): Granite 3 with sinks, windows in most layers, a theta for each layer."""
    layers = read_layers(config, _common.read_gated(config, bias=config.get("mlp_bias", False)))
    return _common.rms_design(config, 1e-5, layers, **read_multipliers(config, tied=True))


def write_windows(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_layers` reads."""
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    thetas = [design_parts.rope_of(mixer).base if design_parts.has_rope(mixer) else 0.0 for mixer in mixers]
    return _common.write_attention(design, design_parts.first_rope(design)) | {
        "layer_rope_theta": thetas,
        **_layer_types.write_windows(design, WINDOW),
    }


def write_swa(design: ModelConfig) -> dict[str, Any]:
    return write_granite(design) | write_windows(design)


map_swa = partial(_common.map_weights, names=_common.PRE_NORMS | SINK)
GRANITE_SWA = Family("granite_swa", "GraniteSWAForCausalLM", read_granite_swa, write_swa, map_swa)


def read_moe_swa(config: ConfigReader) -> dict[str, Any]:
    """Granite's mixtures with windows (IBM 2026): the attention of `granite_swa`, routed experts and a shared one."""
    hidden, depth = config.require("intermediate_size", int), _layer_types.read_depth(config)
    layers = read_layers(config, read_experts(config, hidden, depth) | read_shared(config))
    return _common.rms_design(config, 1e-6, layers, **read_multipliers(config))


def write_moe_swa(design: ModelConfig) -> dict[str, Any]:
    return write_moe_shared(design) | write_windows(design)


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """The router and the stacks of experts; gate and up are one stack."""
    weights.add_tensor(f"{hf}.router.weight", f"{heddle}.router.weight")
    gate_up = f"{heddle}.gate.weight", f"{heddle}.up.weight"
    weights.add_tensor(f"{hf}.experts.gate_up_proj", *gate_up, transform=STACKED)
    weights.add_tensor(f"{hf}.experts.down_proj", f"{heddle}.down.weight")


def map_moe_swa(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, the experts', and the sinks."""
    map_swa(design, weights, map_feedforward=_map_experts, feedforward="block_sparse_moe")
    map_shared(design, weights)


GRANITEMOE_SWA = Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", read_moe_swa, write_moe_swa, map_moe_swa)


LINEAR = _layer_types.LINEAR
ALIASES = {"mamba": LINEAR, "attention": FULL}
ROTARY, NO_POSITION = "rope", "nope"


def read_hybrid(config: ConfigReader) -> dict[str, Any]:
    """Granite 4.0 (IBM 2025): Mamba-2 or attention, then experts or an MLP, with Granite's multipliers.

    Attention has no positions, except with `position_embedding_type: rope`. `num_local_experts: 0` is a model without
    experts; its MLP has the names that the shared expert has in models with experts.
    """
    depth, eps = _layer_types.read_depth(config), config.get("rms_norm_eps", 1e-6)
    types = config.get("layer_types", [LINEAR] * depth, "layers_block_type")
    types, activation = [ALIASES.get(kind, kind) for kind in types], _common.read_activation(config)
    if len(types) != depth or set(types) - {LINEAR, FULL}:
        raise config.invalid("layer_types", f"should say {LINEAR} or {FULL} of each of {depth} layers")
    if LINEAR in types and activation != "silu":
        raise config.invalid("hidden_act", f"layers of type {LINEAR} need silu")
    config.optional("mamba_chunk_size")
    config.expect("normalization_function", "rmsnorm", default="rmsnorm")
    rotary = config.expect("position_embedding_type", None, NO_POSITION, ROTARY) == ROTARY
    attention = read_mixer(config)
    mixers = {LINEAR: mamba2.read_mamba(config, eps), FULL: attention if rotary else attention | {"position": None}}
    layers = _layer_types.layers_of([mixers[kind] for kind in types], _read_feedforward(config, activation, depth))
    return _common.rms_design(config, eps, layers, **read_multipliers(config))


def _read_feedforward(config: ConfigReader, activation: str, depth: int) -> dict[str, Any]:
    """The feed-forward of every layer: experts and a shared one, or a gated one."""
    hidden, shared = config.get("intermediate_size", 11008), config.get("shared_intermediate_size", 1024)
    if config.get("num_local_experts", 8, "num_experts"):
        return read_experts(config, hidden, depth) | {"shared": 1, "shared_hidden": shared}
    config.get("num_experts_per_tok", 2)
    config.optional("router_aux_loss_coef")
    config.expect("output_router_logits", False, default=False)
    return {"kind": "gated", "hidden": shared, "activation": activation}


def write_hybrid(design: ModelConfig) -> dict[str, Any]:
    is_rotary = isinstance(design_parts.first_attention(design).position, RopeConfig)
    types = _layer_types.types_of(design, Mamba2Config)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | (mamba2.write_mixer(design, mamba2.PREFIXED_NAMES) if LINEAR in types else {"mamba_n_heads": 1})
        | _write_feedforward(design)
        | write_multipliers(design)
        | {"layer_types": types, "position_embedding_type": ROTARY if is_rotary else None}
        | _common.written(design, "rms_norm_eps")
    )


def _write_feedforward(design: ModelConfig) -> dict[str, Any]:
    if any(design_parts.has_experts(design)):
        moe = design_parts.first_moe(design)
        return write_experts(design) | {"shared_intermediate_size": moe.shared_hidden or moe.hidden}
    dense = design_parts.first_gated(design)
    return {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "intermediate_size": dense.hidden,
        "shared_intermediate_size": dense.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[dense.activation],
    }


def map_hybrid(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of embeddings, norms and attention; gate and up are one matrix."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, _ in _common.named_layers(design):
        _common.map_pre_norms(weights, hf, heddle)
        if f"{heddle}.mixer.convolution.weight" in weights.shapes:
            mamba2.map_mixer(weights, f"{hf}.mamba", f"{heddle}.mixer")
        else:
            _common.map_attention(weights, hf, heddle)
        shared = own = f"{heddle}.feedforward"
        if f"{own}.router.weight" in weights.shapes:
            shared = f"{own}.shared"
            map_experts(weights, f"{hf}.block_sparse_moe", own)
        map_fused(weights, f"{hf}.shared_mlp", shared)


GRANITEMOEHYBRID = Family("granitemoehybrid", "GraniteMoeHybridForCausalLM", read_hybrid, write_hybrid, map_hybrid)
