"""GLM-4 0414 (Zhipu AI 2025): GLM-4 with norms before and after each branch."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, glm
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same."""
    return glm.read_config(config) | {"residual": {"kind": "sandwich"}}


def _map_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    _common.map_pre_norms(weights, hf, heddle)
    weights.add_module(f"{hf}.post_self_attn_layernorm", f"{heddle}.residual.after.mixer")
    weights.add_module(f"{hf}.post_mlp_layernorm", f"{heddle}.residual.after.feedforward")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """GLM-4's tensor names, with four norms per layer."""
    _common.map_weights(design, weights, _map_norms, glm.map_gated)


FAMILY = Family("glm4", "Glm4ForCausalLM", read_config, glm.write_config, map_weights)
