"""The text model of Qwen3.5 and 3.6 (Qwen 2026): Qwen3-Next's two kinds of mixers, with a dense feed-forward.

The multi-token module (`mtp.`) is read where the weights hold it. `mrope_section` is for images: a text has one
position per axis.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _qwen_hybrid
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

# What the dense Qwen3.5 and its mixture share: Qwen3-Next's layers with one tensor for each input projection.

MODULES = _qwen_hybrid.module_names("mtp_num_hidden_layers")


def check_fixed_fields(config: ConfigReader) -> None:
    """Fields with one value in every published model."""
    config.expect("attn_output_gate", True, default=True)
    config.expect("output_gate_type", "swish", None)
    config.expect("mamba_ssm_dtype", "float32", None)  # heddle's states have at least float32
    config.optional("mtp_use_dedicated_embeddings")  # a module with such tensors is not read
    config.expect("mlp_only_layers", [], None)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """As Qwen3-Next's, with a tensor of their own for most projections of the delta rule."""
    _qwen_hybrid.map_weights(design, weights, _map_inputs, MODULES)


def _map_inputs(weights: WeightMap, hf: str, heddle: str, _: int) -> None:
    weights.add_module(f"{hf}.in_proj_qkv", *(f"{heddle}.{role}" for role in "qkv"))
    for name, role in (("z", "gate"), ("b", "beta"), ("a", "a")):
        weights.add_module(f"{hf}.in_proj_{name}", f"{heddle}.{role}")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Two kinds of mixers; `layer_types` says which each layer has."""
    check_fixed_fields(config)
    return _qwen_hybrid.read_design(config, [_common.read_gated(config)] * _layer_types.read_depth(config))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return write_common(design) | _common.write_gated(design) | {"hidden_act": "silu"}


def write_common(design: ModelConfig) -> dict[str, Any]:
    """Qwen3-Next's fields, and the dtype of the states, which vLLM reads."""
    return _qwen_hybrid.write_common(design) | {"mamba_ssm_dtype": "float32"}


FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=_qwen_hybrid.IGNORED_TENSORS,
    multi_token=MODULES,
)
