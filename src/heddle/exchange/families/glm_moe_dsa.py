"""GLM-5 (Z.ai 2026): DeepSeek-V3.2, with indexers that rotate neighboring dims, and layers that share a selection.

The multi-token prediction layers (`num_nextn_predict_layers`) are ignored; they do not change the next token's logits.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _layer_types, deepseek_v32
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

OWN, SHARED = "full", "shared"  # in `indexer_types`


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    config.expect("indexer_rope_interleave", True, None)
    indexer = {"rope_layout": "interleaved"}
    design = deepseek_v32.read_design(config, 1e-5, query_rank=2048, heads=32, indexer=indexer)
    types = _layer_types.read_kinds(config, "indexer_types", _usual(config), (OWN, SHARED))
    layers = [{**layer, "repeat": 1} for layer in design["layers"] for _ in range(layer["repeat"])]
    for layer, kind in zip(layers, types, strict=True):
        if kind == SHARED:
            mixer = {name: value for name, value in layer["mixer"].items() if name != "indexer"}
            layer["mixer"] = mixer | {"shared_index": True}
    return design | {"layers": _layer_types.merge_repeats(layers)}


def _usual(config: ConfigReader) -> list[str]:
    """The types where `indexer_types` is absent: a pattern of F and S, or every `index_topk_freq`-th after some."""
    depth, pattern = _layer_types.read_depth(config), config.optional("index_topk_pattern")
    every, first = max(config.get("index_topk_freq", 1), 1), config.get("index_skip_topk_offset", 2)
    if isinstance(pattern, str):
        return [SHARED if letter == "S" else OWN for letter in pattern]
    usual = [SHARED if max(index - first + 1, 0) % every else OWN for index in range(depth)]
    return usual if pattern is None else pattern


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    shared = [getattr(layer.mixer, "shared_index", False) for layer in design_parts.layers(design)]
    return deepseek_v32.write_config(design) | {"indexer_types": [SHARED if each else OWN for each in shared]}


FAMILY = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    read_config,
    write_config,
    deepseek_v32.map_weights,
    ignored_tensors=("model.layers.{depth}.",),
)
