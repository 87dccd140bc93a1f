"""ERNIE 4.5's dense models (Baidu 2025): Llama's decoder with tied embeddings, interleaved RoPE, and biases or none."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig

DEFAULT_THETA = 500000.0


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`use_bias` applies to every projection; all layers are the same."""
    bias = config.get("use_bias", False)
    config.expect("compression_ratio", 1.0, default=1.0)  # of positions, in the first files
    mixer, feedforward = read_mixer(config, bias, head_dim=128), _common.read_gated(config, bias=bias)
    layer = {"repeat": _layer_types.read_depth(config), "mixer": mixer, "feedforward": feedforward}
    return _common.rms_design(config, 1e-5, [layer], tied=True)


def read_mixer(config: ConfigReader, bias: bool, head_dim: int | None = None) -> dict[str, Any]:
    """The attention of every layer; `head_dim` is the family's default."""
    heads = _common.read_heads(config, config.require("hidden_size", int), head_dim)
    position = read_rope(config, heads["head_dim"], DEFAULT_THETA) | {"layout": "interleaved"}
    return {"kind": "attention", **heads, "bias": bias, "position": position}


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    fields = _common.write_decoder(design)
    del fields["attention_dropout"]  # it has none
    return fields | {"use_bias": fields.pop("attention_bias") or design_parts.first_gated(design).bias}


FAMILY = Family("ernie4_5", "Ernie4_5ForCausalLM", read_config, write_config, _common.map_weights)
