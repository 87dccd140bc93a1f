"""K-EXAONE (LG AI Research 2026): EXAONE 4's attention with norms before the branches, and DeepSeek-V3's experts.

The layer that predicts further tokens (`mtp`) is ignored; it does not change the next token's logits.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, _moe, exaone4
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

NAMES = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Layers without a window have no RoPE. The balancing bias keeps its loaded value (`bias_update` 0)."""
    config.names = NAMES
    window, dense = config.require_count("sliding_window"), config.get("first_k_dense_replace", 1)
    routing = _deepseek.read_sigmoid_routing(config)
    feedforwards = _deepseek.read_feedforwards(config, routing, dense, bias=False)
    config.expect("first_last_k_dense_replace", None, dense)  # of the first files, as the list after it
    config.expect("is_moe_layer", None, [feedforward["kind"] == "moe" for feedforward in feedforwards])
    return _common.rms_design(config, 1e-5, exaone4.read_layers(config, window, feedforwards))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return (
        exaone4.write_layers(design)
        | _deepseek.write_feedforwards(design, NAMES)
        | _deepseek.write_sigmoid_routing(design)
    )


def _map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    _moe.map_feedforward(weights, hf, heddle, "shared_experts")
    weights.add_tensor(f"{hf}.e_score_correction_bias", f"{heddle}.router.expert_bias")


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, and the experts'."""
    _common.map_weights(design, weights, map_feedforward=_map_feedforward)


FAMILY = Family("exaone_moe", "ExaoneMoeForCausalLM", read_config, write_config, map_weights, ignored_tensors=("mtp.",))
