"""IQuest-Coder-V1 (IQuest Lab 2025): Llama's decoder under a name of its own."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, llama
from heddle.exchange.family import Family

DEFAULT_HEAD_DIM = 128  # if the config has no such field


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Fields of the original code that no published model sets are refused where they are on."""
    config.expect("clip_qkv", None)
    config.expect("use_sliding_window", False, None)
    return llama.read_config(config, DEFAULT_HEAD_DIM)


FAMILY = Family("iquestcoder", "LlamaForCausalLM", read_config, llama.write_config, _common.map_weights)
