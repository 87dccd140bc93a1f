"""Loading designs: files of three formats, ambiguous YAML, folders and overrides."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from heddle.errors import ConfigError
from heddle.model.load_config import load_config, parse_yaml
from tests.cases import CASES, attention, design, layer
from tests.covering import each_option

YAML = """
vocab_size: 61
width: 24
layers:
  - repeat: 2
    mixer: {kind: attention, heads: 4, kv_heads: 2, position: {kind: rope, base: 1e4}}
    feedforward: {kind: mlp, hidden: 20}
"""
TOML = """
vocab_size = 61
width = 24
[[layers]]
repeat = 2
mixer = { kind = "attention", heads = 4, kv_heads = 2, position = { kind = "rope", base = 1e4 } }
feedforward = { kind = "mlp", hidden = 20 }
"""
GQA = design(layer(attention(kv_heads=2), repeat=2))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML), ("a.json", json.dumps(GQA)), ("a.yaml", json.dumps(GQA))],
)
def test_formats_agree(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    assert load_config(file) == load_config(str(file)) == load_config(GQA)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("3.", 3.0),
        (".5", 0.5),
        ("010", 10),
        ("0x10", 16),
        ("-7", -7),
        ("off", "off"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_yaml(f"a: {text}", "it")["a"]
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"line 3.*'a'.*YAML"),
        ("a: &x 1\nb: *x", r"line 2.*YAML"),
        ("1: 2", r"line 1.*1.*YAML"),
        ("? [a]\n: 2", r"line 1.*\['a'\].*YAML"),
        ("a: !!python/name:os.system x", "line 1"),
        ("a: [1", "line 1"),
        ("a: \x00", r"it:.*YAML.*#x0000"),
        ("[" * 5000, r"it:.*YAML"),
        ("a: 1\n---\nb: 2", "line 2"),
        ("<<: {a: 1}\nb: 2", "it"),
    ],
)
def test_unsupported_yaml_is_refused(text: str, message: str) -> None:
    if text.startswith("<<"):
        assert parse_yaml(text, "it") == {"<<": {"a": 1}, "b": 2}
        return
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "it")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"- 1", "table of fields"),
        ("a.yaml", b"", "table of fields"),
        ("a.yaml", b"\xff\xfe", r"UTF-8.*YAML, TOML.*JSON"),
        ("a.yaml", b"#" * 10_000_000, "1048576 bytes"),
        ("a.json", b'{"width": 1, "width": 2}', r"JSON.*'width'"),
        ("a.json", b"[" * 100_000, "JSON"),
        ("a.json", b"{", "JSON"),
        ("a.toml", b"width = 1\nwidth = 2", "TOML"),
    ],
)
def test_files_without_a_design_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        load_config(file)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"design file.*preset:NAME"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"^gqa-tiny:.*preset:gqa-tiny"):
        load_config("gqa-tiny")
    with pytest.raises(ConfigError, match=r"config.json"):
        load_config(tmp_path)


def test_checkpoint_folders(tmp_path: Path) -> None:
    for step, width in ((2, 24), (10, 48)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(GQA | {"width": width}))
    assert load_config(tmp_path).width == 48
    assert load_config(tmp_path / "checkpoints" / "step-00000002").width == 24


@pytest.mark.parametrize("name", each_option())
def test_written_configs_load_equal(name: str, tmp_path: Path) -> None:
    config = load_config(CASES[name])
    (tmp_path / "a.json").write_text(json.dumps(config.dump()))
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(config.dump()))
    assert load_config(tmp_path / "a.json") == load_config(tmp_path / "a.yaml") == config


def test_overrides() -> None:
    data = design(layer(attention(kv_heads=2)), layer(attention(heads=2)))
    config = load_config(data, ["layers.*.mixer.kv_heads=1", "layers.1.mixer.window=3", "head.tied=false", "width=48"])
    mixers = [entry.mixer.dump() for entry in config.layers if entry.mixer is not None]
    assert [mixer["kv_heads"] for mixer in mixers] == [1, 1]
    assert [mixer.get("window") for mixer in mixers] == [None, 3]
    assert (config.head.tied, config.width) == (False, 48)
    assert data == design(layer(attention(kv_heads=2)), layer(attention(heads=2))), "the source was changed"


def test_null_unsets_a_field_and_missing_tables_are_created() -> None:
    data = design(layer(attention(window=3)))
    mixer = load_config(data, ["layers.0.mixer.window=null", "layers.0.mixer.position=null"]).layers[0].mixer
    assert mixer is not None
    assert not {"window", "position"} & set(mixer.dump())
    assert load_config({**data}, ["norm.eps=1e-3"]).norm.dump()["eps"] == 1e-3
    del data["norm"]
    assert load_config(data, ["norm.eps=1e-3"]).norm == load_config({**data, "norm": {"kind": "rms", "eps": 1e-3}}).norm
    assert load_config(data, ["embedding.position.kind=sinusoidal"]).embedding.position is not None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("width", "override 'width':"),
        ("=3", "override '=3':"),
        ("layers.1.repeat=2", "override 'layers.1.repeat=2':"),
        ("layers.-1.repeat=2", "override 'layers.-1.repeat=2':"),
        ("width.a=1", "override 'width.a=1':"),
        ("width=[", "override 'width=[', line 1: "),
    ],
)
def test_overrides_of_missing_paths_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(design(layer(attention())), [override])
    assert str(caught.value).startswith(message)


def test_a_number_is_not_a_design() -> None:
    with pytest.raises(ConfigError, match="from 5"):
        load_config(5)  # type: ignore[arg-type]


def test_an_override_of_one_layer_follows_one_of_all_layers() -> None:
    mixer = "{kind: attention, heads: 4}"
    design = {"width": 16, "layers": [{"mixer": {"kind": "attention", "heads": 2}}] * 2}
    config = load_config(design, [f"layers.*.mixer={mixer}", "layers.0.mixer.heads=1"])
    assert [layer.dump()["mixer"]["heads"] for layer in config.layers] == [1, 4]


def test_a_changed_kind_keeps_the_fields_that_it_has() -> None:
    position = {"kind": "rope", "base": 500.0}
    mixer = {"kind": "attention", "heads": 2, "kv_heads": 1, "window": 4, "position": position}
    layers = [{"mixer": mixer, "feedforward": {"kind": "mlp", "hidden": 8}, "repeat": 2}]
    design = {"width": 16, "layers": layers, "residual": {"kind": "parallel", "norms": 2, "drop_path": 0.1}}
    config = load_config(design, ["layers.*.mixer.kind=retention", "residual.kind=pre_norm"])
    assert config.layers[0].dump()["mixer"]["position"] == load_config(design).layers[0].dump()["mixer"]["position"]
    assert config.residual.dump() == {"kind": "pre_norm", "drop_path": 0.1, "dropout": 0.0, "first_norm": True}
    # the same kind, a typo, and a kind that does not exist leave everything in place
    assert load_config(design, ["layers.0.mixer.kind=attention"]) == load_config(design)
    with pytest.raises(ConfigError, match="'windw'"):
        load_config(design, ["layers.0.mixer.windw=3", "layers.0.mixer.kind=retention"])
    with pytest.raises(ConfigError, match=r"'retension'.*'retention'"):
        load_config(design, ["layers.0.mixer.kind=retension"])
