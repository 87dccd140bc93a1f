"""Command R7B and Command A (Cohere 2024): Command R with windows in three of four layers, which alone have RoPE."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, cohere
from heddle.exchange.family import Family
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.positions.rope import RopeConfig

DEFAULT_WINDOW = 4096  # if the field is absent
# Fields of the published files, which transformers ignores: other values would ask for another model.
FIXED_FIELDS = {
    "use_qk_norm": False,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "use_parallel_block": True,
    "use_gated_activation": True,
}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Layers without a window have no positions. Heads are as wide as width / heads."""
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    _common.check_width(config)
    config.expect("head_dim", width // heads, None)
    for name, value in FIXED_FIELDS.items():
        config.expect(name, value, default=value)
    config.unread -= {"cache_implementation", "use_embedding_sharing", "use_parallel_embedding", "pretraining_tp"}
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": width // heads,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }
    rope = read_rope(config, width // heads) | {"layout": "interleaved"}
    period = config.get("sliding_window_pattern", 4, "layer_switch")
    if period < 1:
        raise config.invalid("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    types = _layer_types.read_types(config, _layer_types.full_every(period, config))
    windows = _layer_types.layer_windows(config, types, config.get_nullable("sliding_window", DEFAULT_WINDOW))
    feedforward = _common.read_gated(config)
    layers = [
        {"mixer": mixer | {"window": window, "position": rope if window else None}, "feedforward": feedforward}
        for window in windows
    ]
    return cohere.design_fields(config, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    positions = (getattr(layer.mixer, "position", None) for layer in design_parts.layers(design))
    rope = next((position for position in positions if isinstance(position, RopeConfig)), RopeConfig())
    return (
        _common.write_common(design)
        | _common.write_attention(design, rope)
        | cohere.write_fields(design)
        | {
            "sliding_window": design_parts.first_window(design) or DEFAULT_WINDOW,
            "layer_types": design_parts.layer_types(design),
        }
    )


FAMILY = Family("cohere2", "Cohere2ForCausalLM", read_config, write_config, cohere.map_weights)
