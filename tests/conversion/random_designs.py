"""Exact rewrites on random designs: each converts exactly, or is refused in one sentence that names the field.

A rewrite joins with one line in `EXACT`.
"""

import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from heddle.conversion.rewrite import Rewrite, rewrites
from heddle.conversion.rewrites.dense import Dense
from heddle.conversion.rewrites.depth import Depth
from heddle.conversion.rewrites.experts import Experts
from heddle.conversion.rewrites.fold_norms import FoldNorms
from heddle.conversion.rewrites.kv_heads import KVHeads
from heddle.conversion.rewrites.layerwise import Layerwise
from heddle.conversion.rewrites.rope_layout import RopeLayout
from heddle.conversion.rewrites.sparse_index import SparseIndex
from heddle.conversion.rewrites.tied import Tied
from heddle.conversion.rewrites.vocab_size import VocabSize
from heddle.conversion.rewrites.width import StreamWidth
from heddle.conversion.rewrites.window import Window
from heddle.conversion.weights import ModelWeights, Weights, build_model
from heddle.errors import ConfigError
from heddle.laws.harness import model_under_test, random_tokens
from heddle.model.config import ModelConfig
from heddle.parts.mixers.attention import AttentionConfig
from tests.conversion.exactness import greedy_text, logits
from tests.schema_designs import NARROW, WIDE, Draw

SENTENCE = re.compile(r"[a-z][\w.*\[\]]*: [^\n]{10,400}")
TOLERANCE = 1e-10
NEW_TOKENS = 4

Rewrites = Callable[[ModelConfig], list[Rewrite]]


def untied(config: ModelConfig) -> list[Rewrite]:
    """What unties the head, if it is tied."""
    return [Tied(tied=False)] if config.head.tied else []


def other_layout(config: ModelConfig) -> list[Rewrite]:
    """RoPE in the layout that the design has not."""
    return [RopeLayout(layout="half" if "interleaved" in repr(config) else "interleaved")]


def repeated(config: ModelConfig) -> list[Rewrite]:
    """A key/value head for each query head, by repeating."""
    mixers = (layer.mixer for layer in config.layers)
    heads = [mixer.heads for mixer in mixers if isinstance(mixer, AttentionConfig)]
    return [KVHeads(kv_heads=max(heads))] if heads else []


# These are about softmax attention alone, which few random designs have.
ATTENTION: dict[str, Rewrites] = {
    "rope_layout": other_layout,
    "kv_heads": repeated,
    "latent_attention": lambda config: [rewrites()["latent_attention"]()],
    "sparse_index": lambda config: [SparseIndex(top_k=8, block=8, longest_text=64)],
}
EXACT: dict[str, Rewrites] = ATTENTION | {
    "tied": lambda config: [*untied(config), *([Tied(tied=True)] if config.head.tied else [])],
    "untied": untied,
    "fold_norms": lambda config: [*untied(config), FoldNorms()],
    "experts": lambda config: [Experts(experts=3, top_k=2)],
    "dense": lambda config: [Experts(experts=3, top_k=1), Dense()],
    "depth": lambda config: [Depth(depth=config.depth + 2)],
    "depth at the end": lambda config: [Depth(depth=config.depth + 1, at="end")],
    "width": lambda config: [StreamWidth(width=config.width + 20)],
    "vocab_size": lambda config: [VocabSize(vocab_size=64)],
    "window": lambda config: [Window(window=64, longest_text=64)],
    "layerwise": lambda config: [Layerwise(choices=("layers.0.experts=3,top_k=2",))],
}


@cache
def random_design(number: int, attention: bool = False) -> ModelConfig:
    """A random design; every second one has wider heads. attention: all of its mixers are softmax attention."""
    generator = random.Random(f"conversion {number}")
    draw = Draw(generator, WIDE if attention or number % 2 else NARROW)
    config = draw.design()
    while attention:
        mixer = {"kind": "attention", **draw.instance({"$ref": "#/$defs/mixers.attention"}, "mixer", 0)}
        without_value_embeddings(mixer)
        if generator.random() < 0.7:
            mixer["position"] = draw.instance({"$ref": "#/$defs/positions.rope"}, "position", 0)
        layer = {"repeat": 2, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 20}}
        if accepted := draw.accepted({**config.dump(), "encoder": None, "layers": [layer]}):
            return accepted
    without = draw.accepted(plain(config.dump())) if number % 3 else None
    return without or config


def plain(data: dict[str, Any]) -> dict[str, Any]:
    """A design without what most rewrites refuse: weights and embeddings shared by layers, inputs of tokens' ids."""
    data["multi_token"] = None
    data["embedding"]["per_layer"] = None

    def change(layer: dict[str, Any]) -> None:
        for inner in layer.get("layers") or ():
            change(inner)
        layer.pop("shared", None)
        layer.pop("adapter_rank", None)
        without_value_embeddings(layer.get("mixer") or {})
        feedforward = layer.get("feedforward") or {}
        if feedforward.get("kind") == "ngram_memory" or feedforward.get("selection", "scores") != "scores":
            layer["feedforward"] = {"kind": "gated", "hidden": 20}

    for layer in data["layers"]:
        change(layer)
    return data


def without_value_embeddings(mixer: dict[str, Any]) -> None:
    """Leave them out, also within pairs."""
    mixer.pop("value_embedding", None)
    for name in ("first", "second"):
        without_value_embeddings(mixer.get(name, {}))


def convert_exactly(config: ModelConfig, rewrites: list[Rewrite]) -> bool:
    """Compare logits and greedy text of a design before and after. False: the conversion was refused.

    Raises AssertionError if logits differ, if greedy text differs, or if a refusal is not one sentence.
    """
    model = model_under_test(config)
    weights: Weights = ModelWeights(model)
    try:
        for rewrite in rewrites:
            rewrite.check_layers(weights.design)
            assert rewrite.is_exact(weights.design)
            weights = rewrite.apply(weights, None)
    except ConfigError as error:
        if SENTENCE.fullmatch(str(error)) is None:
            raise AssertionError(f"not one sentence that names a field: {error}") from error
        return False
    converted, tokens = build_model(weights), random_tokens(config, 2, 9)
    before, after = logits(model, tokens), logits(converted, tokens)[..., : config.vocab_size]
    assert after.dtype == before.dtype == torch.float64
    difference = float((before - after).abs().max()) / max(1.0, float(before.abs().max()))
    assert difference < TOLERANCE, f"logits differ by {difference:.1e}"
    if model.causal:
        written = [greedy_text(each, tokens, NEW_TOKENS) for each in (model, converted)]
        assert torch.equal(*written), "greedy text differs"
    return True
