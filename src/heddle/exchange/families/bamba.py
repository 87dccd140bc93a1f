"""Bamba (IBM, Princeton, CMU & UIUC 2024): Mamba-2 in most layers, attention with half-rotated heads in the others."""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types, _mamba, granitemoehybrid
from heddle.exchange.family import Family, WeightMap
from heddle.exchange.rope import read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.mamba2 import Mamba2Config

ROTARY_FACTOR = 0.5  # in the table of RoPE another may stand; transformers overwrites the one beside it

# Of kernels, of generation, of training, and of files of the first version.
UNUSED_FIELDS = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`attn_layer_indices` are the layers with attention."""
    config.expect("hidden_act", "silu", default="silu")  # the convolution uses it, too
    config.expect("partial_rotary_factor", ROTARY_FACTOR, None)
    for name in UNUSED_FIELDS:
        config.optional(name)
    eps, heads = config.get("rms_norm_eps", 1e-5), _common.read_heads(config, config.require("hidden_size", int))
    attention = {
        "kind": "attention",
        **heads,
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
        "position": read_rope(config, heads["head_dim"], partial_rotary_factor=ROTARY_FACTOR),
    }
    mamba = granitemoehybrid.read_mamba(config, eps)
    depth, indices = _layer_types.read_depth(config), config.get("attn_layer_indices", list[int]())
    feedforward = _common.read_gated(config, bias=config.get("mlp_bias", False))
    layers = [{"mixer": attention if index in indices else mamba, "feedforward": feedforward} for index in range(depth)]
    return _common.design_fields(config, {"kind": "rms", "eps": eps}, _layer_types.merge_repeats(layers))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mamba = [isinstance(layer.mixer, Mamba2Config) for layer in design_parts.layers(design)]
    attention = _common.write_attention(design, partial_rotary_factor=ROTARY_FACTOR)
    del attention["partial_rotary_factor"]
    return (
        _common.write_common(design)
        | attention
        | _common.write_gated(design)
        | _mamba.write_mixer(design, _mamba.PREFIXED_NAMES)
        | {
            "attn_layer_indices": [index for index, is_mamba in enumerate(mamba) if not is_mamba],
            "attention_bias": design_parts.first_attention(design).bias is True,
            "mlp_bias": design_parts.first_gated(design).bias,
            "rms_norm_eps": design_parts.norm_eps(design),
        }
    )


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Llama's names of attention; its own of the norms, the feed-forward and Mamba-2."""
    _common.map_embedding_and_head(design, weights, norm="model.final_layernorm")
    for index, layer in enumerate(design_parts.layers(design)):
        hf, heddle = f"model.layers.{index}", f"layers.{index}"
        if isinstance(layer.mixer, Mamba2Config):
            _mamba.map_mixer(weights, f"{hf}.mamba", f"{heddle}.mixer")
        else:
            _common.map_attention(weights, hf, heddle)
        map_feedforward(weights, hf, heddle)


def map_feedforward(weights: WeightMap, hf: str, heddle: str) -> None:
    """The feed-forward of a layer, and the norms before its two branches, as in Falcon-H1."""
    _common.map_gated(weights, f"{hf}.feed_forward", f"{heddle}.feedforward")
    weights.add_module(f"{hf}.input_layernorm", f"{heddle}.residual.norms.mixer")
    weights.add_module(f"{hf}.pre_ff_layernorm", f"{heddle}.residual.norms.feedforward")


FAMILY = Family("bamba", "BambaForCausalLM", read_config, write_config, map_weights)
