"""What most families share: the config fields and tensor names of Llama's decoder.

In functions that map weights, `hf` and `heddle` are name prefixes of the same module, such as `model.layers.0` and
`layers.0`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.family import ModuleNames, WeightMap
from heddle.exchange.rope import read_rope, write_rope
from heddle.model.config import MAX_LAYERS, HeadConfig, LayerConfig, ModelConfig
from heddle.parts.positions.rope import RopeConfig

MapModule = Callable[[WeightMap, str, str], None]  # from the names of a module, `hf` and `heddle`
DEFAULT_MAX_POSITIONS = 2048  # max_position_embeddings of a design that has no length
PRE_NORMS = {
    "input_layernorm": "residual.norms.mixer", "post_attention_layernorm": "residual.norms.feedforward",
}  # fmt: skip
# Fields that say the same of a design in every family that has them.
WRITTEN: dict[str, Callable[[ModelConfig], Any]] = {
    "attention_bias": lambda design: design_parts.first_attention(design).bias is True,
    "mlp_bias": lambda design: design_parts.first_gated(design).bias,
    "sliding_window": design_parts.first_window,
    "use_sliding_window": lambda design: design_parts.first_window(design) is not None,
    "layer_types": design_parts.layer_types,
    "mlp_layer_types": design_parts.mlp_layer_types,
    "norm_topk_prob": lambda design: design_parts.first_moe(design).renormalize,
    **dict.fromkeys(("embd_pdrop", "embedding_dropout"), lambda design: design.embedding.dropout),
    **dict.fromkeys(("hidden_dropout", "resid_pdrop", "residual_dropout"), lambda design: design.residual.dropout),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), design_parts.norm_eps),
}


class Fields:
    """Fields of a config that correspond to fields of one part of a design, for both directions.

    names: by the part's field, the config's name and its default; a type instead of a default makes the field required.
    Further names are older ones.
    """

    def __init__(self, **names: tuple[Any, ...]) -> None:
        self.names = names

    def read(self, config: ConfigReader) -> dict[str, Any]:
        """The plain data of the part. Raises ConfigError for a field that is missing or of another type."""
        return {
            own: (config.require if isinstance(default, type) else config.get)(name, default, *older)
            for own, (name, default, *older) in self.names.items()
        }

    def write(self, part: Any) -> dict[str, Any]:
        """The fields of the config; where the part has None, their defaults."""
        values = {name: (getattr(part, own), default) for own, (name, default, *_) in self.names.items()}
        return {
            name: default if value is None and not isinstance(default, type) else value
            for name, (value, default) in values.items()
        }


def written(design: ModelConfig, *names: str) -> dict[str, Any]:
    """The fields of these names that `WRITTEN` has."""
    return {name: WRITTEN[name](design) for name in names}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The fields except the ones with these names."""
    return {name: value for name, value in fields.items() if name not in names}


def read_activation(config: ConfigReader, name: str = "hidden_act", default: str = "silu") -> str:
    """Heddle's name of an activation. Raises ConfigError for one that heddle does not have."""
    hf_name = config.get(name, default)
    if hf_name not in design_parts.HEDDLE_ACTIVATIONS:
        raise config.invalid(name, f"heddle has {', '.join(design_parts.HEDDLE_ACTIVATIONS)}")
    return design_parts.HEDDLE_ACTIVATIONS[hf_name]


def read_heads(config: ConfigReader, head_dim: int | None = None) -> dict[str, Any]:
    """heads, kv_heads and head_dim from Llama's fields; `head_dim` is the family's default."""
    heads = config.require_count("num_attention_heads")
    dim = config.get("head_dim", head_dim or config.require("hidden_size", int) // heads)
    return {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads), "head_dim": dim}


def read_attention(
    config: ConfigReader,
    theta: float = 10000.0,
    *,
    head_dim: int | None = None,
    partial_rotary_factor: float | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Attention with Llama's fields of heads, dropout and RoPE, with these defaults, and the `extra` fields."""
    heads = read_heads(config, head_dim)
    return attention(config, heads, read_rope(config, heads["head_dim"], theta, partial_rotary_factor), **extra)


def attention(
    config: ConfigReader, heads: dict[str, Any], position: dict[str, Any] | None = None, **extra: Any
) -> dict[str, Any]:
    """Attention with these heads, this RoPE, Llama's field of dropout, and the `extra` fields."""
    dropout = config.get("attention_dropout", 0.0)
    return {"kind": "attention", **heads, "dropout": dropout, "position": position, **extra}


def check_width(config: ConfigReader) -> None:
    """Raises ConfigError if the heads do not divide the width, as the family's own class does."""
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    if width % heads:
        raise config.invalid(
            "hidden_size", f"{config.data.get('model_type', 'it')} needs a multiple of its {heads} heads"
        )


def read_equal_heads(config: ConfigReader) -> dict[str, Any]:
    """As `read_heads`, for a family whose heads fill the width; `head_dim` may say so."""
    check_width(config)
    width, heads = config.require("hidden_size", int), config.require_count("num_attention_heads")
    config.expect("head_dim", width // heads, None)
    return {"heads": heads, "kv_heads": config.get("num_key_value_heads", heads), "head_dim": width // heads}


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


def multiplier(factor: float) -> float | None:
    """A multiplier of a design; none for 1."""
    return None if factor == 1.0 else factor


def same_layers(config: ConfigReader, mixer: dict[str, Any], feedforward: dict[str, Any]) -> list[dict[str, Any]]:
    """The entry for layers that are all the same."""
    depth = config.require_count("num_hidden_layers", maximum=MAX_LAYERS)
    return [{"repeat": depth, "mixer": mixer, "feedforward": feedforward}]


def rms_design(
    config: ConfigReader, eps: float, layers: list[dict[str, Any]], cast: str | None = None, **extra: Any
) -> dict[str, Any]:
    """As `design_fields`, with RMSNorm; `eps` is the family's default. cast: of the norm, if not the usual one."""
    norm = {"kind": "rms", "eps": config.get("rms_norm_eps", eps)} | ({"cast": cast} if cast else {})
    return design_fields(config, norm, layers, **extra)


def layer_norm_design(
    config: ConfigReader, layers: list[dict[str, Any]], eps: str = "layer_norm_eps", **extra: Any
) -> dict[str, Any]:
    """As `design_fields`, with LayerNorm; `eps` is the name of the field of its epsilon, by default 1e-5."""
    return design_fields(config, {"kind": "layer", "eps": config.get(eps, 1e-5)}, layers, **extra)


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


def write_decoder(design: ModelConfig, *names: str) -> dict[str, Any]:
    """The fields of Llama's decoder: attention with biases or none, and a gated feed-forward, in every layer.

    names: of further fields, which `WRITTEN` has.
    """
    return write_unbiased_decoder(design, "attention_bias", *names)


def write_unbiased_decoder(design: ModelConfig, *names: str) -> dict[str, Any]:
    """As `write_decoder`, for a family whose attention has no biases."""
    return (
        write_common(design) | write_attention(design) | write_gated(design) | written(design, "rms_norm_eps", *names)
    )


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


def named_layers(
    design: ModelConfig, modules: ModuleNames | None = None, prefix: str = "model.layers"
) -> list[tuple[str, str, LayerConfig]]:
    """The names of every layer, the family's and heddle's, and its config; then the same for multi-token modules."""
    layers = [
        (f"{prefix}.{index}", f"layers.{index}", layer) for index, layer in enumerate(design_parts.layers(design))
    ]
    of_modules = [] if modules is None else modules.layers(design)
    return [*layers, *((hf, heddle, design.last_layer) for hf, heddle in of_modules)]


def map_attention(
    weights: WeightMap, hf: str, heddle: str, out: str = "o_proj", norms: tuple[str, str] = ("q_norm", "k_norm")
) -> None:
    """The four projections of a layer, and its norms of queries and keys; `out` and `norms` are names that differ."""
    names = {"q_proj": "q", "k_proj": "k", "v_proj": "v", out: "out", norms[0]: "q_norm", norms[1]: "k_norm"}
    weights.add_modules(f"{hf}.self_attn", f"{heddle}.mixer", names)


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The three projections of a gated feed-forward."""
    for name in ("gate", "up", "down"):
        weights.add_module(f"{hf}.{name}_proj", f"{heddle}.{name}")


def map_pre_norms(weights: WeightMap, hf: str, heddle: str) -> None:
    """The norms before attention and feed-forward."""
    weights.add_modules(hf, heddle, PRE_NORMS)


def map_weights(
    design: ModelConfig,
    weights: WeightMap,
    names: Mapping[str, str] = PRE_NORMS,
    map_feedforward: MapModule = map_gated,
    feedforward: str = "mlp",
    map_mixer: MapModule = map_attention,
    modules: ModuleNames | None = None,
) -> None:
    """All of Llama's tensor names, except tensors that the design lacks.

    names: of a layer's norms and other modules, with heddle's. map_feedforward: maps its feed-forward, named
    `feedforward` in Hugging Face's files. map_mixer: its attention. modules: the names of multi-token modules, whose
    layers are mapped, too.
    """
    map_embedding_and_head(design, weights)
    for hf, heddle, _ in named_layers(design, modules):
        map_mixer(weights, hf, heddle)
        map_feedforward(weights, f"{hf}.{feedforward}", f"{heddle}.feedforward")
        weights.add_modules(hf, heddle, names)


def is_base_class(config: ConfigReader, name: str) -> bool:
    """Whether a config.json is of an encoder without a language head, such as `BertModel`."""
    return config.data.get("architectures") == [name]


def base_class(design: ModelConfig, name: str) -> dict[str, Any]:
    """The class of a design whose head is the embedding alone, for config.json; nothing for other designs."""
    return {} if design.head != HeadConfig() else {"architectures": [name]}
