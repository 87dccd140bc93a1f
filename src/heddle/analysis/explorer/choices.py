"""What can be chosen of a part: the kinds of a slot and their fields, read from their configs."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from heddle.config import Config, kind_class, kinds
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
    """A field of a part or a design.

    type: integer, number, boolean, choice, part, or numbers (a list). least, most: the range of its numbers; above,
    below: the same without the ends. choices: words, or the kinds of a part. optional: whether it can be left out.
    note: the comment of its source.
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
    """A kind of a slot.

    fields: those that can be chosen. kept: those that stay as a design has them. first: the fields with which the kind
    is shown at first. source: the docstring of its file.
    """

    slot: str
    kind: str
    aliases: tuple[str, ...]
    source: str
    fields: tuple[Field, ...]
    kept: tuple[Field, ...]
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
    fields, kept = tuple(_fields(definition, comments(cls))), tuple(_kept_fields(definition))
    source = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return Kind(slot, name, cls.aliases, source, fields, kept, {"kind": name, **first})


@cache
def model_fields() -> dict[str, tuple[Field, ...]]:
    """The fields of a design outside its parts: of itself (`design`), of an entry of its layers, embedding and head."""
    owners = {"design": "ModelConfig", "layer": "LayerConfig", "embedding": "EmbeddingConfig", "head": "HeadConfig"}
    shown = {"design": ("vocab_size", "width"), "layer": ("repeat",)}
    described = {place: _definitions()[owner]["properties"] for place, owner in owners.items()}
    return {
        place: tuple(_fields({"properties": {name: fields[name] for name in shown.get(place, fields)}}, {}))
        for place, fields in described.items()
    }


@cache
def _definitions() -> dict[str, Any]:
    definitions: dict[str, Any] = schema()["$defs"]
    return definitions


def _fields(definition: dict[str, Any], notes: dict[str, str]) -> Iterator[Field]:
    """Fields that are one number, word or part; norms within a part follow the design's."""
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
        yield Field(
            name, kind, note, default, optional, *_range(options[0], 1 if kind == "integer" else None), tuple(words)
        )


def _range(described: dict[str, Any], least: float | None = None) -> tuple[float | None, ...]:
    """least, most, above and below of a number. least: where none is described."""
    ends = (described.get(end) for end in ("maximum", "exclusiveMinimum", "exclusiveMaximum"))
    return described.get("minimum", least), *ends


def _kept_fields(definition: dict[str, Any]) -> Iterator[Field]:
    """Fields that are a list of numbers, or a norm or a scaling within a part."""
    for name, described in definition["properties"].items():
        for option in described.get("anyOf", [described]):
            items = option.get("items", {})
            if items.get("type") in ("integer", "number"):
                yield Field(name, "numbers", "", None, True, *_range(items))
            elif "$ref" in option:
                slot, choices = _kinds_of_base(option["$ref"].rpartition("/")[2])
                if slot in ("norms", "scalings"):
                    yield Field(name, "part", "", None, True, choices=choices, slot=slot)


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
