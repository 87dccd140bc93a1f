"""ELECTRA (Clark et al. 2020): BERT with embeddings of a width of their own, which heddle reads if it is the layers'.

The generators are masked language models, the discriminators (`ElectraForPreTraining`) encoders whose head, which tells
replaced tokens, is left out. Published generators and small models have narrower or wider embeddings, and are refused.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, bert
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

BASE, DISCRIMINATOR = "ElectraModel", "ElectraForPreTraining"  # without a language head
UNUSED_FIELDS = ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")  # of other heads


def read_config(config: ConfigReader) -> dict[str, Any]:
    """As BERT's; the head's activation is GELU whatever the layers have."""
    for name in UNUSED_FIELDS:
        config.optional(name)
    width = config.require("hidden_size", int)
    if config.get("embedding_size", 128) != width:
        raise config.invalid("embedding_size", f"heddle needs embeddings as wide as the layers, {width}")
    base = DISCRIMINATOR if _common.is_base_class(config, DISCRIMINATOR) else BASE
    return bert.read_encoder(config, base, offset=0, transform="gelu")


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return bert.write_encoder(design, BASE) | {"embedding_size": design.width}


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `electra`, the head beside it."""
    bert.map_encoder(design, weights, "electra")
    weights.add_module("generator_predictions.dense", "head.transform.dense")
    weights.add_module("generator_predictions.LayerNorm", "head.transform.norm")
    bert.map_head(design, weights, "generator_lm_head", "generator_lm_head.bias")


FAMILY = Family(
    "electra",
    "ElectraForMaskedLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("electra.embeddings.position_ids", "embeddings.position_ids", "discriminator_predictions."),
)
