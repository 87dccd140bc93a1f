"""GPT-2 (Radford et al. 2019): pre-norm, learned positions, biases everywhere; matrices are kept [inputs, outputs]."""

import math
from typing import Any

from heddle.exchange import views
from heddle.exchange.families import _blocks, _gpt
from heddle.exchange.family import Family
from heddle.exchange.fields import Fields
from heddle.exchange.rules import TRANSPOSED, Rules
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from heddle.parts.positions.learned import LearnedConfig


def read(fields: Fields) -> dict[str, Any]:
    """Every layer alike, but for the scale where that is asked to fall with depth."""
    fields.find("reorder_and_upcast_attn")  # scores in float32, which heddle's always are
    mixer = _gpt.read_attention(fields, 0.1) | {"bias": True}
    depth = _gpt.read_depth(fields)
    scaled, falling = fields.take("scale_attn_weights", True), fields.take("scale_attn_by_inverse_layer_idx", False)
    scale = (fields.count("n_embd", "hidden_size") // mixer["heads"] or 1) ** -0.5 if scaled else 1.0
    scales = [scale / index for index in range(1, depth + 1)] if falling else [scale]
    forward = {"feedforward": _gpt.read_mlp(fields), "repeat": depth // len(scales)}
    length = fields.need("n_positions", int, "max_position_embeddings")
    return _gpt.frame(
        fields,
        [forward | {"mixer": mixer | {"scale": scale}} for scale in scales],
        0.1,
        residual={"kind": "pre_norm"},
        embedding={"position": {"kind": "learned", "length": length}},
        head={"tied": fields.take("tie_word_embeddings", True)},
    )


def write(design: ModelConfig) -> dict[str, Any]:
    """As read; of scales only one, and whether it falls with depth."""
    position = design.embedding.position
    mixers = [layer.mixer for layer in views.layers(design)]
    scales = [one.scale or 1.0 for one in mixers if isinstance(one, AttentionConfig)] or [1.0]
    return _gpt.write(design) | {
        "n_positions": position.length if isinstance(position, LearnedConfig) else _blocks.LONGEST,
        "scale_attn_weights": not math.isclose(scales[0], 1.0),
        "scale_attn_by_inverse_layer_idx": len(scales) > 1 and math.isclose(scales[1], scales[0] / 2),
    }


def rules(design: ModelConfig, to: Rules) -> None:
    """Queries, keys and values are one matrix, one after the other."""
    _gpt.ends(to)
    to.module("transformer.wpe", "embed.position")
    for index in range(design.depth):
        theirs, ours = f"transformer.h.{index}", f"layers.{index}"
        to.module(f"{theirs}.ln_1", f"{ours}.residual.norms.mixer")
        to.module(f"{theirs}.ln_2", f"{ours}.residual.norms.feedforward")
        to.module(f"{theirs}.attn.c_attn", *(f"{ours}.mixer.{role}" for role in "qkv"), form=TRANSPOSED)
        to.module(f"{theirs}.attn.c_proj", f"{ours}.mixer.out", form=TRANSPOSED)
        _gpt.mlp(to, f"{theirs}.mlp.c_fc", f"{theirs}.mlp.c_proj", f"{ours}.feedforward", TRANSPOSED)


FAMILY = Family(
    "gpt2",
    "GPT2LMHeadModel",
    read,
    write,
    rules,
    left_out=_gpt.MASKS,
    prefix="transformer.",
)
