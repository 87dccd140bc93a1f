"""The text model of Gemma 4's variant without encoders of images and sound; it has no per-layer embeddings."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import gemma4_text
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

ABSENT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Its default window is 1024 tokens wide."""
    config.expect("hidden_size_per_layer_input", 0, None)
    return gemma4_text.read_config(config, window=1024, per_layer=0)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return {name: value for name, value in gemma4_text.write_config(design).items() if name not in ABSENT}


FAMILY = Family(
    "gemma4_unified_text",
    "Gemma4UnifiedForCausalLM",
    read_config,
    write_config,
    gemma4_text.map_weights,
    ignored_tensors=gemma4_text.FAMILY.ignored_tensors,
)
