"""LFM2 and LFM2.5 (Liquid AI 2025): gated short convolutions, and attention with normed heads in some of the layers.

With `block_auto_adjust_ff_dim`, the width of the feed-forward is two thirds of `intermediate_size`, rounded up; an
export writes the width itself.
"""

from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _layer_types
from heddle.exchange.family import DEPTHWISE_CONV, Family, WeightMap
from heddle.exchange.rope import FULL, read_rope
from heddle.model.config import ModelConfig
from heddle.parts.mixers.short_conv import ShortConvConfig

CONV = "conv"
DEFAULT_THETA = 1e6
# Of the first weights, or never read by transformers.
UNUSED_FIELDS = """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init model_name num_heads use_pos_enc""".split()  # noqa: SIM905
FEEDFORWARD = {"w1": "gate", "w3": "up", "w2": "down"}


def read_config(config: ConfigReader) -> dict[str, Any]:
    """`layer_types`, or in older files `full_attn_idxs`, says which layers have attention."""
    return read_decoder(config, [{"kind": "gated", "hidden": _read_hidden(config)}] * _layer_types.read_depth(config))


def read_decoder(config: ConfigReader, feedforwards: list[dict[str, Any]]) -> dict[str, Any]:
    """The design with these feed-forwards, one for each layer."""
    eps = config.get("norm_eps", 1e-5)
    bias = config.get("conv_bias", False)
    kernel = config.get("conv_L_cache", 3)
    mixers = {
        FULL: _read_attention(config),
        CONV: {"kind": "short_conv", "conv_kernel": kernel, "conv_bias": bias, "bias": bias},
    }
    config.note(*UNUSED_FIELDS)
    layers = [
        {"mixer": mixers[kind], "feedforward": feedforward}
        for kind, feedforward in zip(_read_types(config), feedforwards, strict=True)
    ]
    head = {"tied": config.get("tie_word_embeddings", True, "tie_embedding")}
    norm = {"kind": "rms", "eps": eps}
    return _common.design_fields(config, norm, _layer_types.merge_repeats(layers), head=head)


def _read_attention(config: ConfigReader) -> dict[str, Any]:
    heads = _common.read_heads(config, config.require("hidden_size", int))
    return {
        "kind": "attention",
        **heads,
        "qk_norm": "head",
        "position": read_rope(config, heads["head_dim"], DEFAULT_THETA),
    }


def _read_hidden(config: ConfigReader) -> int:
    """The width of the feed-forward."""
    hidden = config.require("intermediate_size", int, "block_ff_dim")
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), config.get("block_multiple_of", 256)
    if not config.get("block_auto_adjust_ff_dim", True):
        return hidden
    if multiple < 1:
        raise config.invalid("block_multiple_of", "should be at least 1")
    return -int(factor * int(2 * hidden / 3)) // multiple * -multiple


def _read_types(config: ConfigReader) -> list[str]:
    depth = _layer_types.read_depth(config)
    full = config.get("full_attn_idxs", list(range(depth)))
    usual = [FULL if index in full else CONV for index in range(depth)]
    return _layer_types.read_kinds(config, "layer_types", usual, (FULL, CONV))


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads."""
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    conv = next((mixer for mixer in mixers if isinstance(mixer, ShortConvConfig)), ShortConvConfig())
    attention = _common.write_attention(design)
    del attention["attention_dropout"]  # it has none
    return (
        _common.write_common(design)
        | attention
        | {
            "intermediate_size": design_parts.first_gated(design).hidden,
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": conv.conv_kernel,
            "conv_bias": conv.conv_bias,
            "layer_types": [CONV if isinstance(mixer, ShortConvConfig) else FULL for mixer in mixers],
            "norm_eps": design_parts.norm_eps(design),
        }
    )


def map_gated(weights: WeightMap, hf: str, heddle: str) -> None:
    """The three projections of a feed-forward."""
    for name, role in FEEDFORWARD.items():
        weights.add_module(f"{hf}.{name}", f"{heddle}.{role}")


def map_weights(
    design: ModelConfig,
    weights: WeightMap,
    out: str = "out_proj",
    norms: tuple[str, str] = ("q_layernorm", "k_layernorm"),
    map_feedforward: _common.MapModule = map_gated,
) -> None:
    """Its own names; k, v and q of a convolution are its B, x and C, and one tensor; out, norms: of attention."""
    _common.map_embedding_and_head(design, weights, norm="model.embedding_norm")
    for index, layer in enumerate(design_parts.layers(design)):
        hf, mixer = f"model.layers.{index}", f"layers.{index}.mixer"
        if isinstance(layer.mixer, ShortConvConfig):
            weights.add_module(f"{hf}.conv.in_proj", f"{mixer}.k", f"{mixer}.q", f"{mixer}.v")
            weights.add_tensor(f"{hf}.conv.conv.weight", f"{mixer}.convolution.weight", transform=DEPTHWISE_CONV)
            weights.add_tensor(f"{hf}.conv.conv.bias", f"{mixer}.convolution.bias")
            weights.add_module(f"{hf}.conv.out_proj", f"{mixer}.out")
        else:
            _common.map_attention(weights, hf, f"layers.{index}", out, norms)
        map_feedforward(weights, f"{hf}.feed_forward", f"layers.{index}.feedforward")
        weights.add_module(f"{hf}.operator_norm", f"layers.{index}.residual.norms.mixer")
        weights.add_module(f"{hf}.ffn_norm", f"layers.{index}.residual.norms.feedforward")


FAMILY = Family("lfm2", "Lfm2ForCausalLM", read_config, write_config, map_weights)
