"""Llama 4 (Meta 2025): chunked attention with RoPE beside full attention without, and experts with weighted inputs.

Norms of queries and keys have no weights, so that they may stand before the rotation here.
"""

from typing import Any

import torch

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe, llama
from heddle.exchange.family import STACKED_TRANSPOSED, Family, TensorTransform, WeightMap
from heddle.exchange.rope import FULL, read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig

CHUNKED, GROWTH = "chunked_attention", "stepwise_from_one"
DEFAULT_CHUNK, DEFAULT_THETA, DEFAULT_GROWTH = 8192, 5e5, 0.1


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layer_types` says which layers have chunks, `no_rope_layers` which rotate, `moe_layers` which have experts."""
    config.note("router_jitter_noise", "router_aux_loss_coef", "for_llm_compressor")
    config.get("output_router_logits", False)
    heads = _common.read_heads(config, head_dim=128)
    depth, rotated = _layer_types.read_depth(config), llama.read_rotated(config)
    position = read_rope(config, heads["head_dim"], DEFAULT_THETA) | {"layout": "interleaved"}
    usual = [CHUNKED if has_rope else FULL for has_rope in rotated]
    types = _layer_types.read_kinds(config, "layer_types", usual, (CHUNKED, FULL))
    chunk = config.get_nullable("attention_chunk_size", DEFAULT_CHUNK)
    if chunk is None and CHUNKED in types:
        raise config.invalid("attention_chunk_size", f"layers of type {CHUNKED} need one")
    mixer = {
        "kind": "attention",
        **heads,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }
    normed = {"qk_norm": "head", "qk_norm_weight": False} if config.get("use_qk_norm", True) else {}
    beta, length = config.get("attn_scale", DEFAULT_GROWTH), config.get("floor_scale", DEFAULT_CHUNK)
    grows = config.get("attn_temperature_tuning", True) and beta
    growing = {"temperature_beta": beta, "temperature_length": length, "temperature_growth": GROWTH} if grows else {}
    step = config.get("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers", list(range(max(step, 1) - 1, depth, max(step, 1))))
    dense = {
        "kind": "gated",
        "hidden": config.require("intermediate_size_mlp", int),
        "activation": _common.read_activation(config),
    }
    experts = dense | {
        "kind": "moe",
        "hidden": config.require("intermediate_size", int),
        "experts": config.require("num_local_experts", int),
        "top_k": config.require("num_experts_per_tok", int),
        "routing": "sigmoid",
        "renormalize": False,
        "weighted": "inputs",
        "shared": 1,
    }
    layers = [
        {
            "mixer": mixer
            | ({"position": position, **normed} if has_rope else {"position": None, **growing})
            | ({"window": chunk, "chunked": True} if kind == CHUNKED else {}),
            "feedforward": experts if index in sparse else dense,
        }
        for index, (kind, has_rope) in enumerate(zip(types, rotated, strict=True))
    ]
    return _common.rms_design(config, 1e-5, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    attention = [mixer for mixer in design_parts.mixers(design) if isinstance(mixer, AttentionConfig)]
    first, moe = design_parts.first_attention(design), design_parts.first_moe(design)
    normed = next((mixer for mixer in attention if design_parts.has_rope(mixer)), first)
    growing = next((mixer for mixer in attention if mixer.temperature_beta is not None), None)
    gated, sparse = design_parts.first_gated(design), design_parts.has_experts(design)
    windows = [getattr(mixer, "window", None) for mixer in design_parts.mixers(design)]
    step = _moe.write_moe_layers(design)["decoder_sparse_step"]
    activation = moe.activation if True in sparse else gated.activation
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | {
            "attention_bias": first.bias is True,
            "use_qk_norm": normed.qk_norm == "head",
            "no_rope_layers": [int(design_parts.has_rope(mixer)) for mixer in design_parts.mixers(design)],
            "layer_types": [FULL if window is None else CHUNKED for window in windows],
            "attention_chunk_size": design_parts.first_window(design) or DEFAULT_CHUNK,
            "attn_temperature_tuning": growing is not None,
            "attn_scale": DEFAULT_GROWTH if growing is None else growing.temperature_beta,
            "floor_scale": DEFAULT_CHUNK if growing is None else growing.temperature_length,
            "interleave_moe_layer_step": step,
            "moe_layers": [index for index, is_sparse in enumerate(sparse) if is_sparse],
            "intermediate_size_mlp": gated.hidden,
            "intermediate_size": moe.hidden,
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "hidden_act": design_parts.HF_ACTIVATIONS[activation or "silu"],
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


# Gate and up side by side: a stack of transposed matrices.
GATE_AND_UP = TensorTransform(
    lambda parameters: torch.cat(list(parameters), dim=1).mT,
    lambda tensor, shapes: tensor.mT.split([shape[1] for shape in shapes], dim=1),
)


def map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    """A layer's feed-forward, dense or with experts."""
    if f"{heddle}.router.weight" not in weights.shapes:
        _common.map_gated(weights, hf, heddle)
        return
    weights.add_module(f"{hf}.router", f"{heddle}.router")
    _common.map_gated(weights, f"{hf}.shared_expert", f"{heddle}.shared")
    gate_up = (f"{heddle}.gate.weight", f"{heddle}.up.weight")
    weights.add_tensor(f"{hf}.experts.gate_up_proj", *gate_up, transform=GATE_AND_UP)
    weights.add_tensor(f"{hf}.experts.down_proj", f"{heddle}.down.weight", transform=STACKED_TRANSPOSED)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and those of the experts."""
    _common.map_weights(design, weights, map_feedforward=map_feedforward, feedforward="feed_forward")


FAMILY = Family("llama4_text", "Llama4ForCausalLM", read_config, write_config, map_weights)
