"""OLMo 3 (Team OLMo 2025): OLMo 2 with a sliding window in three of four layers, whose RoPE is not scaled."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _layer_types, olmo2
from heddle.exchange.family import Family
from heddle.exchange.rope import read_ropes_by_layer_type, write_ropes_by_layer_type
from heddle.model.config import ModelConfig

DEFAULT_WINDOW = 4096  # if the field is absent


def read_config(config: ConfigReader) -> dict[str, Any]:
    """One RoPE table per layer type. Older files have one theta for both, and a scaling for full layers only."""
    mixer = olmo2.read_mixer(config)
    theta = config.get("rope_theta", 5e5)
    ropes = read_ropes_by_layer_type(config, mixer["head_dim"], theta, theta)
    types = _layer_types.read_types(config, _layer_types.full_every(4, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", DEFAULT_WINDOW))
    mixers = [
        mixer | {"window": window, "position": ropes[kind] | olmo2.ROPE_CAST}
        for kind, window in zip(types, windows, strict=True)
    ]
    return olmo2.read_design(config, mixers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    rope_fields = write_ropes_by_layer_type(
        *_layer_types.ropes_by_layer_type(design), design_parts.first_attention(design).head_dim or design.width
    )
    local = {
        "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
        "layer_types": design_parts.layer_types(design),
    }
    return olmo2.write_config(design) | rope_fields | local


FAMILY = Family("olmo3", "Olmo3ForCausalLM", read_config, write_config, olmo2.map_weights, priority=7)
