"""The page of `heddle inspect`: the weights of the model, rounded as it says, and one file that loads nothing."""

import base64
import json
import re
import zlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import heddle
from heddle.config import parse_config
from heddle.errors import ConfigError
from heddle.lab import inspect as collect_module
from heddle.lab.inspect import InspectedModel, inspect_layers, inspect_page, summarize_weights, visible_token
from heddle.lab.pages.render import static
from heddle.laws.harness import model_under_test
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.numerics.attention.observer import Observation
from tests.cases import attention, design, layer
from tests.html_page import Page

ATTACK = '</script><script>alert("1")</script>'
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5]
WORDS = ["start", " a", "\n", "  ", "<b>", "", "é", ATTACK, "\t"]


def model_of(*layers: Any, **fields: Any) -> Decoder:
    return model_under_test(parse_config(ModelConfig, design(*layers, **fields)))


def mixed() -> Decoder:
    return model_of(
        layer(attention(heads=4, kv_heads=2, window=3)), layer(None), layer(attention(heads=6, kv_heads=1, sink=True))
    )


def page_of(model: Decoder) -> str:
    return inspect_page(InspectedModel("loom", 12345, WORDS), inspect_layers(model, TOKENS))


def weights_in(text: str) -> list[Tensor | None]:
    """The weights [H, T, S] of each layer as the script reads them."""
    weights: list[Tensor | None] = []
    for layer_data in json.loads(Page(text).scripts[0])["layers"]:
        if "codes" not in layer_data:
            weights.append(None)
            continue
        codes = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(layer_data["codes"]))), dtype=torch.uint8)
        weights.append((codes.double() / 255).square().view(layer_data["heads"], len(WORDS), layer_data["keys"]))
    return weights


def test_the_page_holds_the_weights_of_the_model() -> None:
    model = mixed()
    expected = heddle.attention_weights(model, torch.tensor([TOKENS]))
    drawn = weights_in(page_of(model))
    assert [layer is None for layer in drawn] == [layer is None for layer in expected] == [False, True, False]
    for actual, exact in zip(drawn, expected, strict=True):
        if actual is not None and exact is not None:
            assert float((actual - exact[0]).abs().max()) <= 0.004


def test_the_averages_equal_those_of_plain_loops() -> None:
    generator = torch.Generator().manual_seed(2)
    weights = torch.rand(1, 2, 5, 5, generator=generator).tril() * 0.2
    layer_weights = summarize_weights(Observation(weights, 1))
    distance, on_itself, on_first, total = 0.0, 0.0, 0.0, 0.0
    for h in range(2):
        for i in range(1, 5):
            for j in range(5):
                weight = weights[0, h, i, j].item()
                total += weight
                distance += weight * abs(i - j)
                on_itself += weight * (i == j)
                on_first += weight * (j == 0)
    assert layer_weights.mean_distance == pytest.approx(distance / total)
    assert layer_weights.self_share == pytest.approx(on_itself / total)
    assert layer_weights.first_token_share == pytest.approx(on_first / total)
    assert layer_weights.sink_share == pytest.approx(1 - total / 8)
    encoder = summarize_weights(Observation(weights[..., :3], 1))
    assert (encoder.keys, encoder.mean_distance, encoder.self_share) == (3, None, None)


def test_the_page_loads_nothing_and_words_stay_words() -> None:
    text = page_of(mixed())
    parsed = Page(text)
    assert parsed.loads == []
    assert len(parsed.scripts) == 2
    assert "<" not in parsed.scripts[0]
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", text)
    assert "default-src 'none'" in text
    assert len(parsed.ids) == len(set(parsed.ids))
    assert ATTACK in parsed.text()
    assert ATTACK not in text


def test_everything_but_the_maps_is_readable_without_scripts() -> None:
    words = Page(page_of(mixed())).text()
    for piece in (
        "10 heads of loom",
        "12.3 k parameters",
        "9 tokens",
        "3 tokens, itself included",
        "every earlier token",
    ):
        assert piece in words
    for piece in ("window=3", "sink", "state at 8k", "no token", "The maps need JavaScript", "Terms"):
        assert piece in words
    state = heddle.build(mixed().config, dtype=torch.float64).init_state(1, 9).layer_bytes
    assert f"{state[0]} B" in words
    bidirectional = Page(page_of(model_of(layer(attention(causal=False, window=2))))).text()
    assert "2 tokens to each side" in bidirectional


def test_the_same_input_gives_the_same_bytes() -> None:
    assert page_of(mixed()) == page_of(mixed())


def test_tokens_that_would_not_show_get_a_sign() -> None:
    assert [visible_token(word) for word in ("\n", "  ", "", "\t", " a ")] == ["⏎", "··", "∅", "⇥", " a "]


def test_the_script_names_only_what_the_page_has() -> None:
    text = page_of(mixed())
    ids = set(Page(text).ids)
    assert set(re.findall(r'\$\("([\w-]+)"\)', static("inspect.js"))) <= ids
    colours = set(re.findall(r"var\(--([\w-]+)\)", static("inspect.css"))) - {"heads", "columns"}
    light, dark = static("base.css").split("prefers-color-scheme: dark")
    own_light, own_dark = static("inspect.css").split("prefers-color-scheme: dark")
    for name in colours | {"heat-0", "heat-1", "heat-2", "heat-3", "heat-4", "unseen"}:
        assert f"--{name}: " in light + own_light
        assert f"--{name}: " in dark + own_dark


def luminance(colour: str) -> float:
    """Relative luminance (WCAG) of #rrggbb."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_colours_are_in_order_for_every_eye() -> None:
    for part, sign in zip(static("inspect.css").split("prefers-color-scheme: dark"), (-1, 1), strict=True):
        ramp = [luminance(re.findall(rf"--heat-{number}: (#\w+)", part)[0]) * sign for number in range(5)]
        assert ramp == sorted(ramp)
        assert min(abs(b - a) for a, b in pairwise(ramp)) > 0.02


def test_what_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="attention weights"):
        inspect_layers(model_of(layer(None)), TOKENS)
    monkeypatch.setattr(collect_module, "MAX_WEIGHTS", 10 * 8 * 8)
    with pytest.raises(ConfigError, match=r"9 tokens.*10 heads.*most 8"):
        inspect_layers(mixed(), TOKENS)
    assert len(inspect_layers(mixed(), TOKENS[:8])) == 3
