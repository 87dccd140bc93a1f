"""Full attention to windows: exact where every text fits, and the layers that matter least are chosen."""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from heddle.conversion.rewrites.window import Window
from heddle.conversion.sensitivity import hidden_attention
from heddle.conversion.targets import parse_rewrite
from heddle.conversion.weights import CalibrationText, ModelWeights, layer_activations
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig
from heddle.model.decoder import Decoder
from heddle.parts.layout import Layout
from tests.conversion.exactness import (
    converted_model,
    design,
    difference,
    greedy_text,
    random_text,
    source_model,
)
from tests.conversion.muted import muted_model, sampled_text

ROPE = {"kind": "rope"}
GQA = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": ROPE}
MIXERS: dict[str, dict[str, Any]] = {
    "gqa-sink-gate": GQA | {"sink": True, "gate": "head", "qk_norm": "head"},
    "alibi": {"kind": "attention", "heads": 4, "position": {"kind": "alibi"}},
    "differential": {"kind": "differential_attention", "heads": 2, "position": ROPE},
    "pair": {"kind": "pair", "first": GQA, "second": {"kind": "gated_delta", "heads": 2}},
}


def windows(*rewrites: Window, mixer: dict[str, Any] | None = None, text: CalibrationText | None = None) -> list[Any]:
    """The windows of a design of three layers after some rewrites."""
    config = converted_model(source_model(design(mixer or GQA, depth=3)), *rewrites, text=text).config
    return [mixer_windows(layer) for layer in config.layers]


def mixer_windows(layer: LayerConfig) -> tuple[int, ...]:
    assert layer.mixer is not None
    return layer.mixer.windows


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_window_that_holds_every_text_changes_nothing(mixer: dict[str, Any]) -> None:
    source, rewrite = source_model(design(mixer)), Window(window=32, longest_text=32)
    converted = converted_model(source, rewrite)
    assert rewrite.is_exact(source.config)
    assert all(mixer_windows(layer) == (32,) for layer in converted.config.layers)
    assert difference(source, converted) < 1e-10
    prompt = random_text().batches[0]  # 17 tokens, and 12 more
    assert torch.equal(greedy_text(source, prompt), greedy_text(converted, prompt))
    assert difference(source, converted_model(source, Window(window=4))) > 1e-4


def test_it_is_exact_only_where_texts_are_known_to_fit() -> None:
    config = design(GQA)
    assert not Window(window=32).is_exact(config)
    assert not Window(window=32, longest_text=33).is_exact(config)


def test_smaller_windows_stay_and_only_the_reached_layers_change() -> None:
    assert windows(Window(window=8)) == [(8,)] * 3
    assert windows(Window(window=8, layers=(1,)), Window(window=12)) == [(12,), (8,), (12,)]
    rewrite = parse_rewrite("layers.1.mixer.window=4")
    assert isinstance(rewrite, Window)
    assert windows(rewrite) == [(), (4,), ()]


def loop_attention_beyond(model: Decoder, x: Tensor, layout: Layout, window: int) -> float:
    """The first layer's weight beyond a window, by a plain loop: attention without positions, 4 heads of 4 on 2."""
    weight = {name: parameter.detach() for name, parameter in model.layers[0].named_parameters()}
    q, k = x @ weight["mixer.q.weight"].T, x @ weight["mixer.k.weight"].T
    beyond, count, ids = 0.0, 0, layout.dense_segment_ids
    for row, head, t in product(range(len(x)), range(4), range(x.shape[1])):
        if layout.positions[row, t] < 0:
            continue
        seen = [s for s in range(t + 1) if ids[row, s] == ids[row, t] and layout.positions[row, s] >= 0]
        query, group = q[row, t, 4 * head : 4 * head + 4], head // 2
        scores = [math.exp(float(query @ k[row, s, 4 * group : 4 * group + 4]) / 2) for s in seen]
        beyond += sum(score for s, score in zip(seen, scores, strict=True) if t - s >= window) / sum(scores)
        count += 1
    return beyond / count


def test_attention_beyond_a_window_is_that_of_a_plain_loop() -> None:
    source = source_model(design({"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 4}, depth=1))
    tokens, layout = random_text(rows=2, length=12).batches[0], Layout.packed([[5, 7], [10]], 12)
    activations = next(iter(layer_activations(ModelWeights(source), CalibrationText([tokens], [layout]))))
    for window in (1, 3, 6):
        expected = loop_attention_beyond(source, activations.mixer_inputs[0], layout, window)
        assert hidden_attention(activations, window) == pytest.approx(expected, abs=1e-12)
    assert hidden_attention(activations, 12) == 0.0


def test_a_window_that_is_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_model(design({"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 4}, depth=1))
    activations = next(iter(layer_activations(ModelWeights(source), random_text(rows=2, length=12))))
    expected = loop_attention_beyond(source, activations.mixer_inputs[0], activations.layouts[0], 3)
    mask_of = Layout.attention_mask
    monkeypatch.setattr(Layout, "attention_mask", lambda layout, window, causal: mask_of(layout, window and 4, causal))
    assert abs(hidden_attention(activations, 3) - expected) > 1e-3


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_layer_that_matters_least_gets_the_window(index: int) -> None:
    model = muted_model(design(GQA, depth=3), [index])
    converted = converted_model(model, Window(window=2, keep="2/3"), text=sampled_text(model))
    assert [mixer_windows(layer) for layer in converted.config.layers] == [(2,) if i == index else () for i in range(3)]


def test_the_layer_that_attends_least_beyond_the_window_gets_it() -> None:
    model = source_model(design({"kind": "attention", "heads": 4, "position": {"kind": "alibi"}}, depth=3))
    with torch.no_grad():
        for name in ("q", "k"):
            model.get_parameter(f"layers.1.mixer.{name}.weight").mul_(30.0)  # attends to few tokens, near or far
            for index in (0, 2):
                model.get_parameter(f"layers.{index}.mixer.{name}.weight").zero_()  # ALiBi alone: near tokens
    text = random_text(rows=2, length=24)
    converted = converted_model(model, Window(window=6, keep=1, by="attention"), text=text)
    assert [mixer_windows(layer) for layer in converted.config.layers] == [(6,), (), (6,)]


@pytest.mark.parametrize(
    ("rewrite", "reason"),
    [
        (Window(window=8, keep="1/4"), "keep: 1/4"),
        (Window(window=8, keep=3), "keep: 3"),
        (Window(window=8, keep=0), r"keep.*1 to 2"),
        (Window(window=8, keep="half"), "keep: 'half'"),
        (Window(window=8, keep=1, layers=(0,)), "keep: 1"),
        (Window(window=8, layers=(3,)), r"layers.3:"),
    ],
    ids=["share", "all", "none", "word", "single", "no-such-layer"],
)
def test_impossible_choices_are_refused(rewrite: Window, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        windows(rewrite, text=random_text())


@pytest.mark.parametrize(
    "mixer", [GQA | {"window": 8}, {"kind": "latent_attention", "heads": 2, "kv_rank": 8, "nope_dim": 6}]
)
def test_a_window_that_changes_nothing_is_refused(mixer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="window:"):
        windows(Window(window=8), mixer=mixer)
