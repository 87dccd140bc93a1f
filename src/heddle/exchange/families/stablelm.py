"""StableLM 2 and 3B (Stability AI 2023): LayerNorm, partial RoPE, a gated feed-forward, sequential or parallel.

`qk_layernorm` (StableLM 2 12B), norms without biases of each head beside norms with biases, is refused.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.residuals.parallel import ParallelConfig

DEFAULT_ROTARY_FACTOR = 0.25  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. Heads are as wide as width / heads."""
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    _common.check_width(config)
    config.expect("head_dim", width // heads, None)
    config.expect("qk_layernorm", False, default=False)
    config.expect("hidden_dropout", 0.0, default=0.0)  # of the feed-forward alone
    mixer = {
        "kind": "attention",
        "heads": heads,
        "kv_heads": config.require("num_key_value_heads", int),
        "head_dim": width // heads,
        "bias": "qkv" if config.get("use_qkv_bias", False) else False,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, width // heads, partial_rotary_factor=DEFAULT_ROTARY_FACTOR),
    }
    layer = {
        "repeat": config.require("num_hidden_layers", int),
        "mixer": mixer,
        "feedforward": _common.read_gated(config),
    }
    norm = {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)}
    parallel = {"kind": "parallel", "norms": 1} if config.get("use_parallel_residual", False) else {"kind": "pre_norm"}
    return _common.design_fields(config, norm, [layer], residual=parallel)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    config = _common.write_common(design) | _common.write_attention(design, partial_rotary_factor=DEFAULT_ROTARY_FACTOR)
    return (
        config
        | _common.write_gated(design)
        | {
            "use_qkv_bias": design_parts.first_attention(design).bias == "qkv",
            "use_parallel_residual": isinstance(design.residual, ParallelConfig),
            "qk_layernorm": False,
            "hidden_dropout": 0.0,
            "layer_norm_eps": design_parts.norm_eps(design),
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names; parallel branches share one norm."""
    shared = {"input_layernorm": "residual.norms.shared"} if isinstance(design.residual, ParallelConfig) else {}
    _common.map_weights(design, weights, _common.PRE_NORMS | shared)


FAMILY = Family("stablelm", "StableLmForCausalLM", read_config, write_config, map_weights)
