"""Qwen3-Next (Qwen 2025): gated delta rule, gated softmax attention in every fourth layer, experts in every layer.

Norms multiply by `1 + γ`, except for the delta rule's head norm. Multi-token prediction layers (`mtp.`) are ignored.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.exchange.weight_map import DEPTHWISE_CONV, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_ROTARY_FACTOR = 0.25  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Two kinds of mixers; `layer_types` says which each layer has."""
    eps = config.get("rms_norm_eps", 1e-6)
    config.expect("use_sliding_window", False, default=False)
    mixers = {FULL: _read_attention(config), LINEAR: _read_delta(config, eps)}
    shared = config.require("shared_expert_intermediate_size", int)
    shared_expert = {"shared": 1, "shared_hidden": shared, "shared_gate": True}
    feedforwards = _moe.read_feedforwards(config, shared_expert, True)
    types = _read_types(config, len(feedforwards))
    layers = [
        {"mixer": mixers[kind], "feedforward": feedforward}
        for kind, feedforward in zip(types, feedforwards, strict=True)
    ]
    norm = {"kind": "rms", "eps": eps, "offset": 1.0, "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.merge_repeats(layers))


def _read_types(config: ConfigReader, depth: int) -> list[str]:
    types = config.get("layer_types", _default_types(config.get("full_attention_interval", 4), depth))
    if len(types) != depth or set(types) - {LINEAR, FULL}:
        raise config.invalid("layer_types", f"should say {LINEAR} or {FULL} of each of {depth} layers")
    return types


def _default_types(interval: int, depth: int) -> list[str]:
    return [LINEAR if (index + 1) % max(interval, 1) else FULL for index in range(depth)]


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    config.require("head_dim", int)
    heads = _moe.read_heads(config)
    return {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "gate": "channel",
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"], partial_rotary_factor=DEFAULT_ROTARY_FACTOR),
    }


def _read_delta(config: ConfigReader, eps: float) -> dict[str, Any]:
    config.expect("hidden_act", "silu", default="silu")  # the delta rule's convolution uses it too
    return {
        "kind": "gated_delta",
        "heads": config.require("linear_num_value_heads", int),
        "key_heads": config.require("linear_num_key_heads", int),
        "head_dim": config.require("linear_key_head_dim", int),
        "value_dim": config.require("linear_value_head_dim", int),
        "conv_kernel": config.require("linear_conv_kernel_dim", int),
        "norm": {"kind": "rms", "eps": eps},
    }


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    delta, moe = design_parts.first_gated_delta(design), design_parts.first_moe(design)
    types = [LINEAR if isinstance(layer.mixer, GatedDeltaConfig) else FULL for layer in design_parts.layers(design)]
    interval = types.index(FULL) + 1 if FULL in types else design.depth + 1
    return (
        _common.write_common(design)
        | {"partial_rotary_factor": 1.0}  # written even if 1.0, because the default is 0.25
        | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
        | _moe.write_feedforwards(design)
        | {
            "attention_bias": design_parts.first_attention(design).bias is True,
            "use_sliding_window": False,
            "layer_types": types,
            "full_attention_interval": interval if types == _default_types(interval, design.depth) else None,
            "linear_num_value_heads": delta.heads,
            "linear_num_key_heads": delta.key_heads,
            "linear_key_head_dim": delta.head_dim,
            "linear_value_head_dim": delta.value_dim,
            "linear_conv_kernel_dim": delta.conv_kernel,
            "shared_expert_intermediate_size": moe.shared_hidden or moe.hidden,
            "rms_norm_eps": design_parts.norm_eps(design),
            "hidden_act": "silu",
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Projections with the same input are one tensor, interleaved by query head or key head."""
    _common.map_embedding_and_head(design, weights)
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            _map_delta(weights, f"{hf}.linear_attn", f"{heddle}.mixer", layer.mixer.key_heads or layer.mixer.heads)
        elif isinstance(layer.mixer, AttentionConfig):
            _common.map_attention(weights, hf, heddle)
            both = (f"{heddle}.mixer.q", f"{heddle}.mixer.gate")
            weights.add_module(f"{hf}.self_attn.q_proj", *both, transform=interleaved_by_group(layer.mixer.heads))
        _moe.map_feedforward(weights, f"{hf}.mlp", f"{heddle}.feedforward", "shared_expert")
        weights.add_module(f"{hf}.mlp.shared_expert_gate", f"{heddle}.feedforward.shared_gate")
        _common.map_pre_norms(weights, hf, heddle)


def _map_delta(weights: WeightMap, hf: str, heddle: str, groups: int) -> None:
    fused = [f"{heddle}.{name}" for name in ("q", "k", "v", "gate")]
    weights.add_module(f"{hf}.in_proj_qkvz", *fused, transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.in_proj_ba", f"{heddle}.beta", f"{heddle}.a", transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.conv1d", f"{heddle}.convolution", transform=DEPTHWISE_CONV)
    weights.add_tensor(f"{hf}.A_log", f"{heddle}.decay.rate")
    weights.add_tensor(f"{hf}.dt_bias", f"{heddle}.decay.bias")
    weights.add_module(f"{hf}.norm", f"{heddle}.norm")
    weights.add_module(f"{hf}.out_proj", f"{heddle}.out")


FAMILY = Family("qwen3_next", "Qwen3NextForCausalLM", read_config, write_config, map_weights, ignored_tensors=("mtp.",))
