"""SmolLM3 (Bakouch et al. 2025): Llama's decoder with tied embeddings, and no positions in every fourth layer.

Layers without RoPE may have a sliding window; in the published model no layer has one.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, SLIDING
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig

DEFAULT_INTERVAL = 4  # of layers without RoPE
DEFAULT_THETA = 2e6


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`no_rope_layers` has a 1 for each layer with RoPE; without it, every `no_rope_layer_interval`th layer has none.

    transformers ignores `max_window_layers`.
    """
    for name in ("max_window_layers", "pretraining_tp"):
        config.optional(name)
    mixer = _common.read_attention(config, DEFAULT_THETA, bias=config.get("attention_bias", False))
    rope, rotated = mixer["position"], read_rotated(config)
    window = config.get_nullable("sliding_window", None) if config.get("use_sliding_window", False) else None
    config.unread.discard("sliding_window")
    usual = [FULL if window is None or has_rope else SLIDING for has_rope in rotated]
    windows = _layer_types.layer_windows(config, _layer_types.read_types(config, usual), window)
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    layers = [
        {
            "mixer": mixer | {"window": width, "position": rope if has_rope else None},
            "feedforward": feedforward,
        }
        for width, has_rope in zip(windows, rotated, strict=True)
    ]
    return _common.rms_design(config, 1e-6, _layer_types.merge_repeats(layers), tied=True)


def read_rotated(config: ConfigReader) -> list[bool]:
    """Whether each layer has RoPE."""
    depth, interval = _layer_types.read_depth(config), config.get("no_rope_layer_interval", DEFAULT_INTERVAL)
    if interval < 1:
        raise config.invalid("no_rope_layer_interval", "should be at least 1, which leaves no layer its RoPE")
    rotated = config.get("no_rope_layers", list[int]()) or _every(interval, depth)
    if len(rotated) < depth or any(has_rope not in (0, 1) for has_rope in rotated):
        raise config.invalid("no_rope_layers", f"should have a 1 or a 0 for each of {depth} layers")
    return [has_rope == 1 for has_rope in rotated[:depth]]


def _every(interval: int, depth: int) -> list[int]:
    """1 for each layer with RoPE: all but every `interval`th one."""
    return [int((index + 1) % interval != 0) for index in range(depth)]


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    positions = [getattr(layer.mixer, "position", None) for layer in design_parts.layers(design)]
    rotated = [int(position is not None) for position in positions]
    rope = next((position for position in positions if isinstance(position, RopeConfig)), RopeConfig())
    interval = rotated.index(0) + 1 if 0 in rotated else DEFAULT_INTERVAL
    window = design_parts.first_window(design)
    return (
        _common.write_common(design)
        | _common.write_attention(design, rope)
        | _common.write_gated(design)
        | {
            "attention_bias": design_parts.first_attention(design).bias is True,
            "mlp_bias": design_parts.first_gated(design).bias,
            "no_rope_layers": rotated,
            "no_rope_layer_interval": interval if rotated == _every(interval, design.depth) else DEFAULT_INTERVAL,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": design_parts.layer_types(design),
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", read_config, write_config, _common.map_weights)
