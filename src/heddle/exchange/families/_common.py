"""What most families share: the config fields and tensor names of Llama's decoder.

In functions that map weights, `hf` and `heddle` are name prefixes of the same module, such as `model.layers.0` and
`layers.0`.
"""

from collections.abc import Callable
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.family import ModuleNames, WeightMap
from heddle.exchange.rope import read_rope, write_rope
from heddle.model.config import HeadConfig, LayerConfig, ModelConfig
from heddle.parts.positions.rope import RopeConfig

MapModule = Callable[[WeightMap, str, str], None]  # from the names of a module, `hf` and `heddle`
DEFAULT_MAX_POSITIONS = 2048  # max_position_embeddings of a design that has no length


def read_activation(config: ConfigReader, name: str = "hidden_act", default: str = "silu") -> str:
    """Heddle's name of an activation. Raises ConfigError for one that heddle does not have."""
    hf_name = config.get(name, default)
    if hf_name not in design_parts.HEDDLE_ACTIVATIONS:
        raise config.invalid(name, f"heddle has {', '.join(design_parts.HEDDLE_ACTIVATIONS)}")
    return design_parts.HEDDLE_ACTIVATIONS[hf_name]


def read_heads(config: ConfigReader, width: int, head_dim: int | None = None) -> dict[str, Any]:
    """heads, kv_heads and head_dim from Llama's fields; `head_dim` is the family's default."""
    heads = config.require_count("num_attention_heads")
    dim = config.get("head_dim", head_dim or width // heads)
    return {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads), "head_dim": dim}


def read_attention(
    config: ConfigReader,
    theta: float = 10000.0,
    *,
    head_dim: int | None = None,
    partial_rotary_factor: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Attention with Llama's fields of heads, dropout and RoPE, whose defaults are given, and the `extra` ones."""
    heads = read_heads(config, config.require("hidden_size", int), head_dim)
    return {
        "kind": "attention",
        **heads,
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"], theta, partial_rotary_factor),
        **extra,
    }


def check_width(config: ConfigReader) -> None:
    """Raises ConfigError if the heads do not divide the width, as the family's own class does."""
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    if width % heads:
        raise config.invalid("hidden_size", f"{config.data.get('model_type')} needs a multiple of its {heads} heads")


def read_gated(config: ConfigReader, name: str = "hidden_act", default: str = "silu", **extra: Any) -> dict[str, Any]:
    """A gated feed-forward; `name` is the field of its activation, `default` the family's default for it."""
    hidden = config.require("intermediate_size", int)
    return {"kind": "gated", "hidden": hidden, "activation": read_activation(config, name, default), **extra}


def read_mlp(config: ConfigReader, default: str, bias: bool) -> dict[str, Any]:
    """A feed-forward of two projections; `default` is the family's activation."""
    return read_gated(config, default=default, bias=bias) | {"kind": "mlp"}


def write_mlp(design: ModelConfig) -> dict[str, Any]:
    """The fields of the first feed-forward of two projections."""
    feedforward = design_parts.first_mlp(design)
    return {
        "intermediate_size": feedforward.hidden,
        "hidden_act": design_parts.HF_ACTIVATIONS[feedforward.activation],
    }


def write_gated(design: ModelConfig, name: str = "hidden_act") -> dict[str, Any]:
    """The fields of the first gated feed-forward."""
    feedforward = design_parts.first_gated(design)
    return {"intermediate_size": feedforward.hidden, name: design_parts.HF_ACTIVATIONS[feedforward.activation]}


def same_layers(config: ConfigReader, mixer: dict[str, Any], feedforward: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry for layers that are all the same."""
    return [{"repeat": config.require("num_hidden_layers", int), "mixer": mixer, "feedforward": feedforward}]


def rms_design(config: ConfigReader, eps: float, layers: list[dict[str, Any]], **extra: Any) -> dict[str, Any]:
    """As `design_fields`, with RMSNorm; `eps` is the family's default."""
    return design_fields(config, {"kind": "rms", "eps": config.get("rms_norm_eps", eps)}, layers, **extra)


def design_fields(
    config: ConfigReader, norm: dict[str, Any], layers: list[dict[str, Any]], tied: bool = False, **extra: Any
) -> dict[str, Any]:
    """The plain data of a design with these layers; the fields that every family has are read here.

    tied: whether the head is the embedding where `tie_word_embeddings` is absent.
    """
    std = config.get("initializer_range", 0.02)
    return {
        "vocab_size": config.require("vocab_size", int),
        "width": config.require("hidden_size", int, "n_embd", "n_embed"),
        "norm": norm,
        "layers": layers,
        "head": {"tied": config.get("tie_word_embeddings", tied)},
        "initialization": {"std": std} if std else {},
    } | extra


def write_common(design: ModelConfig) -> dict[str, Any]:
    """The fields that every family has."""
    return {
        "vocab_size": design.vocab_size,
        "hidden_size": design.width,
        "num_hidden_layers": design.depth,
        "max_position_embeddings": DEFAULT_MAX_POSITIONS,
        "tie_word_embeddings": design.head.tied,
        "initializer_range": design.initialization.std,
    }


def write_attention(
    design: ModelConfig, rope: RopeConfig | None = None, partial_rotary_factor: float | None = None
) -> dict[str, Any]:
    """Llama's fields of the first attention and its RoPE.

    rope: the RoPE to write, if the family cannot express all of it. partial_rotary_factor as in `write_rope`.
    """
    mixer = design_parts.first_attention(design)
    heads = {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.kv_heads,
        "head_dim": mixer.head_dim,
        "attention_dropout": mixer.dropout,
    }
    rope, head_dim = rope or design_parts.rope_of(mixer), mixer.head_dim or design.width
    return heads | write_rope(rope, head_dim, DEFAULT_MAX_POSITIONS, partial_rotary_factor)


def write_decoder(design: ModelConfig) -> dict[str, Any]:
    """The fields of Llama's decoder: attention with biases or none, and a gated feed-forward, in every layer."""
    return write_unbiased_decoder(design) | {"attention_bias": design_parts.first_attention(design).bias is True}


def write_unbiased_decoder(design: ModelConfig) -> dict[str, Any]:
    """As `write_decoder`, for a family whose attention has no biases."""
    norm = {"rms_norm_eps": design_parts.norm_eps(design)}
    return write_common(design) | write_attention(design) | write_gated(design) | norm


def map_embedding_and_head(
    design: ModelConfig,
    weights: WeightMap,
    embedding: str = "model.embed_tokens",
    norm: str = "model.norm",
    head: str = "lm_head",
) -> None:
    """Embedding, final norm and head."""
    weights.add_module(embedding, "embed")
    weights.add_module(norm, "final_norm.norm")
    if not design.head.tied:
        weights.add_module(head, "head")


def named_layers(design: ModelConfig, modules: ModuleNames | None = None) -> list[tuple[str, str, LayerConfig]]:
    """The names of every layer, the family's and heddle's, and its config; then those of multi-token modules."""
    layers = [
        (f"model.layers.{index}", f"layers.{index}", layer) for index, layer in enumerate(design_parts.layers(design))
    ]
    of_modules = [] if modules is None else modules.layers(design)
    return [*layers, *((hf, heddle, design.last_layer) for hf, heddle in of_modules)]


def map_attention(
    weights: WeightMap, hf: str, heddle: str, out: str = "o_proj", norms: tuple[str, str] = ("q_norm", "k_norm")
) -> None:
    """The four projections of a layer, and its norms of queries and keys; `out` and `norms` are names that differ."""
    for name, role in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), (out, "out")):
        weights.add_module(f"{hf}.self_attn.{name}", f"{heddle}.mixer.{role}")
    for name, role in zip(norms, "qk", strict=True):
        weights.add_module(f"{hf}.self_attn.{name}", f"{heddle}.mixer.{role}_norm")


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The three projections of a gated feed-forward."""
    for name in ("gate", "up", "down"):
        weights.add_module(f"{hf}.{name}_proj", f"{heddle}.{name}")


def map_pre_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    """The norms before attention and feed-forward."""
    weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.mixer")
    weights.add_module(f"{hf}.post_attention_layernorm", f"{heddle}.residual.norms.feedforward")


def map_weights(
    design: ModelConfig,
    weights: WeightMap,
    map_norms: MapModule = map_pre_norms,
    map_feedforward: MapModule = map_gated,
    feedforward: str = "mlp",
    map_mixer: MapModule = map_attention,
    modules: ModuleNames | None = None,
) -> None:
    """All of Llama's tensor names; those that the design lacks are skipped.

    map_norms: maps the norms of a layer. map_feedforward: its feed-forward, whose Hugging Face name is `feedforward`.
    map_mixer: its attention. modules: the names of multi-token modules, whose layers are mapped, too.
    """
    map_embedding_and_head(design, weights)
    for hf, heddle, _ in named_layers(design, modules):
        map_mixer(weights, hf, heddle)
        map_feedforward(weights, f"{hf}.{feedforward}", f"{heddle}.feedforward")
        map_norms(weights, hf, heddle)


def is_base_class(config: ConfigReader, name: str) -> bool:
    """Whether a config.json is of an encoder without a language head, such as `BertModel`."""
    return config.data.get("architectures") == [name]


def base_class(design: ModelConfig, name: str) -> dict[str, Any]:
    """The class of a design whose head is the embedding alone, for config.json; nothing for other designs."""
    return {} if design.head != HeadConfig() else {"architectures": [name]}
