"""BERT (Devlin et al. 2019): a post-norm encoder of tokens, types and learned positions, and its masked language model.

The pooler and the head that tells whether a sentence is the next one are left out: they do not change the logits of
tokens. `is_decoder` and `add_cross_attention` are refused, and so are the relative positions that
`position_embedding_type` once named. The first files call gains and biases of norms `gamma` and `beta`.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _bert
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

BASE = "BertModel"  # without a language head


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; the head has their activation."""
    return _bert.read_config(config, BASE, offset=0)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return _bert.write_config(design, BASE)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `bert`, the head below `cls.predictions`."""
    _bert.map_encoder(design, weights, "bert")
    weights.add_module("cls.predictions.transform.dense", "head.transform.dense")
    weights.add_module("cls.predictions.transform.LayerNorm", "head.transform.norm")
    _bert.map_head(design, weights, "cls.predictions.decoder", "cls.predictions.bias")


FAMILY = Family(
    "bert",
    "BertForMaskedLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=(
        "bert.pooler.", "pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids", "cls.predictions.bias",
        "cls.predictions.decoder.bias",
    ),  # the last two are the same number twice; of a tied head the first is read, of another the second
)  # fmt: skip
