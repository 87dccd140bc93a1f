"""GPT-NeoX and Pythia (Black et al. 2022): a norm for each of two parallel branches, partial RoPE, biases everywhere.

`use_parallel_residual: false` is pre-norm. Queries, keys and values are one matrix, interleaved by head.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader, short_repr
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.residuals.parallel import ParallelConfig

DEFAULT_ROTARY_FACTOR = 0.25  # if the config has none


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same; one dropout rate for the embedding and the branches."""
    heads, width = config.require_count("num_attention_heads"), config.require_count("hidden_size")
    config.optional("is_decoder")  # causal in either case
    config.optional("classifier_dropout")
    config.note("attention_probs_dropout_prob", "hidden_dropout_prob", "type_vocab_size")  # of the first files
    base = _read_alias(config, 10000.0, "rotary_emb_base", "rope_theta")
    part = _read_alias(config, DEFAULT_ROTARY_FACTOR, "rotary_pct", "partial_rotary_factor")
    mixer = {
        "kind": "attention",
        "heads": heads,
        "bias": config.get("attention_bias", True),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, width // heads, base, part),
    }
    layers = _common.same_layers(config, mixer, _common.read_mlp(config, "gelu", bias=True))
    norm = {"kind": "layer", "eps": config.get("layer_norm_eps", 1e-5)}
    dropout = {"dropout": config.get("hidden_dropout", 0.0)}
    parallel = config.get("use_parallel_residual", True)
    residual: dict[str, Any] = {"kind": "parallel", "norms": 2} if parallel else {"kind": "pre_norm"}
    return _common.design_fields(config, norm, layers, embedding=dropout, residual=residual | dropout)


def _read_alias(config: ConfigReader, default: float, old: str, new: str) -> float:
    """A field by its older name, the only one that transformers reads. Raises ConfigError if the newer name differs."""
    value = config.get(old, default)
    if config.get(new, value) != value:
        raise config.invalid(new, f"but '{old}' is {short_repr(value)}; make them equal")
    return value


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads, those of RoPE under their older names too."""
    mixer = design_parts.first_attention(design)
    head_dim = mixer.head_dim or design.width
    rope = write_rope(design_parts.rope_of(mixer), head_dim, _common.DEFAULT_MAX_POSITIONS, DEFAULT_ROTARY_FACTOR)
    return (
        _common.write_common(design)
        | rope
        | _common.write_mlp(design)
        | {
            "rotary_emb_base": rope["rope_theta"],
            "rotary_pct": rope["partial_rotary_factor"],
            "num_attention_heads": mixer.heads,
            "attention_bias": mixer.bias is True,
            "attention_dropout": mixer.dropout,
            "hidden_dropout": design.residual.dropout,
            "layer_norm_eps": design_parts.norm_eps(design),
            "use_parallel_residual": isinstance(design.residual, ParallelConfig),
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """The tensor names for parallel and for pre-norm residuals."""
    weights.add_module("gpt_neox.embed_in", "embed")
    weights.add_module("gpt_neox.final_layer_norm", "final_norm.norm")
    weights.add_module("embed_out", "head")
    heads = design_parts.first_attention(design).heads
    for index in range(design.depth):
        hf, heddle = f"gpt_neox.layers.{index}", f"layers.{index}"
        _common.map_pre_norms(weights, hf, heddle)
        _gpt.map_megatron_layer(weights, hf, heddle, "attention", heads)


FAMILY = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    read_config,
    write_config,
    map_weights,
    ignored_tensors=("*.attention.bias", "*.attention.masked_bias"),  # buffers that older files hold
)
