"""Gemma 2 (Riviere et al. 2024): a sliding window in every other layer, soft caps on scores and logits."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gemma, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """A soft cap of null is off; an absent one has the value of the published model."""
    mixer = _gemma.read_mixer(config)
    mixer["softcap"] = config.get_nullable("attn_logit_softcapping", 50.0)
    mixer["position"] = read_rope(config, mixer["head_dim"])
    types = _layer_types.read_types(config, _layer_types.full_every(2, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", _gemma.DEFAULT_WINDOW))
    mixers = [mixer | {"window": window} for window in windows]
    return _gemma.read_design(config, mixers, config.get_nullable("final_logit_softcapping", 30.0))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    cap = {"attn_logit_softcapping": design_parts.first_attention(design).softcap}
    return _common.write_attention(design) | _gemma.write_common(design) | cap


FAMILY = Family("gemma2", "Gemma2ForCausalLM", read_config, write_config, _gemma.map_weights, priority=4)
