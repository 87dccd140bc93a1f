"""Variants of a design: `--vary path=value,value` read as axes, and their product as overrides with short names."""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from heddle.errors import ConfigError
from heddle.model.load_config import parse_values

MOST = 64
LONGEST_LABEL, LONGEST_NAME = 40, 120  # a name is part of a file's


@dataclass(frozen=True)
class Value:
    """One value of an axis as an override `path=text`, and its label; `bare`: it needs no field's name, as a kind."""

    override: str
    label: str
    bare: bool


@dataclass(frozen=True)
class Axis:
    """A varied field."""

    path: str
    title: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Variant:
    """One choice of every axis; the name is empty where nothing is varied. values: (path, label) of each axis."""

    name: str
    overrides: tuple[str, ...]
    values: tuple[tuple[str, str], ...]


def read_axes(asked: Sequence[str]) -> tuple[Axis, ...]:
    """The axes of `path=value,value` texts, one an option. Raises ConfigError for what cannot be varied."""
    texts: dict[str, str] = {}
    for text in asked:
        path, equals, values = text.partition("=")
        if not path or not equals:
            raise ConfigError(f"--vary {text}: expected path.to.field=value,value, such as norm.kind=rms,layer")
        if path in texts:
            raise ConfigError(f"--vary {text}: {path} is varied already; give all its values in one --vary")
        texts[path] = values
    named = titles(list(texts))
    return tuple(Axis(path, named[path], _values(path, text)) for path, text in texts.items())


def variants(axes: Sequence[Axis], designs: int) -> list[Variant]:
    """The product of all axes, the last one changing fastest. Raises ConfigError above 64 variants of all designs."""
    sizes = [len(axis.values) for axis in axes]
    count = designs * math.prod(sizes)
    if axes and count > MOST:
        factors = " × ".join(map(str, ([designs] if designs > 1 else []) + sizes))
        raise ConfigError(f"--vary: {factors} makes {count} variants, and at most {MOST} are trained; leave values out")
    made = []
    for choice in product(*(axis.values for axis in axes)):
        chosen = list(zip(axes, choice, strict=True))
        words = " ".join(_word(axes, axis, value) for axis, value in chosen)
        name = re.sub(r"[/\\\x00-\x1f\x7f]", "_", words)[:LONGEST_NAME]
        labels = tuple((axis.path, value.label) for axis, value in chosen)
        made.append(Variant(name, tuple(value.override for _, value in chosen), labels))
    return made


def titles(paths: Sequence[str]) -> dict[str, str]:
    """The last word of each path, `.kind` aside, or as many as tell it from the others."""
    words = {path: path.removesuffix(".kind").split(".") for path in paths}
    made: dict[str, str] = {}
    for length in range(1, max(map(len, words.values()), default=0) + 1):
        short = {path: ".".join(steps[-length:]) for path, steps in words.items()}
        shared = Counter(short.values())
        made |= {path: word for path, word in short.items() if path not in made and shared[word] == 1}
    return {path: made.get(path, path) for path in paths}


def _word(axes: Sequence[Axis], axis: Axis, value: Value) -> str:
    """`kv_heads=2`, or a kind alone where no other axis has one of this name."""
    elsewhere = [other.label for one in axes if one is not axis for other in one.values if other.bare]
    return value.label if value.bare and value.label not in elsewhere else f"{axis.title}={value.label}"


def _values(path: str, text: str) -> tuple[Value, ...]:
    asked = f"--vary {path}={text}"
    found = parse_values(text, asked)
    for place, (piece, value) in enumerate(found):
        if any(_same(value, other) for _, other in found[:place]):
            raise ConfigError(f"{asked}: {piece} is given twice; leave one out")
    every = [value for _, value in found]
    made = []
    for piece, value in found:
        label = _label(piece, value, every)
        bare = label != piece if isinstance(value, dict) else path.endswith(".kind") and isinstance(value, str)
        made.append(Value(f"{path}={piece}", label, bare))
    if len({one.label for one in made}) < len(made):  # cut short, or a number and the same as text
        made = [Value(one.override, f"{one.label}#{place}", one.bare) for place, one in enumerate(made, 1)]
    return tuple(made)


def _same(value: Any, other: Any) -> bool:
    """Whether two values are one; 1 and true, which Python calls equal, are not."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def _kind(value: Any) -> str | None:
    return value["kind"] if isinstance(value, dict) and isinstance(value.get("kind"), str) else None


def _label(piece: str, value: Any, every: Sequence[Any]) -> str:
    """Text as it is, a table by its kind and the fields in which those of the same kind differ, else as written."""
    if isinstance(value, str):
        piece = value
    elif value is None:
        piece = "null"
    elif isinstance(value, dict):
        alike = [other for other in every if isinstance(other, dict) and _kind(other) == _kind(value)]
        fields = dict.fromkeys(name for other in alike for name in other if name != "kind")
        differing = [name for name in fields if not all(_same(other.get(name), value.get(name)) for other in alike)]
        words = [_kind(value) or "", *(f"{name}={_plain(value.get(name))}" for name in differing)]
        piece = " ".join(word for word in words if word) or piece
    return piece if len(piece) <= LONGEST_LABEL else piece[: LONGEST_LABEL - 1] + "…"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _kind(value) or json.dumps(value)
