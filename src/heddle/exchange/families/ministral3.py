"""Ministral 3 and Devstral 2 (Mistral AI 2025): Mistral's decoder with YaRN, and queries that grow with their position.

`llama_4_scaling_beta` and `original_max_position_embeddings` of `rope_parameters` say how they grow: 0 is not at all.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.exchange.rope import ORIGINAL_LENGTH, read_rope
from heddle.model.config import ModelConfig

BETA = "llama_4_scaling_beta"
DEFAULT_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL_LENGTH: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, with or without a window."""
    heads = _common.read_heads(config, config.require("hidden_size", int), head_dim=128)
    empty: dict[str, Any] = {}
    table = config.get("rope_parameters", empty, "rope_scaling") or DEFAULT_ROPE
    beta, length = table.get(BETA), table.get(ORIGINAL_LENGTH)
    if not isinstance(beta, int | float) or type(length) is not int:
        raise config.invalid("rope_parameters", f"it should have a '{BETA}' and an '{ORIGINAL_LENGTH}'")
    plain = {name: value for name, value in table.items() if name not in (BETA, "max_position_embeddings")}
    plain_config = ConfigReader({**config.data, "rope_parameters": plain, "rope_scaling": None}, config.source)
    position = read_rope(plain_config, heads["head_dim"])
    config.unread -= {"rope_theta", "partial_rotary_factor"}
    config.expect(ORIGINAL_LENGTH, length, None)
    mixer = {
        "kind": "attention",
        **heads,
        "window": config.optional("sliding_window"),
        "temperature_beta": float(beta) or None,
        "temperature_length": length if beta else None,
        "dropout": config.get("attention_dropout", 0.0),
        "position": position,
    }
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = design_parts.first_attention(design)
    config = _common.write_unbiased_decoder(design)
    length = mixer.temperature_length or _common.DEFAULT_MAX_POSITIONS
    table = {ORIGINAL_LENGTH: length} | config["rope_parameters"] | {BETA: mixer.temperature_beta or 0.0}
    scaling = None if config["rope_scaling"] is None else table | {"type": table["rope_type"]}
    return config | {
        "rope_parameters": table,
        "rope_scaling": scaling,
        "sliding_window": design_parts.first_window(design),
    }


FAMILY = Family("ministral3", "Ministral3ForCausalLM", read_config, write_config, _common.map_weights, priority=8)
