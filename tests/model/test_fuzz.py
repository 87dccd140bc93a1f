"""Every numeric field of every part, and of the model, given 0, −1 and the wrong type: the field is named."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heddle.config import PARTS, Config, Count, Finite, Positive, Rate, decode, kind_class, kinds
from heddle.errors import ConfigError
from heddle.model.config import EmbeddingConfig, HeadConfig, InitialisationConfig, LayerConfig, ModelConfig
from heddle.model.load import apply_override, load_config
from tests.cases import CASES, Data

RULES: dict[Any, list[Any]] = {
    Count: [0, -1, 1.5, 2.0, True, "3", [3], {}, float("nan"), 2**31, 10**400],
    Rate: [-1, -0.1, 1, 1.0, True, "0.1", [0.1], {}, float("nan"), float("inf")],
    Positive: [0, -1, 0.0, -0.5, True, "1", [1.0], {}, float("nan"), float("inf")],
    Finite: [True, "1", [1.0], {}, float("nan"), float("inf"), float("-inf")],
    bool: [0, 1, "true", 1.0, [], {}, None],
}


def rule(annotation: Any) -> list[Any]:
    """Values that a field of this annotation must refuse."""
    for known, wrong in RULES.items():
        if annotation == known:
            return wrong
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return rule(members[0]) if len(members) == 1 else [3, 1.5, [], {}]
    if get_origin(annotation) is Annotated:
        return [0, -1, 1.5, True, "1", 10**400]
    if get_origin(annotation) is tuple:
        return [3, "3", True, {}]
    return [3, 1.5, True, "no such value", []]  # a choice of words, or a nested config


CONFIGS: list[type[Config]] = [EmbeddingConfig, HeadConfig, InitialisationConfig, LayerConfig, ModelConfig]
CONFIGS += [kind_class(folder.name, kind) for folder in sorted(PARTS.iterdir()) if (folder / "__init__.py").is_file()
            for kind in kinds(folder.name)]  # fmt: skip


def fields() -> Iterator[tuple[type[Config], str]]:
    for cls in CONFIGS:
        yield from ((cls, name) for name in cls.model_fields)


@pytest.mark.parametrize(("cls", "name"), list(fields()), ids=lambda value: getattr(value, "__module__", value))
def test_wrong_values_name_the_field(cls: type[Config], name: str) -> None:
    info = cls.model_fields[name]
    annotation = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation  # type: ignore[name-defined]
    for value in rule(annotation):
        with pytest.raises(ConfigError, match=f"^{name}"):
            decode(cls, {name: value})


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=2), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def paths(node: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from paths(value, (*at, key))


def altered(node: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(node, dict):
        return node | {first: altered(node[first], rest, value)}
    return [altered(item, rest, value) if index == first else item for index, item in enumerate(node)]


@given(st.sampled_from(sorted(CASES)), st.data())
def test_any_value_anywhere_builds_or_is_refused(name: str, data: st.DataObject) -> None:
    """Whatever stands in one place of a good design, it is a design that round-trips or one sentence."""
    design: Data = CASES[name]
    path = data.draw(st.sampled_from(sorted(paths(design), key=str)))
    try:
        config = load_config(altered(design, path, data.draw(VALUES)))
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert decode(ModelConfig, config.dump()) == config


@given(st.text(max_size=30))
def test_any_override_is_applied_or_refused(text: str) -> None:
    data = load_config(CASES["attention-gqa"]).dump()
    try:
        apply_override(data, text)
        load_config(data)
    except ConfigError as error:
        assert str(error)
