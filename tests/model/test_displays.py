"""What a notebook shows of a config, a size, a state and attention weights: true numbers, everything escaped."""

import base64
import re
import struct
import zlib

import torch

import heddle
from heddle.model.config import describe
from heddle.notebook import gray_image, html_table
from tests import small


def cells(html: str) -> list[str]:
    return re.findall("<td[^>]*>(.*?)</td>", html)


def gray_values(html: str) -> list[list[int]]:
    """The pixels of the first image, read by the format's own rules."""
    match = re.search('base64,([^"]*)"', html)
    assert match is not None
    data = base64.b64decode(match[1])
    position, content = 8, {}
    while position < len(data):
        size, name = struct.unpack(">I4s", data[position : position + 8])
        content[name] = data[position + 8 : position + 8 + size]
        assert struct.unpack(">I", data[position + 8 + size : position + 12 + size])[0] == zlib.crc32(
            data[position + 4 : position + 8 + size]
        )
        position += 12 + size
    width, height = struct.unpack(">II", content[b"IHDR"][:8])
    pixels = zlib.decompress(content[b"IDAT"])
    return [list(pixels[row * (width + 1) + 1 : (row + 1) * (width + 1)]) for row in range(height)]


def test_config_size_and_state() -> None:
    config = small.config()
    html = config._repr_html_()
    assert cells(html) == ["1", "attention heads=2 kv_heads=1 causal position=rope", "gated hidden=24 activation=silu"]
    assert "width 16, vocabulary 300, 1 layers" in html

    size = heddle.size(config, context_length=8)
    assert cells(size._repr_html_())[-2:] == [f"{size.parameters:,}", f"{size.state_bytes:,}"]

    model = heddle.build(config, seed=0)
    state = model.init_state(batch=2, cache_length=8)
    html = state._repr_html_()
    assert cells(html) == ["0", "KVCache", "keys [2, 1, 8, 8], values [2, 1, 8, 8]", f"{state.layer_bytes[0]:,}"]
    assert f"2 rows, {state.bytes:,} bytes<" in html
    state.consume()
    assert "bytes, consumed<" in state._repr_html_()


def test_attention_weights_are_images() -> None:
    model = heddle.build(small.config(), seed=0)
    weights = heddle.attention_weights(model, torch.arange(6)[None])
    html = weights._repr_html_()
    assert weights[0] is not None
    expected = (255 - weights[0][0, 0] * 255).round().to(torch.uint8).tolist()
    assert gray_values(html) == expected
    assert expected[0] == [0] + [255] * 5  # the first token sees itself alone
    assert html.count("<img") == 2
    assert 'alt="layer 0, head 1"' in html


def test_many_heads_and_long_texts_stay_small() -> None:
    mixer = {"kind": "attention", "heads": 16, "head_dim": 2, "position": {"kind": "rope"}}
    layers = [{"mixer": mixer}, {"feedforward": {"kind": "gated", "hidden": 8}}]
    model = heddle.build(small.config(small.design(layers=layers)), seed=0)
    html = heddle.attention_weights(model, torch.arange(200)[None])._repr_html_()
    assert html.count("<img") == 8
    assert ">8 of 16<" in html
    assert cells(html)[3:5] == ["1", "none"]
    assert len(gray_values(html)) == 96


def test_texts_are_escaped() -> None:
    assert 'alt="&lt;b&gt;"' in gray_image([b"\0"], "<b>")
    assert cells(html_table(("x",), [(True,), ("<i>",)])) == ["True", "&lt;i&gt;"]


def test_a_phrase_has_what_is_off_against_its_default() -> None:
    mixer = {"kind": "attention", "heads": 4, "causal": False, "position": {"kind": "rope", "base": 50.0}}
    config = heddle.load_config({
        "vocab_size": 50, "width": 24, "norm": {"kind": "rms", "cast": "after"}, "layers": [
            {"mixer": mixer | {"value_embedding": {"table": 0}, "short_convolution": {"of": ["q"], "conv_kernel": 2}}},
            {"mixer": mixer | {"value_embedding": {"shared": True, "table": 0}}},
        ],
    })  # fmt: skip
    layer = config.layers[0]
    assert layer.mixer is not None
    phrase = describe(layer.mixer)
    for shown in ("causal=false", "table=0", "position=(rope base=50.0)", "(q conv_kernel=2)"):
        assert shown in phrase
    assert describe(config.norm, with_defaults=False) == "rms cast=after"
    assert "bias" not in phrase
    written_out, _ = (layer.mixer for layer in config.resolved().layers)  # rotary_dim is head_dim
    assert written_out is not None
    assert "position=(rope base=50.0)" in describe(written_out)
    frequencies = heddle.load_config(
        {"vocab_size": 50, "width": 256, "layers": [
            {"mixer": {"kind": "attention", "heads": 1, "position": {"kind": "rope", "inv_freq": [0.5] * 128}}}
        ]}
    )  # fmt: skip
    assert frequencies.layers[0].mixer is not None
    assert len(describe(frequencies.layers[0].mixer)) < 150


def test_show_has_the_parts_beside_the_layers() -> None:
    shown = heddle.show(
        "preset:gqa-tiny", ["head.softcap=30", "embedding.scale=true", "residual=post_norm"], context_length=[8]
    )
    assert shown.facts["around_layers"]["head"] == "softcap=30.0"
    assert shown.facts["around_layers"]["embedding"] == "scale"
    assert shown.facts["around_layers"]["residual"].startswith("post_norm")
