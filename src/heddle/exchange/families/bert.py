"""BERT (Devlin et al. 2019): a post-norm encoder of tokens, types and learned positions, and its masked language model.

The pooler and the next-sentence head are left out: they do not change the logits of tokens. `is_decoder` and
`add_cross_attention` are refused, and so are the relative positions that `position_embedding_type` once named. The
first files call gains and biases of norms `gamma` and `beta`.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import HeadConfig, ModelConfig
from heddle.parts.positions.learned import LearnedConfig

# What BERT and RoBERTa share: post-norm encoders with learned positions, token types and a head of three steps.
#
# In functions that map weights, `hf` is the name of the encoder in its class, such as `bert`.

# Fields of the first files that no class reads: of the pooler and of other programs.
UNUSED_FIELDS = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "classifier_dropout", "output_past",
)  # fmt: skip


def read_encoder(
    config: ConfigReader, base: str, offset: int, transform: str | None = None, types: int | None = 2
) -> dict[str, Any]:
    """The plain data of a design. transform: the activation of the head; None: that of the layers.

    types: how many types tokens have if the field is absent; None: the family has none.

    base: the class without a language head; its head is the embedding alone, whose products no one trained. offset: how
    many rows of the table of positions no token reads. Raises ConfigError for relative positions.
    """
    _common.check_width(config)
    config.expect("position_embedding_type", "absolute", None)
    config.note(*UNUSED_FIELDS)
    length = config.require_count("max_position_embeddings")
    if length <= offset:
        raise config.invalid("max_position_embeddings", f"should be above {offset}, the rows that no token reads")
    if types is not None and "type_vocab_size" in config.data:
        types = config.require_count("type_vocab_size")
    dropout = {"dropout": config.get("hidden_dropout_prob", 0.1)}
    mixer = {
        "kind": "attention",
        "heads": config.require_count("num_attention_heads"),
        "causal": False,
        "bias": True,
        "dropout": config.get("attention_probs_dropout_prob", 0.1),
    }
    feedforward = _common.read_mlp(config, "gelu", bias=True)
    embedding = {
        "token_types": types,
        "position": {"kind": "learned", "length": length - offset, "offset": offset or None},
        "norm": True,
    }
    tied = config.get("tie_word_embeddings", True)
    head = {"tied": tied, "bias": True, "transform": transform or feedforward["activation"], "transform_bias": True}
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-12)},
        _common.same_layers(config, mixer, feedforward),
        embedding=embedding | dropout,
        residual={"kind": "post_norm"} | dropout,
        head={"tied": True} if _common.is_base_class(config, base) else head,
    )


def write_encoder(design: ModelConfig, base: str) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, position = design_parts.first_attention(design), design.embedding.position
    length = _common.DEFAULT_MAX_POSITIONS
    if isinstance(position, LearnedConfig):
        length = position.length + (position.offset or 0)
    return (
        _common.write_common(design)
        | _common.base_class(design, base)
        | _common.write_mlp(design)
        | {
            "max_position_embeddings": length,
            "position_embedding_type": "absolute",
            "type_vocab_size": design.embedding.token_types or 1,
            "num_attention_heads": mixer.heads,
            "attention_probs_dropout_prob": mixer.dropout,
            "hidden_dropout_prob": design.residual.dropout,
            "layer_norm_eps": design_parts.norm_eps(design),
        }
    )


LAYER = {
    "attention.self.query": "mixer.q", "attention.self.key": "mixer.k", "attention.self.value": "mixer.v",
    "attention.output.dense": "mixer.out", "attention.output.LayerNorm": "residual.norms.mixer",
    "intermediate.dense": "feedforward.up", "output.dense": "feedforward.down",
    "output.LayerNorm": "residual.norms.feedforward",
}  # fmt: skip


def map_encoder(
    design: ModelConfig, weights: WeightMap, hf: str, layers: str = "encoder.layer", layer: dict[str, str] = LAYER
) -> None:
    """Embeddings and layers. The class without a head has no `hf` before its names.

    layer: the names of the modules of one of the `layers`.
    """
    hf = "" if design.head == HeadConfig() else f"{hf}."
    weights.add_module(f"{hf}embeddings.word_embeddings", "embed")
    weights.add_module(f"{hf}embeddings.position_embeddings", "embed.position")
    weights.add_module(f"{hf}embeddings.token_type_embeddings", "embed.token_types")
    weights.add_module(f"{hf}embeddings.LayerNorm", "embed.norm")
    for index in range(design.depth):
        for name, role in layer.items():
            weights.add_module(f"{hf}{layers}.{index}.{name}", f"layers.{index}.{role}")


def map_head(design: ModelConfig, weights: WeightMap, decoder: str, bias: str) -> None:
    """The last step of the head: `decoder` has weight and bias of its own, or the embedding's weight and `bias`."""
    if design.head.tied:
        weights.add_tensor(bias, "head.bias")
    else:
        weights.add_module(decoder, "head")


BASE = "BertModel"  # without a language head


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; the head has their activation."""
    return read_encoder(config, BASE, offset=0)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    return write_encoder(design, BASE)


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `bert`, the head below `cls.predictions`."""
    map_encoder(design, weights, "bert")
    weights.add_module("cls.predictions.transform.dense", "head.transform.dense")
    weights.add_module("cls.predictions.transform.LayerNorm", "head.transform.norm")
    map_head(design, weights, "cls.predictions.decoder", "cls.predictions.bias")


FAMILY = Family(
    "bert",
    "BertForMaskedLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=(
        "bert.pooler.", "pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids", "cls.predictions.bias",
        "cls.predictions.decoder.bias",
    ),  # the last two hold the same bias; a tied head reads the first, an untied one the second
)  # fmt: skip
