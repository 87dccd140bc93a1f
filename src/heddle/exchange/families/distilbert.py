"""DistilBERT (Sanh et al. 2019): BERT without token types, under names of its own; every epsilon is 1e-12."""

from typing import Any

from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import bert
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig

BASE, EPS = "DistilBertModel", 1e-12  # BASE is without a language head
# BERT's name of a field: DistilBERT's.
NAMES = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_act": "activation",
    "intermediate_size": "hidden_dim", "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}  # fmt: skip
# Of the first weights (the table of positions is stored, also a sinusoidal one), and of other heads.
UNUSED_FIELDS = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
LAYER = {
    "attention.q_lin": "mixer.q", "attention.k_lin": "mixer.k", "attention.v_lin": "mixer.v",
    "attention.out_lin": "mixer.out", "sa_layer_norm": "residual.norms.mixer", "ffn.lin1": "feedforward.up",
    "ffn.lin2": "feedforward.down", "output_layer_norm": "residual.norms.feedforward",
}  # fmt: skip


def read_config(config: ConfigReader) -> dict[str, Any]:
    """As BERT's, by its own names."""
    for name in UNUSED_FIELDS:
        config.optional(name)
    config.expect("layer_norm_eps", EPS, None)
    config.names = NAMES
    return bert.read_encoder(config, BASE, offset=0, types=None)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    fields = bert.write_encoder(design, BASE)
    for name in ("type_vocab_size", "position_embedding_type", "layer_norm_eps"):
        del fields[name]
    return {NAMES.get(name, name): value for name, value in fields.items()}


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `distilbert`, the head beside it."""
    bert.map_encoder(design, weights, "distilbert", "transformer.layer", LAYER)
    weights.add_module("vocab_transform", "head.transform.dense")
    weights.add_module("vocab_layer_norm", "head.transform.norm")
    bert.map_head(design, weights, "vocab_projector", "vocab_projector.bias")


FAMILY = Family(
    "distilbert",
    "DistilBertForMaskedLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("distilbert.embeddings.position_ids",),
)
