"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases everywhere; matrices stored [inputs, outputs]."""

import math
from typing import Any

from heddle.exchange import design_parts
from heddle.exchange.config_reader import ConfigReader
from heddle.exchange.families import _common, _gpt
from heddle.exchange.family import TRANSPOSED, Family, WeightMap
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.learned import LearnedConfig


def read_config(config: ConfigReader) -> dict[str, Any]:
    """All layers are the same, except for the score scale if `scale_attn_by_inverse_layer_idx` is set."""
    config.optional("reorder_and_upcast_attn")  # scores in float32, as heddle always computes them
    mixer = _gpt.read_attention(config, 0.1) | {"bias": True}
    depth = _gpt.read_depth(config)
    scaled, by_depth = config.get("scale_attn_weights", True), config.get("scale_attn_by_inverse_layer_idx", False)
    scale = (config.require_count("n_embd", "hidden_size") // mixer["heads"] or 1) ** -0.5 if scaled else 1.0
    scales = [scale / index for index in range(1, depth + 1)] if by_depth else [scale]
    forward = {"feedforward": _gpt.read_mlp(config), "repeat": depth // len(scales)}
    length = config.require("n_positions", int, "max_position_embeddings")
    return _gpt.design_fields(
        config,
        [forward | {"mixer": mixer | {"scale": scale}} for scale in scales],
        0.1,
        residual={"kind": "pre_norm"},
        embedding={"position": {"kind": "learned", "length": length}},
        head={"tied": config.get("tie_word_embeddings", True)},
    )


def write_config(design: ModelConfig) -> dict[str, Any]:
    """The fields that `read_config` reads. Only the two known kinds of score scale can be written."""
    position = design.embedding.position
    mixers = [layer.mixer for layer in design_parts.layers(design)]
    scales = [mixer.scale or 1.0 for mixer in mixers if isinstance(mixer, AttentionConfig)] or [1.0]
    return _gpt.write_common(design) | {
        "n_positions": position.length if isinstance(position, LearnedConfig) else _common.DEFAULT_MAX_POSITIONS,
        "scale_attn_weights": not math.isclose(scales[0], 1.0),
        "scale_attn_by_inverse_layer_idx": len(scales) > 1 and math.isclose(scales[1], scales[0] / 2),
    }


def map_weights(design: ModelConfig, weights: WeightMap) -> None:
    """Queries, keys and values are one concatenated matrix."""
    _gpt.map_embedding_and_head(weights)
    weights.add_module("transformer.wpe", "embed.position")
    for index in range(design.depth):
        hf, heddle = f"transformer.h.{index}", f"layers.{index}"
        weights.add_module(f"{hf}.ln_1", f"{heddle}.residual.norms.mixer")
        weights.add_module(f"{hf}.ln_2", f"{heddle}.residual.norms.feedforward")
        weights.add_module(f"{hf}.attn.c_attn", *(f"{heddle}.mixer.{role}" for role in "qkv"), transform=TRANSPOSED)
        weights.add_module(f"{hf}.attn.c_proj", f"{heddle}.mixer.out", transform=TRANSPOSED)
        _gpt.map_mlp(weights, f"{hf}.mlp.c_fc", f"{hf}.mlp.c_proj", f"{heddle}.feedforward", TRANSPOSED)


FAMILY = Family("gpt2", "GPT2LMHeadModel", read_config, write_config, map_weights, ignored_tensors=_gpt.MASK_BUFFERS)
