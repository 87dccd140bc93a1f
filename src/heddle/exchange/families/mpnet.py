"""MPNet (Song et al. 2020): RoBERTa without token types, whose layers share one table of T5's relative positions.

As in its class, no token reads the first two rows of the table of positions whatever `pad_token_id` says, the head's
activation is GELU, and the biases have 32 buckets up to a distance of 128: another `relative_attention_num_buckets` is
refused. A padding token within a text has no position in transformers; here the layout marks padding. The pooler is
left out.
"""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.families.bert import map_encoder, map_head, read_encoder, write_encoder
from heddle.exchange.family import TRANSPOSED, Family, WeightMap
from heddle.model.config import ModelConfig

BASE = "MPNetModel"  # without a language head
BUCKETS, FIRST_POSITION = 32, 2  # as in its class
LAYER = {
    "attention.attn.q": "mixer.q", "attention.attn.k": "mixer.k", "attention.attn.v": "mixer.v",
    "attention.attn.o": "mixer.out", "attention.LayerNorm": "residual.norms.mixer",
    "intermediate.dense": "feedforward.up", "output.dense": "feedforward.down",
    "output.LayerNorm": "residual.norms.feedforward",
}  # fmt: skip


def read_mpnet(config: ConfigReader) -> dict[str, Any]:
    """The first layer has the table, and the others share it."""
    config.expect("relative_attention_num_buckets", BUCKETS, default=BUCKETS)
    design = read_encoder(config, BASE, offset=FIRST_POSITION, transform="gelu", types=None)
    (entry,) = design["layers"]
    layers = []
    for depth, shared in ((1, False), (entry["repeat"] - 1, True)):
        position = {"kind": "relative_bias", "buckets": BUCKETS, "shared": shared}
        layers += [entry | {"repeat": depth, "mixer": entry["mixer"] | {"position": position}}] if depth else []
    return design | {"layers": layers}


def write_mpnet(design: ModelConfig) -> dict[str, Any]:
    fields = _common.without(write_encoder(design, BASE), "type_vocab_size", "position_embedding_type")
    return fields | {"relative_attention_num_buckets": BUCKETS}


def map_mpnet(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `mpnet`, the head below `lm_head`."""
    hf = "" if _common.base_class(design, BASE) else "mpnet."
    map_encoder(design, weights, "mpnet", layer=LAYER)
    table = f"{hf}encoder.relative_attention_bias.weight"
    weights.add_tensor(table, "layers.0.mixer.score_bias.weight", transform=TRANSPOSED)
    map_head(design, weights, ("lm_head.dense", "lm_head.layer_norm"), "lm_head.decoder", "lm_head.bias")


MPNET = Family(
    "mpnet", "MPNetForMaskedLM", read_mpnet, write_mpnet, map_mpnet,
    ignored_tensors=(
        "mpnet.pooler.", "pooler.", "mpnet.embeddings.position_ids", "lm_head.bias", "lm_head.decoder.bias",
    ),  # the last two hold the same bias; a tied head reads the first, an untied one the second
)  # fmt: skip
