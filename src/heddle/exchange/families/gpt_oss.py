"""gpt-oss (OpenAI 2025): attention sinks, a window in every other layer, YaRN, experts with clamped SwiGLU and biases.

The experts of a layer are one tensor [experts, inputs, outputs] per projection. Gate and up share a tensor in which
their outputs alternate.
"""

from typing import Any

import torch

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_rope
from heddle.model.config import ModelConfig

DEFAULT_WINDOW = 128  # if the field is absent
DEFAULT_THETA = 150000.0
DEFAULT_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, except that some have a window."""
    mixer = {
        "kind": "attention",
        **_common.read_heads(config, config.require("hidden_size", int)),
        "bias": config.get("attention_bias", True),
        "sink": True,
        "dropout": config.get("attention_dropout", 0.0),
    }
    mixer["position"] = _read_rope(config, mixer["head_dim"])
    feedforward = _read_experts(config)
    usual = [FULL if index % 2 else SLIDING for index in range(_layer_types.read_depth(config))]
    windows = _layer_types.layer_windows(
        config, _layer_types.read_types(config, usual), config.get_nullable("sliding_window", DEFAULT_WINDOW)
    )
    layers = [{"mixer": mixer | {"window": window}, "feedforward": feedforward} for window in windows]
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", 1e-5), "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.merge_repeats(layers))


def _read_rope(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    """RoPE of all dims, with the YaRN of the published model if the config has no scaling."""
    has_rope = config.optional("rope_parameters", "rope_scaling")
    rope_config = config if has_rope else ConfigReader({**config.data, "rope_parameters": DEFAULT_YARN})
    rope = read_rope(rope_config, head_dim, DEFAULT_THETA)
    config.unread -= {"rope_parameters", "rope_scaling", "rope_theta"}
    config.unread.discard("partial_rotary_factor")
    trained = rope.get("scaling", {}).get("original_length")
    config.expect("initial_context_length", trained, default=trained)
    return rope


def _read_experts(config: ConfigReader) -> dict[str, Any]:
    """The experts, the same in every layer."""
    config.expect("hidden_act", "silu", default="silu")
    top_k = config.require("num_experts_per_tok", int)
    config.expect("experts_per_token", top_k, default=top_k)
    return {
        "kind": "moe",
        "experts": config.require("num_local_experts", int, "num_experts"),
        "top_k": top_k,
        "hidden": config.require("intermediate_size", int),
        "activation": "swiglu_clamped",
        "limit": config.get("swiglu_limit", 7.0),
        "alpha": config.get("swiglu_alpha", 1.702),
        "bias": True,
        "routing": "topk_softmax",
        "router_bias": True,
        **_moe.read_aux_loss(config, top_k, _layer_types.read_depth(config)),
    }


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, experts = design_parts.first_attention(design), design_parts.first_moe(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | {
            "attention_bias": mixer.bias is True,
            "layer_types": design_parts.layer_types(design),
            "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
            "rms_norm_eps": design_parts.norm_eps(design),
            "hidden_act": "silu",
            "intermediate_size": experts.hidden,
            "num_local_experts": experts.experts,
            "num_experts_per_tok": experts.top_k,
            "experts_per_token": experts.top_k,
            "swiglu_limit": experts.limit or 7.0,
            "swiglu_alpha": experts.alpha or 1.702,
            **_moe.write_aux_loss(design, experts),
        }
    )


# Gate and up with alternating outputs: a stack of transposed matrices, or of biases.
INTERLEAVED_GATE_UP = TensorTransform(
    lambda parameters: _transpose_matrices(torch.stack(list(parameters), dim=2).flatten(1, 2)),
    lambda tensor, shapes: _transpose_matrices(tensor).unflatten(1, (-1, 2)).unbind(2),
)
TRANSPOSED_EXPERTS = TensorTransform(lambda parameters: parameters[0].mT, lambda tensor, shapes: [tensor.mT])


def _transpose_matrices(x: torch.Tensor) -> torch.Tensor:
    return x.mT if x.dim() == 3 else x


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and those of sinks, router and experts."""
    _common.map_embedding_and_head(design, weights)
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        _common.map_attention(weights, hf, heddle)
        _common.map_pre_norms(weights, hf, heddle)
        weights.add_tensor(f"{hf}.self_attn.sinks", f"{heddle}.mixer.sink")
        weights.add_module(f"{hf}.mlp.router", f"{heddle}.feedforward.router")
        stack, own = f"{hf}.mlp.experts", f"{heddle}.feedforward"
        for suffix, name in (("", "weight"), ("_bias", "bias")):
            weights.add_tensor(
                f"{stack}.gate_up_proj{suffix}", f"{own}.gate.{name}", f"{own}.up.{name}", transform=INTERLEAVED_GATE_UP
            )
        weights.add_tensor(f"{stack}.down_proj", f"{own}.down.weight", transform=TRANSPOSED_EXPERTS)
        weights.add_tensor(f"{stack}.down_proj_bias", f"{own}.down.bias")


FAMILY = Family("gpt_oss", "GptOssForCausalLM", read_config, write_config, map_weights)
