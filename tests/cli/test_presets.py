"""`heddle presets`: every preset is listed, and its YAML is the same design."""

import json
import re
from pathlib import Path

import pytest

from heddle.cli.main import run_command
from heddle.model.load_config import load_config
from heddle.model.presets import KINDS, SIZES, names


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[: len(KINDS)]] == list(KINDS)
    assert all(re.search(rf" {name}( of [\w, ]+)? \(width", lines[-2]) for name in SIZES)
    assert run_command(["presets", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == names()


@pytest.mark.parametrize("name", ["local_global-tiny", "preset:moe-small", "hybrid-medium", "mla-1b"])
def test_a_printed_preset_is_the_same_design(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(f"preset:{name.removeprefix('preset:')}")
    for file, options in (("mine.yaml", []), ("mine.json", ["--json"])):
        assert run_command(["presets", name, *options]) == 0
        text = capsys.readouterr().out
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert "&" not in text
        assert load_config(tmp_path / file) == config


@pytest.mark.parametrize(("name", "nearest"), [("gqa-tny", "gqa-tiny"), ("mqa-1b", "mla-1b")])
def test_an_unknown_preset_is_a_sentence(name: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["presets", name]) == 2
    assert f"'preset:{nearest}'" in capsys.readouterr().err
