"""Command R (Cohere 2024): both branches read one LayerNorm without bias, interleaved RoPE, logits are scaled."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; norms of queries and keys have weights of their own for each head (Command R+)."""
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    bias, qk_norm = config.get("attention_bias", False), "per_head" if config.get("use_qk_norm", False) else None
    mixer = _common.read_attention(config, 500000.0, bias=bias, qk_norm=qk_norm)
    mixer["position"]["layout"] = "interleaved"
    return design_fields(config, _common.same_layers(config, mixer, _common.read_gated(config)))


def design_fields(config: ConfigReader, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """A design with these layers, as Command R and its successor have it."""
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5), "bias": False},
        layers,
        residual={"kind": "parallel", "norms": 1},
        head={"tied": config.get("tie_word_embeddings", True), "scale": config.get("logit_scale", 0.0625)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | write_fields(design)
        | {"use_qk_norm": design_parts.first_attention(design).qk_norm is not None}
    )


def write_fields(design: ModelConfig) -> dict[str, Any]:
    """The fields of both models but for those of heads, windows and RoPE."""
    return _common.write_gated(design) | {
        "attention_bias": design_parts.first_attention(design).bias is True,
        "layer_norm_eps": design_parts.norm_eps(design),
        "logit_scale": design.head.scale,
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with one norm per layer."""
    _common.map_embedding_and_head(design, weights)
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.shared")
        _common.map_attention(weights, hf, heddle)
        _common.map_gated(weights, f"{hf}.mlp", f"{heddle}.feedforward")


FAMILY = Family("cohere", "CohereForCausalLM", read_config, write_config, map_weights)
