"""The text model of Qwen3.5 and 3.6 (Qwen 2026): Qwen3-Next's two kinds of mixers, with a dense feed-forward.

Multi-token prediction layers (`mtp.`) are ignored. `mrope_section` is for images: a text has one position per axis.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _qwen_hybrid
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.mixers.gated_delta import GatedDeltaConfig

# What the dense Qwen3.5 and its mixture share: Qwen3-Next's layers with one tensor for each input projection.

IGNORED_TENSORS = ("mtp.",)


def check_fixed_fields(config: ConfigReader) -> None:
    """Fields with one value in every published model, and those of the layers that predict further tokens."""
    config.expect("attn_output_gate", True, default=True)
    config.expect("output_gate_type", "swish", None)
    config.expect("mamba_ssm_dtype", "float32", None)  # heddle's states have at least float32
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.optional(name)
    config.expect("mlp_only_layers", [], None)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, those of the delta rule, and those of experts."""
    _common.map_embedding_and_head(design, weights)
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        if isinstance(layer.mixer, GatedDeltaConfig):
            _map_delta(weights, f"{hf}.linear_attn", f"{heddle}.mixer")
        elif isinstance(layer.mixer, AttentionConfig):
            _qwen_hybrid.map_attention(weights, hf, heddle, layer.mixer.heads)
        _qwen_hybrid.map_experts(weights, f"{hf}.mlp", f"{heddle}.feedforward")
        _common.map_pre_norms(weights, hf, heddle)


def _map_delta(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_module(f"{hf}.in_proj_qkv", *(f"{heddle}.{role}" for role in "qkv"))
    for name, role in (("z", "gate"), ("b", "beta"), ("a", "a")):
        weights.add_module(f"{hf}.in_proj_{name}", f"{heddle}.{role}")
    _qwen_hybrid.map_delta(weights, hf, heddle)


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Two kinds of mixers; `layer_types` says which each layer has."""
    check_fixed_fields(config)
    return _qwen_hybrid.read_design(config, [_common.read_gated(config)] * _layer_types.read_depth(config))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _qwen_hybrid.write_common(design) | _common.write_gated(design) | {"hidden_act": "silu"}


FAMILY = Family(
    "qwen3_5_text", "Qwen3_5ForCausalLM", read_config, write_config, map_weights, ignored_tensors=IGNORED_TENSORS
)
