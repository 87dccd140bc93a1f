"""InternLM3 (Shanghai AI Laboratory 2025): Llama's decoder, whose biases are all on or all off."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, llama
from heddle.exchange.family import Family

DEFAULT_HEAD_DIM = 128  # if the config has no such field


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`qkv_bias` and `bias` are the names of the two biases in the first files."""
    bias = config.get("attention_bias", False, "qkv_bias")
    if config.get("mlp_bias", False, "bias") != bias:
        raise config.invalid("mlp_bias", "should equal attention_bias")
    design = llama.read_config(config, DEFAULT_HEAD_DIM)
    for part in ("mixer", "feedforward"):
        design["layers"][0][part]["bias"] = bias
    return design


FAMILY = Family("internlm3", "LlamaForCausalLM", read_config, llama.write_config, _common.map_weights)
