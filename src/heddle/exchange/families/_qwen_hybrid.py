"""What Qwen3-Next and Qwen3.5 share: gated delta rule, and gated softmax attention in every fourth layer.

Norms multiply by `1 + γ`, except for the delta rule's head norm.
"""

from collections.abc import Callable
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import DEPTHWISE_CONV, ModuleNames, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

LINEAR, FULL = "linear_attention", "full_attention"
DEFAULT_ROTARY_FACTOR = 0.25  # if the config has none
IGNORED_TENSORS = ("mtp.",)


def _fits(design: ModelConfig) -> bool:
    """Whether the last layer has softmax attention, and experts if any layer has."""
    return isinstance(design.last_layer.mixer, AttentionConfig) and design_parts.has_experts(design)[-1] == any(
        design_parts.has_experts(design)
    )


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


def read_design(config: ConfigReader, feedforwards: list[dict[str, Any]]) -> dict[str, Any]:
    """A design with one layer for each feed-forward; `layer_types` says which mixer each layer has."""
    eps = config.get("rms_norm_eps", 1e-6)
    mixers = {FULL: _read_attention(config), LINEAR: read_delta(config, eps)}
    usual = default_types(config.get("full_attention_interval", 4), len(feedforwards))
    types = _layer_types.read_kinds(config, "layer_types", usual, (LINEAR, FULL))
    layers = [
        {"mixer": mixers[kind], "feedforward": feedforward}
        for kind, feedforward in zip(types, feedforwards, strict=True)
    ]
    norm = {"kind": "rms", "eps": eps, "offset": 1.0, "cast": "after"}
    return _common.design_fields(config, norm, _layer_types.merge_repeats(layers))


def default_types(interval: int, depth: int) -> list[str]:
    """The type of each layer if every `interval`th one has softmax attention."""
    return [LINEAR if (index + 1) % max(interval, 1) else FULL for index in range(depth)]


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    config.require("head_dim", int)
    config.require("num_key_value_heads", int)
    bias = config.get("attention_bias", False)
    return _common.read_attention(
        config, partial_rotary_factor=DEFAULT_ROTARY_FACTOR, qk_norm="head", gate="channel", bias=bias
    )


def read_delta(config: ConfigReader, eps: float) -> dict[str, Any]:
    """The gated delta rule; `eps` is of the norm of its heads."""
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


def write_common(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_design` reads."""
    return (
        _common.write_common(design)
        | {"partial_rotary_factor": 1.0}  # written even if 1.0, because the default is 0.25
        | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
        | {
            "attention_bias": design_parts.first_attention(design).bias is True,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
        | write_delta(design)
    )


def write_delta(design: ModelConfig) -> dict[str, Any]:
    """The types of the layers, and the fields of the first delta rule."""
    delta = design_parts.first_gated_delta(design)
    return {
        "layer_types": mixer_types(design),
        "linear_num_value_heads": delta.heads,
        "linear_num_key_heads": delta.key_heads,
        "linear_key_head_dim": delta.head_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_kernel,
        "hidden_act": "silu",
    }


def mixer_types(design: ModelConfig) -> list[str]:
    """The type of each layer of a design."""
    return [LINEAR if isinstance(layer.mixer, GatedDeltaConfig) else FULL for layer in design_parts.layers(design)]


def map_weights(
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
        mixer = layer.mixer
        if isinstance(mixer, GatedDeltaConfig):
            delta, own = f"{hf}.linear_attn", f"{heddle}.mixer"
            map_inputs(weights, delta, own, mixer.key_heads or mixer.heads)
            weights.add_module(f"{delta}.conv1d", f"{own}.convolution", transform=DEPTHWISE_CONV)
            weights.add_tensor(f"{delta}.A_log", f"{own}.decay.rate")
            weights.add_tensor(f"{delta}.dt_bias", f"{own}.decay.bias")
            weights.add_module(f"{delta}.norm", f"{own}.norm")
            weights.add_module(f"{delta}.out_proj", f"{own}.out")
        elif isinstance(mixer, AttentionConfig):
            _common.map_attention(weights, hf, heddle)
            both = (f"{heddle}.mixer.q", f"{heddle}.mixer.gate")  # one tensor, interleaved by head
            weights.add_module(f"{hf}.self_attn.q_proj", *both, transform=interleaved_by_group(mixer.heads))
        map_experts(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)


def map_experts(weights: WeightMap, hf: str, heddle: str) -> None:
    """Experts, the shared expert and its gate, or a dense feed-forward."""
    _moe.map_feedforward(weights, hf, heddle)
    weights.add_module(f"{hf}.shared_expert_gate", f"{heddle}.shared_gate")
