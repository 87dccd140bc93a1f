"""GLM-5 (Z.ai 2026): DeepSeek-V3.2, with indexers that rotate neighboring dims. Indexes that layers share are refused.

The multi-token prediction layers (`num_nextn_predict_layers`) are ignored; they do not change the next token's logits.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import deepseek_v32
from heddle.exchange.family import Family
from heddle.model.config import ModelConfig

OWN, SHARED = "full", "shared"  # in `indexer_types`


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    types, pattern = config.optional("indexer_types"), config.optional("index_topk_pattern")
    every = config.get("index_topk_freq", 1)
    config.optional("index_skip_topk_offset")  # of layers that share an index
    for name, shares in (
        ("indexer_types", SHARED in (types or ())),
        ("index_topk_pattern", not types and bool({"S", SHARED} & set(pattern or ()))),
        ("index_topk_freq", not types and not pattern and every > 1),
    ):
        if shares:
            raise config.invalid(name, "heddle builds layers that have an indexer each, none that share an index")
    config.expect("indexer_rope_interleave", True, None)
    return deepseek_v32.read_design(config, 1e-5, query_rank=2048, heads=32, indexer={"rope_layout": "interleaved"})


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return deepseek_v32.write_config(design) | {"indexer_types": [OWN] * design.depth}


FAMILY = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    read_config,
    write_config,
    deepseek_v32.map_weights,
    ignored_tensors=("model.layers.{depth}.",),
)
