"""The text model of Qwen3.5 and 3.6 (Qwen 2026): Qwen3-Next's two kinds of mixers, with a dense feed-forward.

Multi-token prediction layers (`mtp.`) are ignored. `mrope_section` is for images: a text has one position per axis.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _qwen3_5, _qwen_hybrid
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Two kinds of mixers; `layer_types` says which each layer has."""
    _qwen3_5.check_fixed_fields(config)
    return _qwen_hybrid.read_design(config, [_common.read_gated(config)] * _layer_types.read_depth(config))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _qwen_hybrid.write_common(design) | _common.write_gated(design) | {"hidden_act": "silu"}


FAMILY = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    read_config,
    write_config,
    _qwen3_5.map_weights,
    ignored_tensors=_qwen3_5.IGNORED_TENSORS,
)
