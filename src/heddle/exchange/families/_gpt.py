"""What GPT-2 and GPT-J share: older field names, and feed-forwards of two projections with biases.

Also the tensor names of Megatron's layers, which GPT-NeoX, BLOOM, Falcon and Persimmon have.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import TensorTransform, WeightMap, interleaved_by_group
from heddle.model.config import ModelConfig

MASK_BUFFERS = ("*.attn.bias", "*.attn.masked_bias")  # buffers that older files hold
# Fields that do not change the logits: of classification heads, the length a second time, and of older programs.
UNUSED_FIELDS = (
    "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
    "n_ctx", "output_past", "n_special", "predict_special_tokens",
)  # fmt: skip


def read_attention(config: ConfigReader, dropout: float) -> dict[str, Any]:
    """The fields of attention that both families have; `dropout` is the family's default."""
    heads = config.require_count("n_head", "num_attention_heads")
    return {"kind": "attention", "heads": heads, "dropout": config.get("attn_pdrop", dropout)}


def read_mlp(config: ConfigReader, activation: str = "gelu_new") -> dict[str, Any]:
    """The feed-forward; by default it is four times as wide as the model. activation: the family's default."""
    width = config.require_count("n_embd", "hidden_size")
    return {
        "kind": "mlp",
        "hidden": config.get("n_inner", 4 * width),
        "activation": _common.read_activation(config, "activation_function", activation),
        "bias": True,
    }


def read_depth(config: ConfigReader) -> int:
    """The number of layers."""
    return config.require_count("n_layer", "num_hidden_layers")


def design_fields(config: ConfigReader, layers: list[dict[str, Any]], dropout: float, **extra: Any) -> dict[str, Any]:
    """A design with these layers. `dropout` is the family's default; it is added to `residual` and `embedding`."""
    for name in UNUSED_FIELDS:
        config.optional(name)
    norm = {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)}
    extra["residual"] = extra["residual"] | {"dropout": config.get("resid_pdrop", dropout)}
    extra["embedding"] = extra.get("embedding", {}) | {"dropout": config.get("embd_pdrop", dropout)}
    return _common.design_fields(config, norm, layers, **extra)


def write_common(design: ModelConfig) -> dict[str, Any]:
    """The fields of both families."""
    mixer, feedforward = design_parts.first_attention(design), design_parts.first_mlp(design)
    return {
        "vocab_size": design.vocab_size,
        "n_embd": design.width,
        "n_layer": design.depth,
        "n_head": mixer.heads,
        "n_inner": None if feedforward.hidden == 4 * design.width else feedforward.hidden,
        "n_positions": _common.DEFAULT_MAX_POSITIONS,
        "activation_function": hf_activation(feedforward.activation),
        "layer_norm_epsilon": design_parts.norm_eps(design),
        "attn_pdrop": mixer.dropout,
        "embd_pdrop": design.embedding.dropout,
        "resid_pdrop": design.residual.dropout,
        "tie_word_embeddings": design.head.tied,
        "initializer_range": design.initialization.std,
    }


def hf_activation(name: str) -> str:
    """The Hugging Face name of an activation. These families write the tanh approximation of GELU as `gelu_new`."""
    return "gelu_new" if name == "gelu_tanh" else design_parts.HF_ACTIVATIONS[name]


def map_embedding_and_head(weights: WeightMap) -> None:
    """Embedding, final norm and head."""
    weights.add_module("transformer.wte", "embed")
    weights.add_module("transformer.ln_f", "final_norm.norm")
    weights.add_module("lm_head", "head")


def map_mlp(weights: WeightMap, up: str, down: str, heddle: str, transform: TensorTransform) -> None:
    """The two projections of a feed-forward."""
    weights.add_module(up, f"{heddle}.up", transform=transform)
    weights.add_module(down, f"{heddle}.down", transform=transform)


def map_megatron_layer(weights: WeightMap, hf: str, heddle: str, attention: str, groups: int) -> None:
    """A layer of Megatron's, but for its norms; queries, keys and values are one matrix, interleaved by `groups`."""
    qkv = (f"{heddle}.mixer.{role}" for role in "qkv")
    weights.add_module(f"{hf}.{attention}.query_key_value", *qkv, transform=interleaved_by_group(groups))
    weights.add_module(f"{hf}.{attention}.dense", f"{heddle}.mixer.out")
    weights.add_module(f"{hf}.mlp.dense_h_to_4h", f"{heddle}.feedforward.up")
    weights.add_module(f"{hf}.mlp.dense_4h_to_h", f"{heddle}.feedforward.down")
