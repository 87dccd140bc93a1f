"""Granite 3 (IBM 2024): Llama's decoder with multipliers of embeddings, attention scores, branches and logits."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig
from heddle.parts.residuals.pre_norm import PreNormConfig

# What Granite 3 and 4 share: the multipliers.


def read_multipliers(config: ConfigReader, tied: bool = False) -> dict[str, Any]:
    """The embedding, residual and head of a design. tied: the family's default."""
    scaling = config.get("logits_scaling", 1.0)
    if not scaling > 0:
        raise config.invalid("logits_scaling", "divides the logits and should be above 0")
    return {
        "embedding": {"multiplier": multiplier(config.get("embedding_multiplier", 1.0))},
        "residual": {"kind": "pre_norm", "multiplier": multiplier(config.get("residual_multiplier", 1.0))},
        "head": {"tied": config.get("tie_word_embeddings", tied), "scale": 1 / scaling},
    }


def multiplier(factor: float) -> float | None:
    """A multiplier of a design; none for 1."""
    return None if factor == 1.0 else factor


def branch_multiplier(design: ModelConfig) -> float:
    """What branches are multiplied by."""
    return (isinstance(design.residual, PreNormConfig) and design.residual.multiplier) or 1.0


def read_mixer(config: ConfigReader) -> dict[str, Any]:
    """Attention, whose scores have a multiplier of their own."""
    bias, scale = config.get("attention_bias", False), config.get("attention_multiplier", 1.0)
    return _common.read_attention(config, bias=bias, scale=scale)


def write_multipliers(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_multipliers` and `read_mixer` read, but for those of heads and RoPE."""
    mixer = design_parts.first_attention(design)
    return {
        "attention_bias": mixer.bias is True,
        "attention_multiplier": mixer.scale,
        "embedding_multiplier": design.embedding.multiplier or 1.0,
        "residual_multiplier": branch_multiplier(design),
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
