"""Youtu-LLM (Tencent 2025): DeepSeek-V3's latent attention and a gated feed-forward in every layer."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. `embedding_initializer_range` only matters for training from scratch, and is noted."""
    layout = "interleaved" if config.get("rope_interleave", True) else "half"
    config.note("embedding_initializer_range")
    mixer = _deepseek.read_attention(config, layout, query_rank=1536)
    layers = _common.same_layers(config, mixer, _common.read_gated(config))
    return _common.rms_design(config, 1e-6, layers, tied=True)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    rope = design_parts.rope_of(design_parts.first_latent_attention(design))
    return _deepseek.write_dense(design) | {"rope_interleave": rope.layout == "interleaved"}


FAMILY = Family("youtu", "YoutuForCausalLM", read_config, write_config, _deepseek.map_weights)
