"""BERT and its followers: post-norm or pre-norm encoders with learned positions, token types, a head of three steps.

In functions that map weights, `hf` is the name of the encoder in its class, such as `bert`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import HeadConfig, ModelConfig
from heddle.parts.positions.learned import LearnedConfig

# Fields of the first files that no class reads: of the pooler and of other programs.
UNUSED_FIELDS = (
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
    "pooler_type", "classifier_dropout", "output_past",
)  # fmt: skip


def read_encoder(
    config: ConfigReader,
    base: str,
    offset: int = 0,
    transform: str | None = None,
    types: int | None = 2,
    pre_norm: bool = False,
    embedding_norm: bool = True,
) -> dict[str, Any]:
    """The plain data of a design. transform: the activation of the head; None: the layers'.

    types: how many types tokens have if the field is absent; None: the family has none. pre_norm: whether norms are
    before the branches and after the last layer. embedding_norm: whether the sum of embeddings is normalized.

    base: the class without a language head; its head is the embedding alone, untrained as a head. offset: how
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
    heads = {"heads": config.require_count("num_attention_heads"), "causal": False, "bias": True}
    mixer = {"kind": "attention", **heads, "dropout": config.get("attention_probs_dropout_prob", 0.1)}
    feedforward = _common.read_mlp(config, "gelu", bias=True)
    position = {"kind": "learned", "length": length - offset, "offset": offset or None}
    tied = config.get("tie_word_embeddings", True)
    head = {"tied": tied, "bias": True, "transform": transform or feedforward["activation"], "transform_bias": True}
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-12)},
        _common.same_layers(config, mixer, feedforward),
        embedding={"token_types": types, "position": position, "norm": embedding_norm} | dropout,
        residual={"kind": "pre_norm" if pre_norm else "post_norm"} | dropout,
        head={"tied": True} if _common.is_base_class(config, base) else head,
    )


def write_encoder(design: ModelConfig, base: str) -> dict[str, Any]:
    """The fields that `read_encoder` reads."""
    mixer, position = design_parts.first_attention(design), design.embedding.position
    fields = _common.write_common(design) | _common.base_class(design, base) | _common.write_mlp(design)
    if isinstance(position, LearnedConfig):
        fields["max_position_embeddings"] = position.length + (position.offset or 0)
    return fields | {
        "position_embedding_type": "absolute",
        "type_vocab_size": design.embedding.token_types or 1,
        "num_attention_heads": mixer.heads,
        "attention_probs_dropout_prob": mixer.dropout,
        "hidden_dropout_prob": design.residual.dropout,
        "layer_norm_eps": design_parts.norm_eps(design),
    }


LAYER = {
    "attention.self.query": "mixer.q", "attention.self.key": "mixer.k", "attention.self.value": "mixer.v",
    "attention.output.dense": "mixer.out", "attention.output.LayerNorm": "residual.norms.mixer",
    "intermediate.dense": "feedforward.up", "output.dense": "feedforward.down",
    "output.LayerNorm": "residual.norms.feedforward",
}  # fmt: skip


def normed_before(mixer: str, feedforward: str) -> dict[str, str]:
    """`LAYER` with the norms of these names before attention and feed-forward."""
    norms = {mixer: "residual.norms.mixer", feedforward: "residual.norms.feedforward"}
    return {name: role for name, role in LAYER.items() if "LayerNorm" not in name} | norms


def map_encoder(
    design: ModelConfig,
    weights: WeightMap,
    hf: str,
    layers: str = "encoder.layer",
    layer: dict[str, str] = LAYER,
    norm: str = "",
) -> None:
    """Embeddings and layers. The class without a head has no `hf` before its names.

    layer: the names of a layer's modules in `layers`. norm: the name of the norm after the last layer.
    """
    hf = "" if design.head == HeadConfig() else f"{hf}."
    weights.add_module(f"{hf}embeddings.word_embeddings", "embed")
    weights.add_module(f"{hf}embeddings.position_embeddings", "embed.position")
    weights.add_module(f"{hf}embeddings.token_type_embeddings", "embed.token_types")
    weights.add_module(f"{hf}embeddings.LayerNorm", "embed.norm")
    weights.add_module(f"{hf}{norm}", "final_norm.norm")
    for index in range(design.depth):
        for name, role in layer.items():
            weights.add_module(f"{hf}{layers}.{index}.{name}", f"layers.{index}.{role}")


def map_head(design: ModelConfig, weights: WeightMap, transform: tuple[str, str], decoder: str, bias: str) -> None:
    """The head: dense layer and norm of its transform, and `decoder`, or the embedding's weight and `bias`."""
    for name, part in zip(transform, ("dense", "norm"), strict=True):
        weights.add_module(name, f"head.transform.{part}")
    if design.head.tied:
        weights.add_tensor(bias, "head.bias")
    else:
        weights.add_module(decoder, "head")


def read_bert(config: ConfigReader) -> dict[str, Any]:
    """BERT (Devlin et al. 2019): a post-norm encoder with token types and learned positions, a masked language model.

    The pooler and the next-sentence head are left out: they do not change the logits of tokens. `is_decoder` and
    `add_cross_attention` are refused, and so are the relative positions that `position_embedding_type` once named. The
    first files call gains and biases of norms `gamma` and `beta`.
    """
    return read_encoder(config, "BertModel")


def write_bert(design: ModelConfig) -> dict[str, Any]:
    return write_encoder(design, "BertModel")


def map_bert(
    design: ModelConfig, weights: WeightMap, hf: str = "bert", layer: dict[str, str] = LAYER, norm: str = ""
) -> None:
    """The encoder below `hf`, the head below `cls.predictions`."""
    map_encoder(design, weights, hf, layer=layer, norm=norm)
    transform = "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"
    map_head(design, weights, transform, "cls.predictions.decoder", "cls.predictions.bias")


BERT = Family(
    "bert", "BertForMaskedLM", read_bert, write_bert, map_bert,
    ignored_tensors=(
        "bert.pooler.", "pooler.", "cls.seq_relationship.", "bert.embeddings.position_ids", "cls.predictions.bias",
        "cls.predictions.decoder.bias",
    ),  # the last two hold the same bias; a tied head reads the first, an untied one the second
)  # fmt: skip


def read_ernie(config: ConfigReader) -> dict[str, Any]:
    """ERNIE (Sun et al. 2019): BERT with its own tensor names. Models with task-type embeddings are refused."""
    config.ignore("task_type_vocab_size")
    config.expect("use_task_id", False, default=False)
    return read_encoder(config, "ErnieModel")


ERNIE = replace(
    BERT,
    model_type="ernie",
    architecture="ErnieForMaskedLM",
    read_config=read_ernie,
    write_config=partial(write_encoder, base="ErnieModel"),
    map_weights=partial(map_bert, hf="ernie"),
    ignored_tensors=tuple(name.replace("bert.", "ernie.") for name in BERT.ignored_tensors),
)


def read_roformer(config: ConfigReader) -> dict[str, Any]:
    """RoFormer (Su et al. 2021): BERT with rotated queries and keys in place of learned positions.

    The table of sines that its files hold follows from the positions: it is left out of exports, and transformers
    computes it anew. Embeddings of another width and rotated values are refused.
    """
    config.expect("embedding_size", config.require("hidden_size", int), None)
    config.expect("rotary_value", False, default=False)
    design = read_encoder(config, "RoFormerModel")
    design["layers"][0]["mixer"] |= {"position": {"kind": "rope", "layout": "interleaved"}}
    return design | {"embedding": _common.without(design["embedding"], "position")}


def write_roformer(design: ModelConfig) -> dict[str, Any]:
    fields = _common.without(write_encoder(design, "RoFormerModel"), "position_embedding_type")
    return fields | {"embedding_size": design.width, "rotary_value": False}


SINES = "encoder.embed_positions."
ROFORMER = replace(
    BERT,
    model_type="roformer",
    architecture="RoFormerForMaskedLM",
    read_config=read_roformer,
    write_config=write_roformer,
    map_weights=partial(map_bert, hf="roformer"),
    ignored_tensors=(
        SINES, f"roformer.{SINES}", *(name.replace("bert.", "roformer.") for name in BERT.ignored_tensors),
    ),
)  # fmt: skip


def read_megatron_bert(config: ConfigReader) -> dict[str, Any]:
    """Megatron-BERT (Shoeybi et al. 2019): BERT with norms before the branches, and none after the embeddings."""
    return read_encoder(config, "MegatronBertModel", pre_norm=True, embedding_norm=False)


MEGATRON_BERT = replace(
    BERT,
    model_type="megatron-bert",
    architecture="MegatronBertForMaskedLM",
    read_config=read_megatron_bert,
    write_config=partial(write_encoder, base="MegatronBertModel"),
    map_weights=partial(map_bert, layer=normed_before("attention.ln", "ln"), norm="encoder.ln"),
)


def read_bert_generation(config: ConfigReader) -> dict[str, Any]:
    """The decoder of BERT for generation (Rothe et al. 2020): causal, without token types, a head of one step.

    Read where `is_decoder` is true; cross-attention is refused.
    """
    config.expect("is_decoder", True)
    design = read_encoder(config, "", types=None)
    design["layers"][0]["mixer"] |= {"causal": True}
    return design | {"head": {"tied": design["head"]["tied"], "bias": True}}


def write_bert_generation(design: ModelConfig) -> dict[str, Any]:
    fields = _common.without(write_encoder(design, ""), "type_vocab_size", "position_embedding_type", "architectures")
    return fields | {"is_decoder": True}


def map_bert_generation(design: ModelConfig, weights: WeightMap) -> None:
    """The decoder below `bert`, the head below `lm_head`."""
    map_encoder(design, weights, "bert")
    map_head(design, weights, ("", ""), "lm_head.decoder", "lm_head.bias")


BERT_GENERATION = Family(
    "bert-generation", "BertGenerationDecoder", read_bert_generation, write_bert_generation, map_bert_generation,
    ignored_tensors=("lm_head.bias", "lm_head.decoder.bias"),
)  # fmt: skip


ROBERTA_BASE = "RobertaModel"  # without a language head


def read_roberta(config: ConfigReader, base: str = ROBERTA_BASE, **norms: bool) -> dict[str, Any]:
    """RoBERTa (Liu et al. 2019): BERT whose positions begin after the padding token's id, with a head of its own names.

    No token reads the first `pad_token_id` + 1 rows of the table of positions. transformers counts positions by
    the ids, so that a padding token within a text has no position; here the layout marks padding. The activation of the
    head is GELU whatever `hidden_act` says. The pooler is left out; decoders, cross-attention and relative positions
    are refused.
    """
    # norms: as in `read_encoder`.
    padding_id = config.get_nullable("pad_token_id", 1)
    if type(padding_id) is not int or padding_id < 0:
        raise config.invalid("pad_token_id", "should be a whole number from 0 on, since positions are counted from it")
    return read_encoder(config, base, offset=padding_id + 1, transform="gelu", **norms)


def write_roberta(design: ModelConfig, base: str = ROBERTA_BASE) -> dict[str, Any]:
    position = design.embedding.position
    offset = position.offset if isinstance(position, LearnedConfig) else None
    return write_encoder(design, base) | {"pad_token_id": (offset or 1) - 1}


def map_roberta(
    design: ModelConfig, weights: WeightMap, hf: str = "roberta", layer: dict[str, str] = LAYER, norm: str = ""
) -> None:
    """The encoder below `hf`, the head below `lm_head`."""
    map_encoder(design, weights, hf, layer=layer, norm=norm)
    map_head(design, weights, ("lm_head.dense", "lm_head.layer_norm"), "lm_head.decoder", "lm_head.bias")


ROBERTA = Family(
    "roberta", "RobertaForMaskedLM", read_roberta, write_roberta, map_roberta,
    ignored_tensors=(
        "roberta.pooler.", "pooler.", "roberta.embeddings.position_ids", "lm_head.bias", "lm_head.decoder.bias",
    ),  # the last two as in BERT
)  # fmt: skip


def _roberta_as(
    model_type: str,
    name: str,
    read_config: Callable[[ConfigReader], dict[str, Any]],
    hf: str = "roberta",
    **names: Any,
) -> Family:
    """RoBERTa with its own names; its classes begin with `name`, its tensors with `hf`.

    names: further ones, as `map_roberta` takes them.
    """
    return replace(
        ROBERTA,
        model_type=model_type,
        architecture=f"{name}ForMaskedLM",
        read_config=read_config,
        write_config=partial(write_roberta, base=f"{name}Model"),
        map_weights=partial(map_roberta, hf=hf, **names),
        ignored_tensors=tuple(tensor.replace("roberta.", f"{hf}.") for tensor in ROBERTA.ignored_tensors),
    )


def read_xlm_roberta(config: ConfigReader) -> dict[str, Any]:
    """XLM-RoBERTa (Conneau et al. 2019): RoBERTa with a vocabulary of a hundred languages, and its own class names."""
    return read_roberta(config, "XLMRobertaModel")


def read_camembert(config: ConfigReader) -> dict[str, Any]:
    """CamemBERT (Martin et al. 2020): RoBERTa with a French vocabulary, and its own class names."""
    return read_roberta(config, "CamembertModel")


def read_data2vec(config: ConfigReader) -> dict[str, Any]:
    """data2vec's model of text (Baevski et al. 2022): RoBERTa trained to predict representations, in own names."""
    return read_roberta(config, "Data2VecTextModel")


def read_roberta_prelayernorm(config: ConfigReader) -> dict[str, Any]:
    """RoBERTa with norms before the branches (Wettig et al. 2022, efficient masked language modeling)."""
    return read_roberta(config, "RobertaPreLayerNormModel", pre_norm=True)


def read_xlm_roberta_xl(config: ConfigReader) -> dict[str, Any]:
    """XLM-RoBERTa XL and XXL (Goyal et al. 2021): norms before the branches, and none after the embeddings."""
    return read_roberta(config, "XLMRobertaXLModel", pre_norm=True, embedding_norm=False)


XLM_ROBERTA = _roberta_as("xlm-roberta", "XLMRoberta", read_xlm_roberta)
CAMEMBERT = _roberta_as("camembert", "Camembert", read_camembert)
DATA2VEC = _roberta_as("data2vec-text", "Data2VecText", read_data2vec, "data2vec_text")
ROBERTA_PRELAYERNORM = _roberta_as(
    "roberta-prelayernorm", "RobertaPreLayerNorm", read_roberta_prelayernorm, "roberta_prelayernorm",
    layer=normed_before("attention.LayerNorm", "intermediate.LayerNorm"), norm="LayerNorm",
)  # fmt: skip
XLM_ROBERTA_XL = _roberta_as(
    "xlm-roberta-xl", "XLMRobertaXL", read_xlm_roberta_xl, norm="encoder.LayerNorm",
    layer=normed_before("attention.self_attn_layer_norm", "LayerNorm"),
)  # fmt: skip


DISTILBERT_BASE = "DistilBertModel"  # without a language head
# BERT's name of a field: DistilBERT's.
NAMES = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_act": "activation",
    "intermediate_size": "hidden_dim", "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}  # fmt: skip
# Of the first weights (the table of positions is stored, also a sinusoidal one), and of other heads.
DISTILBERT_UNUSED_FIELDS = ("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
DISTILBERT_LAYER = {
    "attention.q_lin": "mixer.q", "attention.k_lin": "mixer.k", "attention.v_lin": "mixer.v",
    "attention.out_lin": "mixer.out", "sa_layer_norm": "residual.norms.mixer", "ffn.lin1": "feedforward.up",
    "ffn.lin2": "feedforward.down", "output_layer_norm": "residual.norms.feedforward",
}  # fmt: skip


def read_distilbert(config: ConfigReader) -> dict[str, Any]:
    """DistilBERT (Sanh et al. 2019): BERT without token types, with its own tensor names; every epsilon is 1e-12."""
    config.ignore(*DISTILBERT_UNUSED_FIELDS)
    config.expect("layer_norm_eps", 1e-12, None)
    config.names = NAMES
    return read_encoder(config, DISTILBERT_BASE, types=None)


def write_distilbert(design: ModelConfig) -> dict[str, Any]:
    absent = ("type_vocab_size", "position_embedding_type", "layer_norm_eps")
    fields = _common.without(write_encoder(design, DISTILBERT_BASE), *absent)
    return {NAMES.get(name, name): value for name, value in fields.items()}


def map_distilbert(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `distilbert`, the head beside it."""
    map_encoder(design, weights, "distilbert", "transformer.layer", DISTILBERT_LAYER)
    map_head(design, weights, ("vocab_transform", "vocab_layer_norm"), "vocab_projector", "vocab_projector.bias")


DISTILBERT = Family(
    "distilbert", "DistilBertForMaskedLM", read_distilbert, write_distilbert, map_distilbert,
    ignored_tensors=("distilbert.embeddings.position_ids",),
)  # fmt: skip


ELECTRA_BASE, DISCRIMINATOR = "ElectraModel", "ElectraForPreTraining"  # without a language head
OF_OTHER_HEADS = ("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")


def read_electra(config: ConfigReader) -> dict[str, Any]:
    """ELECTRA (Clark et al. 2020): BERT whose embeddings may have another width, read where they have the layers'.

    The generators are masked language models, the discriminators (`ElectraForPreTraining`) encoders whose head, which
    detects replaced tokens, is left out. Published generators and small models have narrower or wider embeddings, and
    are refused.
    """
    config.ignore(*OF_OTHER_HEADS)
    width = config.require("hidden_size", int)
    if config.get("embedding_size", 128) != width:
        raise config.invalid("embedding_size", f"heddle needs embeddings as wide as the layers, {width}")
    base = DISCRIMINATOR if _common.is_base_class(config, DISCRIMINATOR) else ELECTRA_BASE
    return read_encoder(config, base, transform="gelu")  # whatever the layers have


def write_electra(design: ModelConfig) -> dict[str, Any]:
    return write_encoder(design, ELECTRA_BASE) | {"embedding_size": design.width}


def map_electra(design: ModelConfig, weights: WeightMap) -> None:
    """The encoder below `electra`, the head beside it."""
    map_encoder(design, weights, "electra")
    transform = "generator_predictions.dense", "generator_predictions.LayerNorm"
    map_head(design, weights, transform, "generator_lm_head", "generator_lm_head.bias")


ELECTRA = Family(
    "electra", "ElectraForMaskedLM", read_electra, write_electra, map_electra,
    ignored_tensors=("electra.embeddings.position_ids", "embeddings.position_ids", "discriminator_predictions."),
)  # fmt: skip
