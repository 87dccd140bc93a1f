"""DiffLlama: Llama's decoder with differential attention (Ye et al. 2024), whose head norms have no weights.

Its attention counts two heads of queries, keys and values for one of heddle's: the first half of them all, then the
second. Attention dropout is refused, as its class does.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common
from heddle.exchange.family import Family, TensorTransform, WeightMap
from heddle.exchange.rope import read_rope, write_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.differential_attention import DifferentialAttentionConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same. Raises ConfigError for an odd number of heads."""
    heads, eps = _common.read_heads(config, config.require("hidden_size", int)), config.get("rms_norm_eps", 1e-5)
    for name, role in (("num_attention_heads", "heads"), ("num_key_value_heads", "kv_heads")):
        if heads[role] % 2:
            raise config.invalid(name, "should be even, since every head has two maps")
    config.expect("attention_dropout", 0.0, None)
    config.optional("lambda_std_dev")  # of the first weights
    mixer = {
        "kind": "differential_attention",
        "heads": heads["heads"] // 2,
        "kv_heads": heads["kv_heads"] // 2,
        "head_dim": heads["head_dim"],
        "bias": config.get("attention_bias", False),
        "norm": {"kind": "rms", "eps": eps, "weight": False},
        "position": read_rope(config, heads["head_dim"]),
    }
    depth, feedforward = config.require("num_hidden_layers", int), _common.read_gated(config)
    layer = {"repeat": depth, "mixer": mixer, "feedforward": feedforward}
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, [layer])


def first_mixer(design: ModelConfig) -> DifferentialAttentionConfig:
    """The first differential attention, or a default one."""
    default = DifferentialAttentionConfig(heads=1, kv_heads=1, head_dim=design.width)
    return next((mixer for mixer in design_parts.mixers(design) if isinstance(mixer, type(default))), default)


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixer = first_mixer(design)
    head_dim = mixer.head_dim or design.width
    return (
        _common.write_common(design)
        | _common.write_gated(design)
        | write_rope(design_parts.rope_of(mixer), head_dim, _common.DEFAULT_MAX_POSITIONS)
        | {
            "num_attention_heads": 2 * mixer.heads,
            "num_key_value_heads": 2 * (mixer.kv_heads or mixer.heads),
            "head_dim": head_dim,
            "attention_bias": mixer.bias,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def halves(heads: int) -> TensorTransform:
    """Rows of both parts of each head <-> the first parts of all heads, then the second ones."""
    return TensorTransform(
        lambda parameters: parameters[0].unflatten(0, (heads, 2, -1)).transpose(0, 1).flatten(0, 2),
        lambda tensor, shapes: [tensor.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2)],
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's tensor names, with the heads of projections in another order, and the vectors of λ."""
    mixer = first_mixer(design)
    _common.map_weights(design, weights)
    for index in range(design.depth):
        hf, heddle = f"model.layers.{index}.self_attn", f"layers.{index}.mixer"
        for role, heads in (("q", mixer.heads), ("k", mixer.kv_heads or 1), ("v", mixer.kv_heads or 1)):
            weights.add_module(f"{hf}.{role}_proj", f"{heddle}.{role}", transform=halves(heads))
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            weights.add_tensor(f"{hf}.{name}", f"{heddle}.{name}")


FAMILY = Family("diffllama", "DiffLlamaForCausalLM", read_config, write_config, map_weights)
