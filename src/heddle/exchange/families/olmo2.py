"""OLMo 2 (Team OLMo 2025): norms after each branch and over whole q and k projections; all layers are the same."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _layer_types, _olmo
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, without a window."""
    mixer = _olmo.read_mixer(config)
    mixer["position"] = read_rope(config, mixer["head_dim"]) | _olmo.ROPE_CAST
    return _olmo.read_design(config, [mixer] * _layer_types.read_depth(config))


FAMILY = Family("olmo2", "Olmo2ForCausalLM", read_config, _olmo.write_config, _olmo.map_weights, priority=6)
