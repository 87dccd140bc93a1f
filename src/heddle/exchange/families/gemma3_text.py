"""Gemma 3's text model (Gemma Team 2025): Gemma 2 with norms of q and k, without soft caps, and with two RoPEs.

Five layers with a sliding window and theta 1e4 alternate with one full layer with theta 1e6.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _layer_types, gemma2
from heddle.exchange.family import Family
from heddle.exchange.rope import read_ropes_by_layer_type, write_ropes_by_layer_type
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Both formats: `layer_types` or `sliding_window_pattern`; one RoPE table per layer type, or one theta per type."""
    mixer = gemma2.read_mixer(config) | {"qk_norm": "head"}
    config.expect("attn_logit_softcapping", None)  # transformers reads it but caps nothing
    thetas = config.get("rope_theta", 1e6), config.get("rope_local_base_freq", 1e4)
    ropes = read_ropes_by_layer_type(config, mixer["head_dim"], *thetas)
    period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    if period < 1:
        raise config.invalid("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    types = _layer_types.read_types(config, _layer_types.full_every(period, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", gemma2.DEFAULT_WINDOW))
    mixers = [mixer | {"window": window, "position": ropes[kind]} for kind, window in zip(types, windows, strict=True)]
    return gemma2.read_design(config, mixers, config.get_nullable("final_logit_softcapping", None))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    full, sliding = _layer_types.ropes_by_layer_type(design)
    rope_fields = write_ropes_by_layer_type(
        full, sliding, design_parts.first_attention(design).head_dim or design.width
    )
    return (
        gemma2.write_common(design)
        | rope_fields
        | {"rope_local_base_freq": sliding.base, "attn_logit_softcapping": None}
    )


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", read_config, write_config, gemma2.map_weights, priority=5)
