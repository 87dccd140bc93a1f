"""Seed-OSS (ByteDance Seed 2025): Llama's decoder with biases of q, k and v, and dropout of branch outputs."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

DEFAULT_DROPOUT = 0.1  # of attention weights and of branch outputs


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. A bias of the output projection alone is refused."""
    config.get("pretraining_tp", 1)  # as in Llama
    has_bias, has_out_bias = config.get("attention_bias", True), config.get("attention_out_bias", False)
    if has_out_bias and not has_bias:
        raise config.invalid("attention_out_bias", "heddle supports it only with attention_bias")
    bias = "qkv" if has_bias and not has_out_bias else has_bias
    dropout = config.get("attention_dropout", DEFAULT_DROPOUT)
    mixer = _common.read_attention(config, head_dim=128, bias=bias, dropout=dropout)
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    residual = {"kind": "pre_norm", "dropout": config.get("residual_dropout", DEFAULT_DROPOUT)}
    return _common.rms_design(config, 1e-6, _common.same_layers(config, mixer, feedforward), residual=residual)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    bias = design_parts.first_attention(design).bias
    return _common.write_decoder(design) | {
        "attention_bias": bool(bias),
        "attention_out_bias": bias is True,
        "mlp_bias": design_parts.first_gated(design).bias,
        "residual_dropout": design.residual.dropout,
    }


FAMILY = Family("seed_oss", "SeedOssForCausalLM", read_config, write_config, _common.map_weights)
