"""DeepSeek-V3.2 (DeepSeek-AI 2025): V3, with an indexer in each layer that selects the keys of a query.

Multi-token modules (`num_nextn_predict_layers`) are read where the weights hold them, as further layers.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _deepseek, glm4_moe_lite
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.modules.indexer import IndexerConfig

INDEXED = "indexed_attention"  # the type of every layer
INDEXER = {"wq_b": "q", "wk": "k", "k_norm": "k_norm", "weights_proj": "weights"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """The balancing bias keeps its loaded value (`bias_update` 0); set `bias_update` to train it."""
    return read_design(config, 1e-6, query_rank=1536, heads=64, indexer={})


def read_design(
    config: ConfigReader, eps: float, query_rank: int, heads: int, indexer: dict[str, Any]
) -> dict[str, Any]:
    """A design; all but the last are the family's defaults, `heads` the indexer's. indexer: further fields of it."""
    depth = config.require("num_hidden_layers", int)
    config.expect("layer_types", None, [INDEXED] * depth)
    config.expect("mlp_bias", False, default=False)
    dense = config.get("first_k_dense_replace", 3)
    mixer = _deepseek.read_attention(config, "interleaved", query_rank) | {
        "indexer": {
            "top_k": config.get("index_topk", 2048),
            "heads": config.get("index_n_heads", heads),
            "head_dim": config.get("index_head_dim", 128),
            **indexer,
        }
    }
    layers = glm4_moe_lite.read_layers(config, mixer, min(dense, depth))
    return _common.rms_design(config, eps, layers)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    indexer = design_parts.first_latent_attention(design).indexer or IndexerConfig(top_k=1, heads=1, head_dim=2)
    return (
        _deepseek.write_common(design)
        | _deepseek.write_sigmoid_routing(design)
        | _deepseek.write_feedforwards(design, {})
        | {
            "index_topk": indexer.top_k,
            "index_n_heads": indexer.heads,
            "index_head_dim": indexer.head_dim,
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Those of V3, and the indexers'."""
    _deepseek.map_weights(design, weights)
    for layer, own, _ in _common.named_layers(design, _deepseek.MODULES):
        for hf, heddle in INDEXER.items():
            weights.add_module(f"{layer}.self_attn.indexer.{hf}", f"{own}.mixer.indexer.{heddle}")


FAMILY = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("model.layers.{depth}.",),
    multi_token=_deepseek.MODULES,
)
