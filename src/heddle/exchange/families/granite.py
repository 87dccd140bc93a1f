"""Granite 3 (IBM 2024): Llama's decoder with multipliers of embeddings, attention scores, branches and logits."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig
from heddle.parts.residuals.pre_norm import PreNormConfig

# What Granite 3 and 4 share: the multipliers.


def read_multipliers(config: ConfigReader) -> dict[str, Any]:
    """The embedding, residual and head of a design."""
    scaling = config.get("logits_scaling", 1.0)
    if not scaling > 0:
        raise config.invalid("logits_scaling", "divides the logits and should be above 0")
    return {
        "embedding": {"multiplier": _read_multiplier(config, "embedding_multiplier")},
        "residual": {"kind": "pre_norm", "multiplier": _read_multiplier(config, "residual_multiplier")},
        "head": {"tied": config.get("tie_word_embeddings", False), "scale": 1 / scaling},
    }


def _read_multiplier(config: ConfigReader, name: str) -> float | None:
    multiplier = config.get(name, 1.0)
    return None if multiplier == 1.0 else multiplier


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """Attention, whose scores have a multiplier of their own."""
    bias, scale = config.get("attention_bias", False), config.get("attention_multiplier", 1.0)
    return _common.read_attention(config, bias=bias, scale=scale)


def write_multipliers(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_multipliers` and `read_mixer` read, but for those of heads and RoPE."""
    mixer, residual = design_parts.first_attention(design), design.residual
    return {
        "attention_bias": mixer.bias is True,
        "attention_multiplier": mixer.scale,
        "embedding_multiplier": design.embedding.multiplier or 1.0,
        "residual_multiplier": (isinstance(residual, PreNormConfig) and residual.multiplier) or 1.0,
        "logits_scaling": float(f"{1 / design.head.scale:.12g}"),
    }


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    layers = _common.same_layers(config, read_mixer(config), feedforward)
    return _common.rms_design(config, 1e-6, layers, **read_multipliers(config))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    bias = {"mlp_bias": design_parts.first_gated(design).bias}
    return _common.write_decoder(design) | write_multipliers(design) | bias


FAMILY = Family("granite", "GraniteForCausalLM", read_config, write_config, _common.map_weights)
