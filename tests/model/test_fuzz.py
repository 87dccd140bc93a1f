"""Every field of every part and of the model with 0, −1 and wrong types: the error names the field."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from heddle.config import Config, parse_config
from heddle.errors import ConfigError
from heddle.model.config import ModelConfig
from heddle.model.load_config import load_config
from tests.cases import CASES, Data, case

NAN, INFINITY = float("nan"), float("inf")
WRONG: dict[Any, list[Any]] = {
    int: [0, -1, 1.5, 2.0, True, "3", [3], {}, NAN, 2**31, 10**400],
    float: [True, "1", [1.0], {}, NAN, INFINITY, -INFINITY],
    bool: [0, 1, 1.0, "true", [], {}, None],
}


def unpacked(annotation: Any) -> tuple[list[Any], list[Any]]:
    """The types an annotation allows besides None, and the bounds it sets."""
    if get_origin(annotation) is Annotated:
        inner, *annotations = get_args(annotation)
        bounds = [bound for field in annotations for bound in getattr(field, "metadata", [field])]
        inner_types, inner_bounds = unpacked(inner)
        return inner_types, bounds + inner_bounds
    if get_origin(annotation) in (Union, types.UnionType):
        pairs = [unpacked(member) for member in get_args(annotation) if member is not type(None)]
        return [item for pair in pairs for item in pair[0]], [item for pair in pairs for item in pair[1]]
    return [annotation], []


def wrong_values(info: FieldInfo) -> list[Any]:
    """Values that a field must refuse."""
    allowed, bounds = unpacked(info.annotation)
    values = list(WRONG.get(allowed[0], [3, 1.5, "no such value"])) if len(allowed) == 1 else [3, 1.5, "no", [], {}]
    if any(getattr(bound, "ge", None) == 0 for bound in [*info.metadata, *bounds]):
        values = [value for value in values if value != 0]
    for bound in [*info.metadata, *bounds]:
        for limit in (getattr(bound, "gt", None), getattr(bound, "lt", None)):
            values += [] if limit is None else [limit]
        for name, offset in (("gt", -1), ("ge", -1), ("lt", 1), ("le", 1)):
            limit = getattr(bound, name, None)
            values += [] if limit is None else [limit + offset]
    return [value for value in values if value is not None or type(None) not in get_args(info.annotation)]


def nested_configs(config: Config) -> Iterator[Config]:
    """A config and all configs nested in it."""
    yield config
    for name in type(config).model_fields:
        value = getattr(config, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Config):
                yield from nested_configs(inner)


VALID = {type(config): config.dump() for name in CASES for config in nested_configs(case(name))}
FIELDS = [(cls, name) for cls in VALID for name in cls.model_fields]


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name in FIELDS])
def test_wrong_values_name_the_field(cls: type[Config], name: str) -> None:
    valid = {key: value for key, value in VALID[cls].items() if key != "kind"}
    parse_config(cls, valid)
    for value in wrong_values(cls.model_fields[name]):
        with pytest.raises(ConfigError, match=f"^{name}"):
            pytest.fail(f"{name} = {value!r} makes {parse_config(cls, valid | {name: value})}")


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def paths(node: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from paths(value, (*at, key))


def with_value_at(node: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(node, dict):
        return node | {first: with_value_at(node[first], rest, value)}
    return [with_value_at(item, rest, value) if index == first else item for index, item in enumerate(node)]


def load_or_none(design: Data, *overrides: str) -> ModelConfig | None:
    """The config, or None if it is refused. Any other error fails the test."""
    try:
        return load_config(design, overrides)
    except ConfigError:
        return None


@given(st.sampled_from(sorted(CASES)), st.data())
def test_any_value_at_any_path_builds_or_is_refused(name: str, data: st.DataObject) -> None:
    """A valid design with any value at one path either round-trips or is refused."""
    design: Data = CASES[name]
    path = data.draw(st.sampled_from(sorted(paths(design), key=str)))
    wrong = with_value_at(design, path, data.draw(VALUES))
    config = load_or_none(wrong)
    assert config is None or parse_config(ModelConfig, config.dump()) == config


@given(st.text(max_size=30))
def test_any_override_is_applied_or_refused(text: str) -> None:
    load_or_none(CASES["attention-gqa"], text)
