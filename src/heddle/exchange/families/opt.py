"""OPT (Zhang et al. 2022): GPT-2 with ReLU, one dropout rate and two unused rows in the table of positions.

The 350M model, with embeddings narrower than the model and norms after each branch, is refused by these fields.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.positions.learned import LearnedConfig

LAST = "final_layer_norm", "lm_head"
OFFSET = 2  # rows of the table of positions before that of the first token


def read_config(
    config: ConfigReader, activation: str = "relu", dropout: float = 0.0, length: int = 2048
) -> dict[str, Any]:
    """All layers are the same; `enable_bias` applies to every projection.

    activation, dropout (of attention), length: the defaults of the family.
    """
    _common.check_width(config)
    width, bias = config.require_count("hidden_size"), config.get("enable_bias", True)
    config.expect("word_embed_proj_dim", None, width)
    config.expect("do_layer_norm_before", True, default=True)
    config.expect("_remove_final_layer_norm", False, default=False)
    config.expect("layer_norm_elementwise_affine", True, default=True)
    config.optional("layerdrop")  # skips whole layers, in training alone
    config.note("activation_dropout", "prefix")  # of the first files
    mixer = {
        "kind": "attention",
        "heads": config.require_count("num_attention_heads"),
        "bias": bias,
        "dropout": config.get("attention_dropout", dropout),
    }
    feedforward = {
        "kind": "mlp",
        "hidden": config.require("ffn_dim", int),
        "activation": _common.read_activation(config, "activation_function", activation),
        "bias": bias,
    }
    length = config.get("max_position_embeddings", length)
    std = config.get("init_std", 0.02)
    return _common.design_fields(
        config,
        {"kind": "layer", "eps": 1e-5},
        _common.same_layers(config, mixer, feedforward),
        tied=True,
        embedding={"position": {"kind": "learned", "length": length, "offset": OFFSET}},
        residual={"kind": "pre_norm", "dropout": config.get("dropout", 0.1)},
        initialization={"std": std} if std else {},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    position = design.embedding.position
    config = _common.write_common(design)
    return config | {
        "max_position_embeddings": position.length if isinstance(position, LearnedConfig) else 2048,
        "init_std": config.pop("initializer_range"),
        "num_attention_heads": mixer.heads,
        "attention_dropout": mixer.dropout,
        "dropout": design.residual.dropout,
        "enable_bias": mixer.bias is True,
        "ffn_dim": feedforward.hidden,
        "activation_function": design_parts.HF_ACTIVATIONS[feedforward.activation],
        "word_embed_proj_dim": design.width,
    }


def map_weights(
    design: ModelConfig, weights: WeightMap, model: str = "model.decoder", last: tuple[str, str] = LAST
) -> None:
    """The tensor names; each is one parameter. model: the name of all but the head. last: of the last norm and head."""
    _common.map_embedding_and_head(design, weights, f"{model}.embed_tokens", f"{model}.{last[0]}", last[1])
    weights.add_module(f"{model}.embed_positions", "embed.position")
    for index in range(design.depth):
        hf, heddle = f"{model}.layers.{index}", f"layers.{index}"
        _common.map_attention(weights, hf, heddle, "out_proj")
        weights.add_module(f"{hf}.self_attn_layer_norm", f"{heddle}.residual.norms.mixer")
        weights.add_module(f"{hf}.final_layer_norm", f"{heddle}.residual.norms.feedforward")
        weights.add_module(f"{hf}.fc1", f"{heddle}.feedforward.up")
        weights.add_module(f"{hf}.fc2", f"{heddle}.feedforward.down")


FAMILY = Family("opt", "OPTForCausalLM", read_config, write_config, map_weights)
