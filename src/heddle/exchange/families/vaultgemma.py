"""VaultGemma (Google 2025): Gemma 2 without the norms after each branch, trained with differential privacy."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, gemma2
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """As Gemma 2's, with pre-norm residuals."""
    return gemma2.read_config(config) | {"residual": {"kind": "pre_norm"}}


def _map_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.mixer")
    weights.add_module(f"{hf}.pre_feedforward_layernorm", f"{heddle}.residual.norms.feedforward")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with other names of the norms."""
    _common.map_weights(design, weights, _map_norms)


FAMILY = Family("vaultgemma", "VaultGemmaForCausalLM", read_config, gemma2.write_config, map_weights)
