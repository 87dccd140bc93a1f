"""Kimi Linear (Kimi Team 2025): Kimi Delta Attention or latent attention without rotation, DeepSeek-V3's experts.

`linear_attn_config` numbers layers from 1. A `layer_types` beside it takes precedence, as in transformers.
"""

import itertools
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.design_parts import DENSE, SPARSE
from heddle.exchange.families import _common, _layer_types, _moe, deepseek, mistral
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap, reshaped
from heddle.exchange.rope import FULL
from heddle.model.config import ModelConfig
from heddle.parts.mixers.kda import KDAConfig

LINEAR = _layer_types.LINEAR
DELTA = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "b_proj": "beta", "f_a_proj": "decay_down", "f_b_proj": "decay_up",
    "g_a_proj": "gate_down", "g_b_proj": "gate_up", "dt_bias": "decay.bias", "o_norm": "norm", "o_proj": "out",
}  # fmt: skip
EXPERTS = _common.Fields(
    experts=("num_experts", int, "num_local_experts"),
    top_k=("num_experts_per_token", int, "num_experts_per_tok"),
    hidden=("moe_intermediate_size", int),
)
ROUTING = _common.Fields(
    scale=("routed_scaling_factor", 2.446),
    renormalize=("moe_renormalize", True, "norm_topk_prob"),
    groups=("num_expert_group", 1, "n_group"),
    top_groups=("topk_group", 1),
)
# The logarithm of the rate of decay, stored as [1, 1, heads, 1].
PER_HEAD = reshaped(1, 1, -1, 1)
# Of a RoPE that no layer has, and of training or other programs.
UNUSED_FIELDS = "head_dim rope_theta rope_parameters rope_scaling use_grouped_topk num_nextn_predict_layers".split()  # noqa: SIM905


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value: `bias_update` is 0."""
    depth, eps = _layer_types.read_depth(config), config.get("rms_norm_eps", 1e-5)
    config.expect("mla_use_nope", True, default=True)
    config.expect("tie_word_embeddings", False, default=False)  # transformers would not tie them
    config.expect("hidden_act", "silu", default="silu")  # the delta rule's convolution uses it too
    config.note(*UNUSED_FIELDS)
    empty: dict[str, Any] = {}
    linear = ConfigReader(config.get("linear_attn_config", empty), f"{config.source}: linear_attn_config")
    types = _read_types(config, linear, depth)
    mixers = {FULL: deepseek.read_latents(config, query_rank=None), LINEAR: _read_delta(config, linear, eps)}
    layers = _layer_types.layers_of([mixers[kind] for kind in types], _read_feedforwards(config, depth))
    return _common.rms_design(config, eps, layers)


def _read_types(config: ConfigReader, linear: ConfigReader, depth: int) -> list[str]:
    linear.optional("kda_layers")
    linear.optional("full_attn_layers")
    default = [FULL if index and index % 4 == 0 else LINEAR for index in range(depth)]
    if {"kda_layers", "full_attn_layers"} <= linear.data.keys():
        numbers = {name: linear.require(name, list) for name in ("kda_layers", "full_attn_layers")}
        if sorted(map(str, itertools.chain(*numbers.values()))) != sorted(map(str, range(1, depth + 1))):
            raise linear.invalid("kda_layers", f"it and full_attn_layers should name each of 1 to {depth} once")
        default = [FULL if number in numbers["full_attn_layers"] else LINEAR for number in range(1, depth + 1)]
    return _layer_types.read_kinds(config, "layer_types", default, (LINEAR, FULL))


def _read_delta(config: ConfigReader, linear: ConfigReader, eps: float) -> dict[str, Any]:
    """A field of `linear_attn_config` takes precedence over the config's."""
    heads = linear.get("num_heads", config.get("linear_num_heads", 32))
    head_dim = linear.get("head_dim", config.get("linear_head_dim", 128))
    kernel = linear.get("short_conv_kernel_size", config.get("linear_conv_kernel_dim", 4))
    linear.check_all_read()
    norm = {"kind": "rms", "eps": eps}
    return {"kind": "kda", "heads": heads, "head_dim": head_dim, "conv_kernel": kernel, "norm": norm}


def _read_feedforwards(config: ConfigReader, depth: int) -> list[dict[str, Any]]:
    """The feed-forward of each layer: the first `first_k_dense_replace` are dense, or `mlp_layer_types` says which."""
    config.get("output_router_logits", False)
    config.get("pretraining_tp", 1)
    config.expect("moe_layer_freq", 1, default=1)
    config.expect("moe_router_activation_func", "sigmoid", default="sigmoid")
    dense_layers = config.get("first_k_dense_replace", 1)
    usual = [DENSE if index < dense_layers else SPARSE for index in range(depth)]
    types = _layer_types.read_kinds(config, "mlp_layer_types", usual, (DENSE, SPARSE))
    dense = {"kind": "gated", "hidden": config.require("intermediate_size", int)}
    feedforwards = {DENSE: dense, SPARSE: read_experts(config, ROUTING)}
    return [feedforwards[kind] for kind in types]


def read_experts(config: ConfigReader, routing: _common.Fields) -> dict[str, Any]:
    """The mixture, with the family's fields of its routing."""
    shared = config.require("num_shared_experts", int, "n_shared_experts")
    fields = EXPERTS.read(config) | routing.read(config)
    return {"kind": "moe", "shared": shared, "routing": "sigmoid", "bias_update": 0.0} | fields


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    delta, moe = design_parts.first_mixer(design, KDAConfig(heads=1)), design_parts.first_moe(design)
    common = _common.write_common(design)
    length = common.pop("max_position_embeddings")
    latents = deepseek.write_latents(design_parts.first_latent_attention(design))
    return (
        common
        | latents
        | {
            "model_max_length": length,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "rms_norm_eps": design_parts.norm_eps(design),
            "layer_types": _layer_types.types_of(design, KDAConfig),
            "linear_num_heads": delta.heads,
            "linear_head_dim": delta.head_dim or design.width,
            "linear_conv_kernel_dim": delta.conv_kernel,
            "intermediate_size": design_parts.first_gated(design).hidden,
            "mlp_layer_types": design_parts.mlp_layer_types(design),
            **EXPERTS.write(moe),
            "num_shared_experts": deepseek.shared_experts(moe),
            **ROUTING.write(moe),
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Published names: one convolution for each of q, k and v, and Mixtral's names of experts."""
    _common.map_embedding_and_head(design, weights)
    for hf, heddle, layer in _common.named_layers(design):
        if isinstance(layer.mixer, KDAConfig):
            _map_delta(weights, f"{hf}.self_attn", f"{heddle}.mixer")
        else:
            deepseek.map_attention(weights, f"{hf}.self_attn", f"{heddle}.mixer", getattr(layer.mixer, "heads", 1))
        _map_feedforward(weights, hf, f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)


def _map_delta(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_modules(hf, heddle, DELTA)
    weights.add_tensor(f"{hf}.A_log", f"{heddle}.decay.rate", transform=PER_HEAD)
    map_convolutions(weights, hf, heddle)


def map_convolutions(weights: WeightMap, hf: str, heddle: str) -> None:
    """The convolution of q, k and v, stored as three."""
    channels = weights.shapes[f"{heddle}.convolution.weight"][0] // 3  # values are as wide as keys
    for number, name in enumerate("qkv"):
        rows = slice(number * channels, (number + 1) * channels)
        convolution = (f"{heddle}.convolution.weight", rows)
        weights.add_tensor(f"{hf}.{name}_conv1d.weight", convolution, transform=DEPTHWISE_CONV)


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    if f"{heddle}.router.weight" not in weights.shapes:
        _common.map_gated(weights, f"{hf}.mlp", heddle)
        for role in ("gate", "up", "down"):  # as transformers writes them
            names = (f"{hf}.{module}.{role}_proj.weight" for module in ("block_sparse_moe", "mlp"))
            weights.add_renamed(*names)
        return
    experts = f"{hf}.block_sparse_moe"
    _moe.map_experts(weights, experts, heddle, mistral.EXPERT_NAMES)
    _common.map_gated(weights, f"{experts}.shared_experts", f"{heddle}.shared")
    weights.add_tensor(f"{experts}.gate.e_score_correction_bias", f"{heddle}.router.expert_bias")


FAMILY = Family("kimi_linear", "KimiLinearForCausalLM", read_config, write_config, map_weights)
