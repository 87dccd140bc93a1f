"""Errors of wrong designs: one sentence with the path, the value and the remedy."""

from pathlib import Path
from typing import Any

import pytest

from heddle.config import kind_names
from heddle.errors import ConfigError, choices_hint
from heddle.model.load_config import load_config
from heddle.parts.mixers import MixerConfig
from heddle.parts.norms import NormConfig
from heddle.parts.positions import AdditivePositionConfig, MixerPositionConfig
from tests.cases import attention, design, layer

# Read from the folders, so that a new kind needs no change here.
MIXERS, NORMS, MIXER_POSITIONS, ADDITIVE_POSITIONS = (
    ", ".join(kind_names(base)) for base in (MixerConfig, NormConfig, MixerPositionConfig, AdditivePositionConfig)
)
OWN = "; for your own part, pass the file that defines it: --part FILE"
LEARNED = {"position": {"kind": "learned", "length": 9}}
CHOICES = (
    "bias, causal, chunked, dropout, exclusive, forget, gate, gate_activation, head_dim, heads, indexer, k_eq_v, "
    "kv_heads, norm_after_rotation, position, qk_norm, qk_norm_weight, qkv_clip, relative_dim, relative_extent, "
    "scale, shared_kv, short_convolution, sink, softcap, temperature_beta, temperature_growth, temperature_length, "
    "value_dim, value_embedding, value_norm, value_residual, value_scale, window"
)

MESSAGES = {
    "layers.0.mixer.kind=attenton": "layers[0].mixer: unknown kind 'attenton'; did you mean 'attention'? "
    f"choices: {MIXERS}{OWN}",
    "layers.0.mixer.kind=../x": f"layers[0].mixer: unknown kind '../x'; choices: {MIXERS}{OWN}",
    "layers.0.mixer.kind=rope": f"layers[0].mixer: unknown kind 'rope'; choices: {MIXERS}{OWN}",
    "layers.0.mixer.position.kind=learned": "layers[0].mixer.position: kind 'learned' does not belong here; "
    f"choices: {MIXER_POSITIONS}",
    "embedding.position.kind=rope": "embedding.position: kind 'rope' does not belong here; "
    f"choices: {ADDITIVE_POSITIONS}",
    "layers.0.mixer.hads=2": f"layers[0].mixer: unknown field 'hads'; did you mean 'heads'? choices: {CHOICES}",
    "nonsense=1": "unknown field 'nonsense'; choices: embedding, encoder, head, initialization, layers, "
    "multi_token, norm, residual, vocab_size, width",
    "mixer.heads=2": "unknown field 'mixer'; did you mean 'layers.*.mixer'?",
    "layers.0.mixer.heads=two": "layers[0].mixer.heads: should be a valid integer, got 'two' (text)",
    "layers.0.mixer.heads=0": "layers[0].mixer.heads: should be greater than 0, got 0 (a whole number)",
    "layers.0.mixer.heads=-1": "layers[0].mixer.heads: should be greater than 0, got -1 (a whole number)",
    "layers.0.mixer.heads=true": "layers[0].mixer.heads: should be a valid integer, got True (a truth value)",
    "layers.0.mixer.heads=4.0": "layers[0].mixer.heads: should be a valid integer, got 4.0 (a number)",
    "layers.0.mixer.heads=.nan": "layers[0].mixer.heads: should be a valid integer, got nan (a number)",
    "layers.0.mixer.heads=[4]": "layers[0].mixer.heads: should be a valid integer, got [4] (a list)",
    "layers.0.mixer.heads=null": "layers[0].mixer.heads: should be a valid integer, got None (nothing)",
    "layers.0.mixer.heads=99999999999999999999": "layers[0].mixer.heads: should be less than or equal to 1048576, "
    "got 99999999999999999999 (a whole number)",
    "layers.0.mixer.kv_heads=3": "layers[0].mixer.kv_heads: 3 does not divide heads = 4; choose a divisor of it",
    "width=25": "layers[0].mixer.heads: 4 does not divide width = 25; give head_dim, or other heads",
    "layers.0.mixer.position.rotary_dim=3": "layers[0].mixer.position.rotary_dim: "
    "3 dims of 6 cannot be rotated in pairs; "
    "give an even number that fits",
    "layers.0.mixer.position.rotary_dim=8": "layers[0].mixer.position.rotary_dim: "
    "8 dims of 6 cannot be rotated in pairs; "
    "give an even number that fits",
    "layers.0.mixer.position.inv_freq=[1, 2]": "layers[0].mixer.position.inv_freq: 2 given; rotary_dim = 6 needs 3",
    "layers.0.mixer.position.inv_freq=[1, .nan]": "layers[0].mixer.position.inv_freq[1]: "
    "should be a finite number, got nan (a number)",
    "layers.0.mixer.position.inv_freq=3": "layers[0].mixer.position.inv_freq: "
    "expected a list, got 3 (a whole number); write it in brackets, with commas",
    "layers.0.mixer.position.base=0": "layers[0].mixer.position.base: should be greater than 0, got 0 (a whole number)",
    "layers.0.mixer.position.base=.inf": "layers[0].mixer.position.base: should be a finite number, got inf (a number)",
    "layers.0.mixer.position.layout=hafl": "layers[0].mixer.position.layout: unknown value 'hafl'; "
    "did you mean 'half'? choices: half, interleaved",
    "layers.0.mixer.bias=qkb": "layers[0].mixer.bias: should be a valid boolean or 'qkv' or 'out', got 'qkb' (text)",
    "layers.0.mixer.causal=1": "layers[0].mixer.causal: should be a valid boolean, got 1 (a whole number)",
    "layers.0.mixer.dropout=1.0": "layers[0].mixer.dropout: should be less than 1, got 1.0 (a number)",
    "layers.0.mixer.dropout=-0.1": "layers[0].mixer.dropout: should be greater than or equal to 0, got -0.1 (a number)",
    "layers.0.mixer=[]": "layers[0].mixer: expected a table of fields, got [] (a list)",
    "layers.0.mixer={heads: 4}": f"layers[0].mixer: has no kind; set kind to one of {MIXERS}",
    "layers.0.repeat=5000": "layers: expands to 5000 layers; at most 1024 are allowed",
    "layers.0.layers=[]": "layers[0].layers: a layer either nests layers or has a mixer and a feedforward; "
    "keep one of the two",
    "layers.0={}": "layers[0].mixer: a layer needs a mixer, a feedforward or both; add one",
    "layers.0={layers: []}": "layers[0].layers: is empty; name at least one layer",
    "layers=[]": "layers: is empty; name at least one layer",
    "layers=3": "layers: expected a list, got 3 (a whole number)",
    "layers.0=4": "layers[0]: expected a table of fields, got 4 (a whole number)",
    "residual={kind: parallel, norms: 3}": "residual.norms: should be less than or equal to 2, got 3 (a whole number)",
    "norm.kind=rmss": f"norm: unknown kind 'rmss'; did you mean 'rms'? choices: {NORMS}{OWN}",
}


@pytest.mark.parametrize("override", MESSAGES)
def test_message(override: str) -> None:
    data = design(layer(attention(kv_heads=2)), embedding=LEARNED)
    load_config(data)
    with pytest.raises(ConfigError) as caught:
        load_config(data, [override])
    assert str(caught.value) == MESSAGES[override]


def test_the_path_includes_nested_layers() -> None:
    inner = {"repeat": 2, "layers": [layer(attention()), layer(attention(heads=5))]}
    with pytest.raises(ConfigError, match=r"^layers\[1\]\.layers\[1\]\.mixer\.heads: 5.*24"):
        load_config(design(layer(attention()), inner))


@pytest.mark.parametrize("field", ["width", "layers"])
def test_a_missing_field(field: str) -> None:
    data = design(layer(attention()))
    del data[field]
    with pytest.raises(ConfigError, match=f"^{field}:"):
        load_config(data)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = layer(attention())
    for _ in range(depth):
        inner = {"layers": [inner]}
    return design(inner)


def test_deep_nesting_and_huge_sizes_are_refused() -> None:
    assert load_config(nested(20)).depth == 1
    with pytest.raises(ConfigError, match=r"^layers:"):
        load_config(nested(2000))
    many = {"repeat": 2**31 - 1, "layers": [layer(None, repeat=2**31 - 1)]}
    with pytest.raises(ConfigError, match=r"^layers:.*4611686014132420609 layers"):
        load_config(design(many))
    experts = {"kind": "moe", "experts": 2**20, "top_k": 1, "hidden": 2**31 - 1}
    with pytest.raises(ConfigError, match=r"^design:"):
        load_config(design(layer(None, experts), width=2**20, vocab_size=2**31 - 1))
    with pytest.raises(ConfigError, match=r"^width:.*1048576.*2147483647"):
        load_config(design(layer(None), width=2**31 - 1, vocab_size=2**31 - 1))


@pytest.mark.parametrize(
    ("name", "remedy"), [("model.gguf", "heddle import {}/model.gguf"), ("x.safetensors", "heddle import {} ")]
)
def test_weights_are_not_a_design(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / name)
    assert remedy.format(tmp_path) in str(caught.value)


def test_the_hint_is_the_name_that_the_wrong_one_begins_with() -> None:
    names = ["experts", "shared", "shared_gate"]
    assert choices_hint("shared_experts", names).startswith("did you mean 'shared'?")
    assert choices_hint("shared_gate_width", names).startswith("did you mean 'shared_gate'?")
    assert choices_hint("num_experts", names).startswith("did you mean 'experts'?")
    assert choices_hint("unlike", names).startswith("choices: ")
