"""Mistral's decoders: Llama's without biases, with a window in all layers, some or none, and Mixtral's experts."""

from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _moe
from heddle.exchange.family import Family
from heddle.exchange.rope import FULL, ORIGINAL_LENGTH, SLIDING, read_rope
from heddle.model.config import ModelConfig


def read_mistral(config: ConfigReader) -> dict[str, Any]:
    """Mistral (Jiang et al. 2023): Llama's decoder without biases, every layer with the same window or none."""
    # `sliding_window`: null means no window, absent means 4096.
    mixer = _common.read_attention(config, window=config.get_nullable("sliding_window", 4096))
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_mistral(design: ModelConfig) -> dict[str, Any]:
    return _common.write_unbiased_decoder(design, "sliding_window")


MISTRAL = Family("mistral", "MistralForCausalLM", read_mistral, write_mistral, _common.map_weights, priority=1)
WINDOW = 4096  # if the field is absent


def read_ministral(config: ConfigReader) -> dict[str, Any]:
    """Ministral 8B (Mistral AI 2024): Mistral's decoder, with a window in some of the layers."""
    # Without `layer_types`, every layer has the window of `sliding_window`; null is none.
    window = config.get_nullable("sliding_window", WINDOW)
    usual = [FULL if window is None else SLIDING] * _layer_types.read_depth(config)
    layer = {"mixer": _common.read_attention(config), "feedforward": _common.read_gated(config)}
    return _common.rms_design(config, 1e-6, _layer_types.windowed_layers(config, usual, window, layer))


def write_ministral(design: ModelConfig) -> dict[str, Any]:
    """transformers requires a number for the window even where no layer has one."""
    return _common.write_unbiased_decoder(design) | _layer_types.write_windows(design, WINDOW)


MINISTRAL = Family("ministral", "MinistralForCausalLM", read_ministral, write_ministral, _common.map_weights)


BETA = "llama_4_scaling_beta"
MINISTRAL3_ROPE: dict[str, Any] = {  # if the config has none
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, ORIGINAL_LENGTH: 16384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
}  # fmt: skip


def read_ministral3(config: ConfigReader) -> dict[str, Any]:
    """Ministral 3 and Devstral 2 (Mistral AI 2025): Mistral with YaRN, and queries that grow with their position.

    `llama_4_scaling_beta` and `original_max_position_embeddings` of `rope_parameters` set how much; a beta of 0 is no
    growth.
    """
    heads = _common.read_heads(config, head_dim=128)
    table = config.optional("rope_scaling") or config.get("rope_parameters", MINISTRAL3_ROPE)
    beta, length = table.get(BETA), table.get(ORIGINAL_LENGTH)
    if not isinstance(beta, int | float) or type(length) is not int:
        raise config.invalid("rope_parameters", f"it should have a '{BETA}' and an '{ORIGINAL_LENGTH}'")
    plain = {name: value for name, value in table.items() if name not in (BETA, "max_position_embeddings")}
    plain_config = ConfigReader({**config.data, "rope_parameters": plain, "rope_scaling": None}, config.source)
    position = read_rope(plain_config, heads["head_dim"])
    config.unread -= {"rope_theta", "rope_parameters", "partial_rotary_factor"}
    config.expect(ORIGINAL_LENGTH, length, None)
    mixer = _common.attention(config, heads, position, window=config.optional("sliding_window"))
    mixer |= {"temperature_beta": float(beta) or None, "temperature_length": length if beta else None}
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, _common.read_gated(config)))


def write_ministral3(design: ModelConfig) -> dict[str, Any]:
    mixer = design_parts.first_attention(design)
    config = _common.write_unbiased_decoder(design)
    length = mixer.temperature_length or _common.DEFAULT_MAX_POSITIONS
    table = {ORIGINAL_LENGTH: length} | config["rope_parameters"] | {BETA: mixer.temperature_beta or 0.0}
    scaling = None if config["rope_scaling"] is None else table | {"type": table["rope_type"]}
    return config | {"rope_parameters": table, "rope_scaling": scaling} | _common.written(design, "sliding_window")


MINISTRAL3 = Family(
    "ministral3", "Ministral3ForCausalLM", read_ministral3, write_ministral3, _common.map_weights, priority=8
)


EXPERT_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def read_mixtral(config: ConfigReader) -> dict[str, Any]:
    """Mixtral (Jiang et al. 2024): Mistral's attention, and top-k routed experts in every layer."""
    config.require("num_key_value_heads", int)
    config.expect("router_jitter_noise", 0.0, default=0.0)
    mixer = _common.read_attention(config, 1e6, window=config.optional("sliding_window"))
    experts = _moe.read_experts(config, config.require("num_hidden_layers", int))
    return _common.rms_design(config, 1e-5, _common.same_layers(config, mixer, experts))


def write_mixtral(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | _moe.write_experts(design)
        | {"sliding_window": design_parts.first_attention(design).window}
        | _common.written(design, "rms_norm_eps")
        | {"router_jitter_noise": 0.0}
        | _moe.write_aux_loss(design, design_parts.first_moe(design))
    )


map_experts = partial(_moe.map_experts, names=EXPERT_NAMES)
map_mixtral = partial(_common.map_weights, map_feedforward=map_experts, feedforward="block_sparse_moe")


MIXTRAL = Family("mixtral", "MixtralForCausalLM", read_mixtral, write_mixtral, map_mixtral)
