"""gpt-oss (OpenAI 2025): attention sinks, a window in every other layer, YaRN, experts with clamped SwiGLU and biases.

The experts of a layer are one tensor [experts, inputs, outputs] per projection. Gate and up share a tensor in which
their outputs alternate.
"""

from functools import partial
from typing import Any

import torch

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import STACKED_TRANSPOSED, Family, TensorTransform, WeightMap
from heddle.exchange.rope import FULL, SLIDING, read_rope
from heddle.model.config import ModelConfig

DEFAULT_WINDOW = 128  # if the field is absent
DEFAULT_THETA = 150000.0
DEFAULT_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, except that some have a window."""
    heads = _common.read_heads(config)
    mixer = _common.attention(
        config, heads, _read_rope(config, heads["head_dim"]), bias=config.get("attention_bias", True), sink=True
    )
    experts = _read_experts(config)
    usual = [FULL if index % 2 else SLIDING for index in range(_layer_types.read_depth(config))]
    windows = _layer_types.read_windows(config, usual, DEFAULT_WINDOW)
    layers = _layer_types.layers_of([mixer | {"window": window} for window in windows], experts)
    return _common.rms_design(config, 1e-5, layers, cast="after")


def _read_rope(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    """RoPE of all dims, with the YaRN of the published model if the config has no scaling."""
    has_rope = config.data.get("rope_scaling") or config.optional("rope_parameters") is not None
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
    experts = design_parts.first_moe(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _layer_types.write_windows(design, DEFAULT_WINDOW)
        | _common.written(design, "attention_bias", "rms_norm_eps")
        | {
            "hidden_act": "silu",
            "intermediate_size": experts.hidden,
            "num_local_experts": experts.experts,
            "num_experts_per_tok": experts.top_k,
            "experts_per_token": experts.top_k,
            "swiglu_limit": experts.limit or 7.0,
            "swiglu_alpha": experts.alpha or 1.702,
        }
        | _moe.write_aux_loss(design, experts)
    )


# Gate and up with alternating outputs: a stack of transposed matrices, or of biases.
INTERLEAVED_GATE_UP = TensorTransform(
    lambda parameters: _transpose_matrices(torch.stack(list(parameters), dim=2).flatten(1, 2)),
    lambda tensor, shapes: _transpose_matrices(tensor).unflatten(1, (-1, 2)).unbind(2),
)


def _transpose_matrices(x: torch.Tensor) -> torch.Tensor:
    return x.mT if x.dim() == 3 else x


def _map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_module(f"{hf}.router", f"{heddle}.router")
    for suffix, name in (("", "weight"), ("_bias", "bias")):
        both = f"{heddle}.gate.{name}", f"{heddle}.up.{name}"
        weights.add_tensor(f"{hf}.experts.gate_up_proj{suffix}", *both, transform=INTERLEAVED_GATE_UP)
    weights.add_tensor(f"{hf}.experts.down_proj", f"{heddle}.down.weight", transform=STACKED_TRANSPOSED)
    weights.add_tensor(f"{hf}.experts.down_proj_bias", f"{heddle}.down.bias")


NAMES = _common.PRE_NORMS | {"self_attn.sinks": "mixer.sink"}
map_weights = partial(_common.map_weights, names=NAMES, map_feedforward=_map_experts)


FAMILY = Family("gpt_oss", "GptOssForCausalLM", read_config, write_config, map_weights)
