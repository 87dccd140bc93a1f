"""Persimmon (Adept 2023): norms of queries and keys, partial RoPE, an MLP of squared ReLU, biases everywhere."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

DEFAULT_ROTARY_FACTOR = 0.5  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    _common.check_width(config)
    width, heads = config.require_count("hidden_size"), config.require_count("num_attention_heads")
    mixer = {
        "kind": "attention",
        "heads": heads,
        "bias": True,
        "qk_norm": "head" if config.get("qk_layernorm", True) else None,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, width // heads, partial_rotary_factor=DEFAULT_ROTARY_FACTOR),
    }
    feedforward = _common.read_mlp(config, "relu2", bias=True)
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)},
        _common.same_layers(config, mixer, feedforward),
        residual={"kind": "pre_norm", "dropout": config.get("hidden_dropout", 0.0)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    config = _common.write_common(design) | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
    del config["num_key_value_heads"], config["head_dim"]
    return config | {
        **_common.write_mlp(design),
        "hidden_dropout": design.residual.dropout,
        "qk_layernorm": design_parts.first_attention(design).qk_norm is not None,
        "layer_norm_eps": design_parts.norm_eps(design),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names; queries, keys and values are one matrix, interleaved by head."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    heads = design_parts.first_attention(design).heads
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        _common.map_pre_norms(weights, hf, heddle)
        _gpt.map_megatron_layer(weights, hf, heddle, "self_attn", heads)
        for role in "qk":
            weights.add_module(f"{hf}.self_attn.{role}_layernorm", f"{heddle}.mixer.{role}_norm")


FAMILY = Family("persimmon", "PersimmonForCausalLM", read_config, write_config, map_weights)
