"""A user's own part: one file defines a kind, and the laws run on it. Name clashes and broken files are refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from heddle.config import PARTS, DesignError, kinds, load_part
from heddle.errors import ConfigError
from heddle.laws import run
from heddle.model.load_config import load_config
from tests.cases import attention, design, layer
from tests.small import forget_parts


@pytest.fixture(autouse=True)
def modules_as_before() -> Iterator[None]:
    yield
    forget_parts()


def copy_of(kind: str, file: Path, *changes: tuple[str, str]) -> Path:
    text = (PARTS / f"{kind}.py").read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    return file


CUBED = ("self.activation(up)", "up**3")
MEAN = ("self.activation(up)", "up - up.mean(1, keepdim=True)")


def test_a_user_part_is_loaded(tmp_path: Path) -> None:
    part = load_part(copy_of("feedforwards/mlp", tmp_path / "cubed.py", CUBED))
    assert (part.slot, "cubed" in kinds("feedforwards")) == ("feedforwards", True)
    config = load_config(design(layer(attention(), {"kind": "cubed", "hidden": 10})))
    assert config.dump()["layers"][0]["feedforward"]["kind"] == "cubed"
    assert [
        result for result in run(config, ["chunked_decoding", "causality", "config_round_trip"]) if not result.passed
    ] == []


def test_laws_catch_a_mistake_in_a_user_part(tmp_path: Path) -> None:
    load_part(copy_of("feedforwards/mlp", tmp_path / "centred.py", MEAN))
    config = load_config(design(layer(attention(), {"kind": "centred", "hidden": 10})))
    results = list(run(config, ["chunked_decoding", "causality", "config_round_trip"]))
    assert [(result.name, result.passed) for result in results] == [
        ("chunked_decoding", False),
        ("causality", False),
        ("config_round_trip", True),
    ]
    assert "token 0" in results[1].message


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.py:"):
        load_part(tmp_path / "nothing.py")
    (tmp_path / "text.txt").write_text("x = 1")
    with pytest.raises(ConfigError, match=r"text.txt:"):
        load_part(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match=r"mlp.py:.*kind 'mlp'"):
        load_part(copy_of("feedforwards/mlp", tmp_path / "mlp.py"))
    for text, reason in (("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError"), ("import nowhere", "ModuleNotFound")):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ConfigError, match=f"bad.py:.*{reason}"):
            load_part(tmp_path / "bad.py")
    (tmp_path / "empty.py").write_text('"""Nothing."""')
    with pytest.raises(ConfigError, match=r"empty.py:"):
        load_part(tmp_path / "empty.py")
    with pytest.raises(DesignError, match="kind 'bad'"):
        load_config(design(layer(attention(), {"kind": "bad", "hidden": 10})))
