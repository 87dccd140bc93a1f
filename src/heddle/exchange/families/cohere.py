"""Cohere's Command models: both branches read one LayerNorm without bias, and logits are scaled."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig


def read_cohere(config: ConfigReader) -> dict[str, Any]:
    """Command R (Cohere 2024): both branches read one LayerNorm without bias, interleaved RoPE, logits are scaled."""
    # Norms of queries and keys have weights of their own for each head (Command R+).
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


def write_cohere(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design)
        | write_fields(design)
        | {"use_qk_norm": design_parts.first_attention(design).qk_norm is not None}
    )


def write_fields(design: ModelConfig) -> dict[str, Any]:
    """The fields of both models but for those of heads, windows and RoPE."""
    scale = {"logit_scale": design.head.scale}
    return _common.write_gated(design) | _common.written(design, "attention_bias", "layer_norm_eps") | scale


def map_cohere(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with one norm per layer."""
    _common.map_weights(design, weights, {"input_layernorm": "residual.norms.shared"})


COHERE = Family("cohere", "CohereForCausalLM", read_cohere, write_cohere, map_cohere)


WINDOW = 4096  # if the field is absent
# Fields of the published files, which transformers ignores: other values would ask for another model.
FIXED_FIELDS = {
    "use_qk_norm": False,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
    "use_parallel_block": True,
    "use_gated_activation": True,
}


def read_cohere2(config: ConfigReader) -> dict[str, Any]:
    """Command R7B and Command A (Cohere 2024): Command R, windows in three of four layers, which alone have RoPE."""
    heads = _common.read_equal_heads(config)
    for name, value in FIXED_FIELDS.items():
        config.expect(name, value, default=value)
    config.unread -= {"cache_implementation", "use_embedding_sharing", "use_parallel_embedding", "pretraining_tp"}
    rope = read_rope(config, heads["head_dim"]) | {"layout": "interleaved"}
    period = config.get("sliding_window_pattern", 4, "layer_switch")
    if period < 1:
        raise config.invalid("sliding_window_pattern", "should be at least 1, which gives no layer a window")
    windows = _layer_types.read_windows(config, _layer_types.full_every(period, config), WINDOW)
    mixer = _common.attention(config, heads, bias=config.get("attention_bias", False))
    mixers = [mixer | {"window": window, "position": rope if window else None} for window in windows]
    return design_fields(config, _layer_types.layers_of(mixers, _common.read_gated(config)))


def write_cohere2(design: ModelConfig) -> dict[str, Any]:
    return (
        _common.write_common(design)
        | _common.write_attention(design, design_parts.first_rope(design))
        | write_fields(design)
        | _layer_types.write_windows(design, WINDOW)
    )


COHERE2 = Family("cohere2", "Cohere2ForCausalLM", read_cohere2, write_cohere2, map_cohere)
