"""The JSON Schema accepts every design that can be built and refuses what `load_config` refuses."""

import copy
from typing import Any

import jsonschema
import pytest

from heddle.config import kind_class, kinds
from heddle.errors import ConfigError
from heddle.model.config import SLOTS, schema
from heddle.model.load_config import load_config
from heddle.model.presets import names, preset
from tests import small
from tests.cases import CASES
from tests.covering import each_option
from tests.source import slots

SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert list(SLOTS) == slots()
    for slot in SLOTS:
        for kind in kinds(slot):
            names = [kind, *kind_class(slot, kind).aliases]
            choice = {"const": kind} if len(names) == 1 else {"enum": names}
            assert SCHEMA["$defs"][f"{slot}.{kind}"]["properties"]["kind"] == choice


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        inner = {reference for value in node.values() for reference in references(value)}
        return inner | ({node["$ref"]} if isinstance(node.get("$ref"), str) else set())
    return {reference for item in node for reference in references(item)} if isinstance(node, list) else set()


def test_every_reference_has_a_definition() -> None:
    assert {reference.removeprefix("#/$defs/") for reference in references(SCHEMA)} <= SCHEMA["$defs"].keys()


@pytest.mark.parametrize("name", names())
def test_presets(name: str) -> None:
    VALIDATOR.validate(preset(name))


@pytest.mark.parametrize("name", each_option())
def test_cases(name: str) -> None:
    VALIDATOR.validate(CASES[name])
    VALIDATOR.validate(load_config(CASES[name]).dump())


def test_a_short_design() -> None:
    VALIDATOR.validate(small.design())
    VALIDATOR.validate({"width": 16, "layers": [{"mixer": {"kind": "attention", "heads": 2}}]})


def design_with(path: str, value: Any) -> dict[str, Any]:
    """The small design with one field changed; the value `...` removes it."""
    data = copy.deepcopy(small.design())
    *before, last = (int(step) if step.isdecimal() else step for step in path.split("."))
    node: Any = data
    for step in before:
        node = node[step]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("width", 0),
        ("width", "16"),
        ("width", 1.5),
        ("width", ...),
        ("layers", ...),
        ("layers", {}),
        ("layers.0.repeat", 0),
        ("layers.0.mixer.kind", "attentoin"),
        ("layers.0.mixer.kind", "gated"),
        ("layers.0.mixer.kind", ...),
        ("layers.0.mixer.heads", -1),
        ("layers.0.mixer.heads", ...),
        ("layers.0.mixer.head", 2),
        ("layers.0.mixer.qk_norm", "everything"),
        ("layers.0.mixer.position", {"kind": "learned", "length": 3}),
        ("layers.0.feedforward", {"kind": "attention", "heads": 2}),
        ("layers.0.feedforward.hidden", None),
        ("vocab_size", -5),
        ("residual", {"kind": "pre_norm", "drop_path": 1.0}),
        ("norm", {"kind": "rms", "eps": 0}),
        ("colour", "blue"),
    ],
)
def test_the_schema_refuses_what_load_config_refuses(path: str, value: Any) -> None:
    data = design_with(path, value)
    with pytest.raises(ConfigError):
        load_config(data)
    assert not VALIDATOR.is_valid(data)
