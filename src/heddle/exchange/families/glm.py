"""GLM-4 and 4.5, with ordinary attention and partial RoPE: gate and up in one matrix, or DeepSeek-V3's experts."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, deepseek
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

ROTARY_FACTOR = 0.5  # if the config has none


def read_glm(config: ConfigReader) -> dict[str, Any]:
    """GLM-4 9B (Team GLM 2024): Llama with interleaved partial RoPE, and gate and up in one matrix."""
    # `attention_bias` applies to q, k and v.
    bias = "qkv" if config.get("attention_bias", True) else False
    mixer = _common.read_attention(config, partial_rotary_factor=ROTARY_FACTOR, bias=bias)
    mixer["position"]["layout"] = "interleaved"
    return _common.rms_design(config, 1.5625e-07, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_glm(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_decoder(design)
        | _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
        | {"attention_bias": design_parts.first_attention(design).bias == "qkv"}
    )


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The feed-forward, with gate and up in one matrix."""
    weights.add_module(f"{hf}.gate_up_proj", f"{heddle}.gate", f"{heddle}.up")
    weights.add_module(f"{hf}.down_proj", f"{heddle}.down")


GLM = Family("glm", "GlmForCausalLM", read_glm, write_glm, partial(_common.map_weights, map_feedforward=map_gated))


def read_glm4(config: ConfigReader) -> dict[str, Any]:
    """GLM-4 0414 (Zhipu AI 2025): GLM-4 with norms before and after each branch."""
    return read_glm(config) | {"residual": {"kind": "sandwich"}}


AFTER = {
    "post_self_attn_layernorm": "residual.after.mixer", "post_mlp_layernorm": "residual.after.feedforward",
}  # fmt: skip
map_glm4 = partial(_common.map_weights, names=_common.PRE_NORMS | AFTER, map_feedforward=map_gated)
GLM4 = Family("glm4", "Glm4ForCausalLM", read_glm4, write_glm, map_glm4)


def read_glm4_moe(config: ConfigReader) -> dict[str, Any]:
    """GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team 2025): partial RoPE, optional norms of q and k, DeepSeek-V3's experts.

    Multi-token modules (`num_nextn_predict_layers`) are read where the weights hold them, as further layers.
    """
    config.require("num_key_value_heads", int)
    norm, bias = ("head" if config.get("use_qk_norm", False) else None), config.get("attention_bias", False) and "qkv"
    mixer = _common.read_attention(config, partial_rotary_factor=ROTARY_FACTOR, qk_norm=norm, bias=bias)
    layers = deepseek.read_layers(config, mixer, deepseek.read_sigmoid_routing(config), False)
    return _common.rms_design(config, 1e-5, layers)


def write_glm4_moe(design: ModelConfig) -> dict[str, Any]:
    mixer = design_parts.first_attention(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
        | deepseek.write_layers(design)
        | deepseek.write_sigmoid_routing(design)
        | {"attention_bias": mixer.bias == "qkv", "use_qk_norm": mixer.qk_norm is not None}
    )


GLM4_MOE = deepseek.with_modules("glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe, write_glm4_moe, deepseek.map_dots1)
