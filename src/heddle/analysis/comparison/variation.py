"""Variants of a design: parse `path=value,value` into varied fields, and take their product as named overrides."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from heddle.errors import ConfigError
from heddle.model.parse_yaml import parse_values

MAX_VARIANTS = 64
MAX_LABEL_LENGTH, MAX_NAME_LENGTH = 40, 120  # a variant's name becomes part of file names


@dataclass(frozen=True)
class FieldValue:
    """One value of a varied field: the override `path=text` and a short label.

    standalone: the label says enough without the field's name, as that of a kind does.
    """

    override: str
    label: str
    standalone: bool


@dataclass(frozen=True)
class VariedField:
    """A config field, the shortest title that identifies it among the varied fields, and the values it takes."""

    path: str
    title: str
    values: tuple[FieldValue, ...]


@dataclass(frozen=True)
class Variant:
    """One value for every varied field.

    name: empty where no field is varied. field_labels: (path, label) of each field.
    """

    name: str
    overrides: tuple[str, ...]
    field_labels: tuple[tuple[str, str], ...]


def parse_varied_fields(assignments: Sequence[str]) -> tuple[VariedField, ...]:
    """Parse `path=value,value` texts, one for each field. Raises ConfigError for what cannot be varied."""
    values_of: dict[str, str] = {}
    for assignment in assignments:
        path, equals, values = assignment.partition("=")
        if not path or not equals:
            raise ConfigError(f"vary {assignment}: expected path.to.field=value,value, such as norm.kind=rms,layer")
        if path in values_of:
            raise ConfigError(f"vary {assignment}: {path} is varied already; give all its values at once")
        values_of[path] = values
    title_of = short_titles(list(values_of))
    return tuple(VariedField(path, title_of[path], _parse_values(path, text)) for path, text in values_of.items())


def enumerate_variants(varied_fields: Sequence[VariedField], design_count: int) -> list[Variant]:
    """The product of all fields' values; the last field changes fastest.

    Raises ConfigError where `design_count` designs would have more than 64 variants together.
    """
    value_counts = [len(field.values) for field in varied_fields]
    count = design_count * math.prod(value_counts)
    if varied_fields and count > MAX_VARIANTS:
        factors = " × ".join(map(str, ([design_count] if design_count > 1 else []) + value_counts))
        raise ConfigError(
            f"vary: {factors} makes {count} variants, and at most {MAX_VARIANTS} are trained; leave values out"
        )
    variants = []
    for values in product(*(field.values for field in varied_fields)):
        pairs = list(zip(varied_fields, values, strict=True))
        full_name = " ".join(_value_name(varied_fields, field, value) for field, value in pairs)
        name = re.sub(r"[/\\\x00-\x1f\x7f]", "_", full_name)[:MAX_NAME_LENGTH]
        labels = tuple((field.path, value.label) for field, value in pairs)
        variants.append(Variant(name, tuple(value.override for value in values), labels))
    return variants


def short_titles(paths: Sequence[str]) -> dict[str, str]:
    """The last word of each path (`.kind` removed), or as many words as distinguish it from the other paths."""
    words = {path: path.removesuffix(".kind").split(".") for path in paths}
    titles: dict[str, str] = {}
    for length in range(1, max(map(len, words.values()), default=0) + 1):
        candidates = {path: ".".join(path_words[-length:]) for path, path_words in words.items()}
        uses = Counter(candidates.values())
        titles |= {path: title for path, title in candidates.items() if path not in titles and uses[title] == 1}
    return {path: titles.get(path, path) for path in paths}


def _value_name(varied_fields: Sequence[VariedField], field: VariedField, value: FieldValue) -> str:
    """`kv_heads=2`; the label alone where it is standalone and no other field has the same one."""
    labels_elsewhere = [
        candidate.label
        for another in varied_fields
        if another is not field
        for candidate in another.values
        if candidate.standalone
    ]
    unambiguous = value.standalone and value.label not in labels_elsewhere
    return value.label if unambiguous else f"{field.title}={value.label}"


def _parse_values(path: str, text: str) -> tuple[FieldValue, ...]:
    argument = f"vary {path}={text}"
    parsed = parse_values(text, argument)
    for index, (value_text, value) in enumerate(parsed):
        if any(_is_same(value, previous) for _, previous in parsed[:index]):
            raise ConfigError(f"{argument}: {value_text} is given twice; leave one out")
    all_values = [value for _, value in parsed]
    field_values = []
    for value_text, value in parsed:
        label = _label(value_text, value, all_values)
        is_kind_name = path.endswith(".kind") and isinstance(value, str)
        standalone = label != value_text if isinstance(value, dict) else is_kind_name
        field_values.append(FieldValue(f"{path}={value_text}", label, standalone))
    if len({value.label for value in field_values}) < len(field_values):  # shortened, or 1 and "1"
        numbered = enumerate(field_values, 1)
        field_values = [replace(value, label=f"{value.label}#{number}") for number, value in numbered]
    return tuple(field_values)


def _is_same(value: Any, reference: Any) -> bool:
    """Equal as JSON: unlike in Python, 1 and true differ."""
    return json.dumps(value, sort_keys=True) == json.dumps(reference, sort_keys=True)


def _kind(value: Any) -> str | None:
    return value["kind"] if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def _label(text: str, value: Any, all_values: Sequence[Any]) -> str:
    """A string as it is; a mapping by its kind and the fields in which those of its kind differ; else the text."""
    if isinstance(value, str):
        text = value
    elif value is None:
        text = "null"
    elif isinstance(value, dict):
        same_kind = [mapping for mapping in all_values if isinstance(mapping, dict) and _kind(mapping) == _kind(value)]
        names = dict.fromkeys(name for mapping in same_kind for name in mapping if name != "kind")
        differing = [
            name for name in names if not all(_is_same(mapping.get(name), value.get(name)) for mapping in same_kind)
        ]
        words = [_kind(value) or "", *(f"{name}={_field_text(value.get(name))}" for name in differing)]
        text = " ".join(word for word in words if word) or text
    return text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 1] + "…"


def _field_text(value: Any) -> str:
    return value if isinstance(value, str) else _kind(value) or json.dumps(value)
