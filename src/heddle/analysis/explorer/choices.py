"""What can be chosen of a part: the kinds of a slot and their fields, read from their configs."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from heddle.config import Config, Part, kind_class, kinds
from heddle.model.schema import schema

SLOTS = {
    "mixers": "mixer", "positions": "position", "feedforwards": "feed-forward", "residuals": "residual",
    "norms": "norm", "scalings": "scaling",
}  # fmt: skip
WORDS = {"string": "choice", "integer": "integer", "number": "number", "boolean": "boolean"}
FIRST_VALUES = {  # of fields that have no default
    "heads": 8, "kv_rank": 256, "nope_dim": 64, "hidden": 2048, "experts": 8, "top_k": 2, "length": 2048,
    "first": {"kind": "attention", "heads": 8, "window": 1024},
    "second": {"kind": "mamba2", "heads": 8},
    "factor": 8.0, "original_length": 4096,
    "short_factor": [1.0] * 32, "long_factor": [round(32 ** (pair / 31), 3) for pair in range(32)],
}  # fmt: skip
FIRST_FIELDS: dict[str, dict[str, Any]] = {  # of kinds that are better shown with more than they need
    "attention": {"kv_heads": 2, "position": {"kind": "rope"}},
    "differential_attention": {"position": {"kind": "rope"}},
    "latent_attention": {"rope_dim": 32, "position": {"kind": "rope"}},
    "retention": {"gate": "silu"},
    "longrope": {"factor": 32.0},
    "moe": {"hidden": 1024, "shared": 1},
}


@dataclass(frozen=True)
class Field:
    """A field that can be chosen.

    type: integer, number, boolean, choice, or part. least, most: its range; above, below: the same without the ends.
    choices: words, or the kinds of a part. optional: whether it can be left out. note: the comment of its source.
    """

    name: str
    type: str
    note: str
    default: Any
    optional: bool
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    slot: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of a slot. first: the fields with which it is shown at first. source: the docstring of its file."""

    slot: str
    kind: str
    aliases: tuple[str, ...]
    source: str
    fields: tuple[Field, ...]
    first: dict[str, Any]


@cache
def kinds_of(slot: str) -> tuple[Kind, ...]:
    """All kinds of a slot."""
    return tuple(_kind(slot, name) for name in kinds(slot))


def _kind(slot: str, name: str) -> Kind:
    cls = kind_class(slot, name)
    definition = _definitions()[f"{slot}.{name}"]
    required = [field for field in definition.get("required", []) if field != "kind"]
    first = {field: FIRST_VALUES[field] for field in required if field in FIRST_VALUES} | FIRST_FIELDS.get(name, {})
    fields = tuple(_fields(cls, definition))
    source = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return Kind(slot, name, cls.aliases, source, fields, {"kind": name, **first})


@cache
def _definitions() -> dict[str, Any]:
    definitions: dict[str, Any] = schema()["$defs"]
    return definitions


def _fields(cls: type[Part], definition: dict[str, Any]) -> Iterator[Field]:
    """Fields that are one number, word or part; norms within a part follow the design's."""
    notes = comments(cls)
    for name, described in definition["properties"].items():
        options = described.get("anyOf", [described])
        optional = any(option.get("type") == "null" for option in options)
        options = [option for option in options if option.get("type") not in ("null", "array")]
        if name == "kind" or not options:
            continue
        note, default = notes.get(name, ""), described.get("default")
        if "$ref" in options[0]:
            slot, choices = _kinds_of_base(options[0]["$ref"].rpartition("/")[2])
            if slot in ("mixers", "positions"):
                yield Field(name, "part", note, default, optional, choices=choices, slot=slot)
            continue
        words = [word for option in options for word in option.get("enum", [option.get("const")]) if word is not None]
        if words and len(options) == 2:
            yield Field(name, "choice", note, default, optional, choices=("false", "true", *words))
            continue
        kind = "choice" if words else WORDS[options[0]["type"]]
        least = options[0].get("minimum", 1 if kind == "integer" else None)
        most, above, below = (options[0].get(end) for end in ("maximum", "exclusiveMinimum", "exclusiveMaximum"))
        yield Field(name, kind, note, default, optional, least, most, above, below, tuple(words))


def _kinds_of_base(base: str) -> tuple[str, tuple[str, ...]]:
    names = [each["$ref"].rpartition("/")[2] for each in _definitions()[base]["oneOf"] if "$ref" in each]
    return names[0].partition(".")[0], tuple(name.partition(".")[2] for name in names)


def comments(cls: type[Config]) -> dict[str, str]:
    """The comments above and after each field of a config."""
    notes: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if not (issubclass(owner, Config) and owner.__module__.startswith("heddle.")):
            continue
        above: list[str] = []
        for line in inspect.getsource(owner).splitlines():
            code, _, comment = line.partition("  # ")
            field = re.match(r"    (\w+): ", code)
            if line.startswith("    # "):
                above.append(line.strip("# "))
            elif field:
                notes[field[1]] = " ".join([*above, *([comment] if comment else [])])
                above = []
    return notes
