"""The choices of a part: the kinds of a slot and their fields, read from their configs."""

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import heddle.lab.explore.mixer_costs  # noqa: F401 - it declares the costs of the mixers
from heddle.config import Config, DesignError, Part, kind_class, kinds
from heddle.lab.explore.costs import cost_function
from heddle.model.config import LayerConfig, ModelConfig, schema
from heddle.parts.feedforwards import FeedforwardConfig
from heddle.parts.mixers import MixerConfig
from heddle.parts.modules.indexer import indexer_field

SLOTS = {
    "mixers": "mixer", "positions": "position", "feedforwards": "feed-forward", "residuals": "residual",
    "norms": "norm", "scalings": "scaling",
}  # fmt: skip
WORDS = {"string": "choice", "integer": "integer", "number": "number", "boolean": "boolean"}
FIRST_VALUES = {  # for fields without a default
    "heads": 8, "kv_rank": 256, "nope_dim": 64, "hidden": 2048, "experts": 8, "top_k": 2, "length": 2048,
    "first": {"kind": "attention", "heads": 8, "window": 1024},
    "second": {"kind": "mamba2", "heads": 8},
    "factor": 8.0, "original_length": 4096, "rotated_share": 0.25,
    "short_factor": [1.0] * 32, "long_factor": [round(32 ** (pair / 31), 3) for pair in range(32)],
}  # fmt: skip
FIRST_FIELDS: dict[str, dict[str, Any]] = {  # for kinds that are better shown with more than the required fields
    "attention": {"kv_heads": 2, "position": {"kind": "rope"}},
    "differential_attention": {"position": {"kind": "rope"}},
    "latent_attention": {"rope_dim": 32, "position": {"kind": "rope"}},
    "retention": {"gate": "silu"},
    "longrope": {"factor": 32.0},
    "proportional": {"factor": 1.0},
    "moe": {"hidden": 1024, "shared": 1},
}


_Range = tuple[float | None, float | None, float | None, float | None]


@dataclass(frozen=True)
class Field:
    """A field of a part or a design.

    type: integer, number, boolean, choice, part, or numbers (a list). least, most: the inclusive range of its numbers;
    above, below: exclusive ends. choices: words, or the kinds of a part. optional: whether it can be left out.
    note: the comment in its source.
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

    fields: the fields that can be changed. kept: fields that stay as in the design. first: the fields with which the
    kind is first shown. source: the docstring of its file. recurrent: whether it is a mixer whose state replaces all
    tokens.
    """

    slot: str
    kind: str
    aliases: tuple[str, ...]
    source: str
    fields: tuple[Field, ...]
    kept: tuple[Field, ...]
    first: dict[str, Any]
    recurrent: bool


# Fields that an explored design cannot have: its equal layers read no other layer, and a convolution is several fields.
NOT_EXPLORED = (
    "shared_kv", "shared_index", "value_residual", "value_rank", "short_convolution", "norms_first", "k_eq_v",
    "layer_scalar", "adapter_rank", "per_layer", "value_embedding", "relative_bias.shared",
)  # fmt: skip


def _explored(slot: str, names: Iterable[str]) -> Iterator[str]:
    """The kinds that declare their costs."""
    return (name for name in names if cost_function(slot, name) is not None)


@cache
def kinds_of(slot: str) -> tuple[Kind, ...]:
    """The kinds of a slot that declare their costs."""
    return tuple(_kind(slot, name) for name in _explored(slot, kinds(slot)))


def _kind(slot: str, name: str) -> Kind:
    cls = kind_class(slot, name)
    definition = _definitions()[f"{slot}.{name}"]
    required = [field for field in definition.get("required", []) if field != "kind"]
    first = {field: FIRST_VALUES[field] for field in required if field in FIRST_VALUES} | FIRST_FIELDS.get(name, {})
    fields, kept = tuple(_fields(definition, comments(cls))), tuple(_kept_fields(definition))
    source = inspect.getdoc(sys.modules[cls.__module__]) or ""
    recurrent = issubclass(cls, MixerConfig) and cls.is_recurrent()
    return Kind(slot, name, cls.aliases, source, fields, kept, {"kind": name, **first}, recurrent)


@cache
def model_fields() -> dict[str, tuple[Field, ...]]:
    """The fields of a design outside its parts: its own (`design`), of a layer entry, the embedding and the head."""
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
    """Fields that hold one number, word or part; norms within a part follow the design's."""
    kind_name = definition["properties"].get("kind", {}).get("const")  # of a part without aliases
    for name, described in definition["properties"].items():
        options = described.get("anyOf", [described])
        optional = any(option.get("type") == "null" for option in options)
        options = [option for option in options if option.get("type") not in ("null", "array")]
        if name in ("kind", *NOT_EXPLORED) or f"{kind_name}.{name}" in NOT_EXPLORED or not options:
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


def _range(described: dict[str, Any], least: float | None = None) -> _Range:
    """least, most, above and below of a number. least: the default lower end."""
    most, above, below = (described.get(end) for end in ("maximum", "exclusiveMinimum", "exclusiveMaximum"))
    return described.get("minimum", least), most, above, below


def _kept_fields(definition: dict[str, Any]) -> Iterator[Field]:
    """Fields that hold a list of numbers, or a norm or a scaling within a part."""
    for name, described in definition["properties"].items():
        for option in () if name in NOT_EXPLORED else described.get("anyOf", [described]):
            items = option.get("items", {})
            if items.get("type") in ("integer", "number"):
                yield Field(name, "numbers", "", None, True, *_range(items))
            elif "$ref" in option:
                slot, choices = _kinds_of_base(option["$ref"].rpartition("/")[2])
                if slot in ("norms", "scalings"):
                    yield Field(name, "part", "", None, True, choices=choices, slot=slot)


def _kinds_of_base(base: str) -> tuple[str, tuple[str, ...]]:
    """A slot and its kinds; no kinds for a config that is not a slot, such as an indexer, which is not offered."""
    names = [each["$ref"].rpartition("/")[2] for each in _definitions()[base].get("oneOf", ()) if "$ref" in each]
    if not names:
        return "", ()
    slot = names[0].partition(".")[0]
    return slot, tuple(_explored(slot, (name.partition(".")[2] for name in names)))


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


# The designs of published models, as the explorer shows them: each different layer once, with its number.


FILE = Path(__file__).with_name("published.json")


@cache
def published_designs() -> list[dict[str, Any]]:
    """Name, family and design of each model in published.json, which tools/published_designs.py writes."""
    designs: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return designs


def explorer_design(config: ModelConfig) -> dict[str, Any]:
    """A design as plain data: its distinct layers with their counts, without encoder and multi-token modules.

    A layer that is visited several times gets its own entry, `shared`, with the number of visits. Raises DesignError
    for a design with fields that the page cannot show.
    """
    for path, layer_config in config.expand():
        if field := indexer_field(layer_config.mixer):
            reason = "is not a field of the explorer; leave it out here, and see heddle show for its costs"
            raise DesignError(f"{path}.mixer.{field}", reason)
    data = config.dump()
    for place in ("norm", "residual", "embedding"):
        _check_explored(getattr(config, place), place)
    for path, entry in config.expand():
        _check_explored(entry, path)
    counts = Counter[tuple[MixerConfig | None, FeedforwardConfig | None, int | None]]()
    for (_, each), looped, source in zip(config.expand(), config.looped_layers, config.weight_sources, strict=True):
        counts[each.mixer, each.feedforward, source if looped else None] += 1
    layers = [
        LayerConfig(mixer=mixer, feedforward=feedforward, shared=source is not None).dump() | {"count": count}
        for (mixer, feedforward, source), count in counts.items()
    ]
    for layer in layers:
        layer.pop("repeat")
    names = ("vocab_size", "width", "norm", "residual", "embedding", "head")
    return {name: data[name] for name in names if name in data} | {"layers": layers}


def _check_explored(config: Config, path: str) -> None:
    """Raises DesignError for a part without costs, or with a field that is unknown to the page."""
    fields = {name: getattr(config, name) for name in type(config).model_fields}
    of_kind = {f"{config.kind}.{name}": value for name, value in fields.items()} if isinstance(config, Part) else {}
    unknown = [name.rpartition(".")[2] for name in NOT_EXPLORED if (fields | of_kind).get(name) not in (None, False)]
    if isinstance(config, Part) and cost_function(config.slot, config.kind) is None:
        unknown.append("kind")
    if unknown:
        raise DesignError(f"{path}.{unknown[0]}", "is not known to the explorer; heddle show has the design's costs")
    for name, value in fields.items():
        if isinstance(value, Config):
            _check_explored(value, f"{path}.{name}")


# Common mistakes in implementing parts, as measured in docs/commonly-wrong.md, and the kinds that they concern.


@cache
def mistakes() -> list[dict[str, Any]]:
    """The entries of mistakes.json. title: its heading in docs/commonly-wrong.md. law: the check that fails here.

    An entry without kinds concerns those with its `field`, or all of its slot.
    """
    entries: list[dict[str, Any]] = json.loads(FILE.with_name("mistakes.json").read_text(encoding="utf-8"))
    for entry in entries:
        field = entry.pop("field", None)
        shown = (kind for kind in kinds_of(entry["slot"]) if field is None or field in {f.name for f in kind.fields})
        entry.setdefault("kinds", [kind.kind for kind in shown])
    return entries
