"""RoBERTa (Liu et al. 2019): BERT whose positions begin after the padding token's id, with a head of its own names.

The first `pad_token_id` + 1 rows of the table of positions are read by no token. transformers counts positions by the
ids, so that a padding token within a text has none; here the layout says what is padding. The activation of the head is
GELU whatever `hidden_act` says. The pooler is left out; decoders, cross-attention and relative positions are refused.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import bert
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.positions.learned import LearnedConfig

PADDING_ID = 1  # if the field is absent

BASE = "RobertaModel"  # without a language head


def read_config(config: ConfigReader, base: str = BASE) -> dict[str, Any]:
    """All layers are the same. Raises ConfigError for a padding id that is null, which the class cannot count from."""
    padding_id = config.get_nullable("pad_token_id", PADDING_ID)
    if type(padding_id) is not int or padding_id < 0:
        raise config.invalid("pad_token_id", "should be a whole number from 0 on, since positions are counted from it")
    return bert.read_encoder(config, base, offset=padding_id + 1, transform="gelu")


def write_config(design: ModelConfig, base: str = BASE) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    position = design.embedding.position
    offset = position.offset if isinstance(position, LearnedConfig) else None
    return bert.write_encoder(design, base) | {"pad_token_id": (offset or 1) - 1}


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `roberta`, the head below `lm_head`."""
    bert.map_encoder(design, weights, "roberta")
    weights.add_module("lm_head.dense", "head.transform.dense")
    weights.add_module("lm_head.layer_norm", "head.transform.norm")
    bert.map_head(design, weights, "lm_head.decoder", "lm_head.bias")


FAMILY = Family(
    "roberta",
    "RobertaForMaskedLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=(
        "roberta.pooler.", "pooler.", "roberta.embeddings.position_ids", "lm_head.bias", "lm_head.decoder.bias",
    ),  # the last two as in BERT
)  # fmt: skip
