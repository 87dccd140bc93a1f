"""BLOOM (BigScience 2022): ALiBi, a norm after the embedding, biases everywhere.

Queries, keys and values are one matrix, interleaved by head. With a number of heads that is not a power of two (BLOOM
176B), its slopes differ from heddle's, so it is refused.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; the feed-forward is four times as wide as the model."""
    width = config.require_count("hidden_size", "n_embed")
    heads = config.require_count("n_head", "num_attention_heads")
    if heads & (heads - 1):
        raise config.invalid("n_head", "should be a power of two; other numbers have slopes that heddle does not build")
    if width % heads:
        raise config.invalid("hidden_size", f"bloom needs a multiple of its {heads} heads")
    config.expect("apply_residual_connection_post_layernorm", False, default=False)
    config.get("pretraining_tp", 1)  # tensor parallelism of the pretraining; the sums are the same
    config.optional("slow_but_exact")
    # Of the first files: options of the program that trained them.
    config.note("masked_softmax_fusion", "bias_dropout_fusion", "attention_softmax_in_fp32", "skip_bias_add")
    config.note("skip_bias_add_qkv", "offset_alibi", "seq_length", "unk_token_id", "n_inner", "use_return_dict")
    mixer = {
        "kind": "attention",
        "heads": heads,
        "bias": True,
        "dropout": config.get("attention_dropout", 0.0),
        "position": {"kind": "alibi"},
    }
    feedforward = {"kind": "mlp", "hidden": 4 * width, "activation": "gelu_tanh", "bias": True}
    depth = config.require_count("n_layer", "num_hidden_layers")
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        [{"repeat": depth, "mixer": mixer, "feedforward": feedforward}],
        embedding={"norm": True},
        residual={"kind": "pre_norm", "dropout": config.get("hidden_dropout", 0.0)},
        tied=True,
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = design_parts.first_attention(design)
    return {
        "vocab_size": design.vocab_size,
        "hidden_size": design.width,
        "n_layer": design.depth,
        "n_head": mixer.heads,
        "layer_norm_epsilon": design_parts.norm_eps(design),
        "hidden_dropout": design.residual.dropout,
        "attention_dropout": mixer.dropout,
        "initializer_range": design.initialization.std,
        "tie_word_embeddings": design.head.tied,
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names."""
    _common.map_embedding_and_head(design, weights, "transformer.word_embeddings", "transformer.ln_f")
    weights.add_module("transformer.word_embeddings_layernorm", "embed.norm")
    heads = design_parts.first_attention(design).heads
    for index in range(design.depth):
        hf, heddle = f"transformer.h.{index}", f"layers.{index}"
        _common.map_pre_norms(weights, hf, heddle)
        _gpt.map_megatron_layer(weights, hf, heddle, "self_attention", heads)


FAMILY = Family("bloom", "BloomForCausalLM", read_config, write_config, map_weights)
