"""MiniCPM3 (OpenBMB 2024): latent attention and a gated feed-forward, with multipliers of branches and logits."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, granite
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Branches are multiplied by `scale_depth / sqrt(layers)`, logits by `dim_model_base / hidden_size`; null is 1."""
    config.get("pretraining_tp", 1)  # as in Llama
    width, heads = config.require_count("hidden_size"), config.require_count("num_attention_heads")
    depth = config.require_count("num_hidden_layers")
    branches, base = config.get_nullable("scale_depth", 1.4), config.get_nullable("dim_model_base", 256)
    mixer = _deepseek.read_attention(config, "half", query_rank=768, value_dim=width // heads)
    return _common.rms_design(
        config,
        1e-5,
        _common.same_layers(config, mixer, _common.read_gated(config, bias=config.get("mlp_bias", False))),
        embedding={"multiplier": granite.multiplier(config.get("scale_emb", 12.0))},
        residual={"kind": "pre_norm", "multiplier": granite.multiplier(branches / depth**0.5 if branches else 1.0)},
        head={"tied": config.get("tie_word_embeddings", True), "scale": (base or width) / width},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    branches = granite.branch_multiplier(design)
    return _deepseek.write_dense(design) | {
        "mlp_bias": design_parts.first_gated(design).bias,
        "scale_emb": design.embedding.multiplier or 1.0,
        "scale_depth": None if branches == 1.0 else float(f"{branches * design.depth**0.5:.12g}"),
        "dim_model_base": max(1, round(design.head.scale * design.width)),
    }


FAMILY = Family("minicpm3", "MiniCPM3ForCausalLM", read_config, write_config, _deepseek.map_weights)
