"""Find the family that matches a design exactly, or else the smallest change that would make one match.

A family's `write_config` makes the config nearest to a design; `read_config` turns it back into the design that the
family would compute. If the two designs agree, the family matches. If not, their differences are the mismatches.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from heddle.config import Config, DesignError, parse_config
from heddle.errors import ConfigError, HeddleError
from heddle.exchange.config_reader import NOTED_FIELDS, short_repr
from heddle.exchange.family import Family, families
from heddle.model.config import ModelConfig, MultiTokenConfig
from heddle.model.load_config import DEFAULTS

HEDDLE = "heddle"
# Fields that only change how a model is trained, not what a trained model computes.
TRAINING_FIELDS = frozenset(
    {
        "initialization",
        "dropout",
        "drop_path",
        "drop_path_first",
        "capacity_factor",
        "aux_loss",
        "z_loss",
        "bias_update",
    }
)
MISSING = "absent"
MAX_LISTED = 6  # mismatches that a report lists
KIND_WEIGHT = 8  # a different kind of part counts as much as so many different fields


class Mismatch(NamedTuple):
    """A field of a design that a family cannot express: its path, its value, and the value that the family requires."""

    path: str
    actual: Any
    required: Any

    @property
    def weight(self) -> int:
        """How much it counts when families are ranked: a different kind of part counts more than a different value."""
        return KIND_WEIGHT if self.path.endswith("kind") else 1

    def __str__(self) -> str:
        """The override that removes it, such as `residual.kind=pre_norm`."""
        return f"{self.path}={'null' if self.required == MISSING else _display(self.required)}"


@dataclass(frozen=True)
class FamilyMatch:
    """A family, the config of a design in it, and the mismatches (none: the family matches exactly)."""

    family: Family
    config: dict[str, Any]
    mismatches: tuple[Mismatch, ...]

    @property
    def architecture(self) -> str:
        """The class of transformers that reads the config."""
        return str(self.config.get("architectures", [self.family.architecture])[0])


@dataclass(frozen=True)
class MatchReport:
    """The class that a design exports as. If it is heddle's own: the reasons, the nearest class, and the overrides."""

    architecture: str
    reasons: tuple[str, ...] = ()
    nearest: str | None = None
    changes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The report as lines of text."""
        lines = [f"exports as: {self.architecture}"]
        if self.nearest is not None:
            lines += [f"no native family: {', '.join(self.reasons[:MAX_LISTED])}{_and_more(self.reasons)}"]
            lines += [f"nearest: {self.nearest}, with {' '.join(self.changes[:MAX_LISTED])}{_and_more(self.changes)}"]
        return lines


def match_family(design: ModelConfig, family: Family, allow_base_class: bool = True) -> FamilyMatch:
    """Compare a design with what a family can express.

    allow_base_class: whether its class without a language head, which gives no logits, counts for a design whose head
    is its embedding.
    """
    config = _nearest_config(design, family, allow_base_class)
    try:
        return FamilyMatch(family, config, tuple(differences(design, exported_design(design, config, family))))
    except HeddleError as error:
        path = error.path if isinstance(error, DesignError) else "design"
        return FamilyMatch(family, config, (Mismatch(path, MISSING, MISSING),) * 1000)  # ranked last


def _nearest_config(design: ModelConfig, family: Family, allow_base_class: bool) -> dict[str, Any]:
    """The config of a family that comes nearest to a design."""
    config = family.write_config(design.resolved())
    if family.multi_token is not None and (modules := family.multi_token.fitting(design)) is not None:
        config |= {family.multi_token.count_field: modules.depth}
    if not allow_base_class:
        config.pop("architectures", None)
    return config


def design_from_config(
    config: dict[str, Any], family: Family, source: str = "config.json", noted: list[str] | None = None
) -> ModelConfig:
    """The design of a config. Raises ConfigError naming the field that is unknown, unsupported or wrong.

    Modules for multi-token prediction are not in it. noted: collects the names of fields that are set but change
    nothing that the model computes.
    """
    return _parse(_read(config, family, source, noted), source)


def _read(
    config: dict[str, Any], family: Family, source: str = "config.json", noted: list[str] | None = None
) -> dict[str, Any]:
    """The design of a config as plain data, as in `design_from_config`."""
    reader = family.reader(config, source)
    try:
        data = family.read_config(reader)
    except HeddleError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A value that no check foresaw, such as a table in place of a number. The field read last is the best hint.
        hint = f"{short_repr(str(error))}, after '{reader.last_read}' was read"
        raise ConfigError(
            f"{source}: its fields do not make a {family.architecture} ({hint}); restore the file"
        ) from error
    if family.multi_token is not None:
        reader.optional(family.multi_token.count_field)
    reader.note(*NOTED_FIELDS)
    reader.check_all_read()
    if noted is not None:
        noted += reader.noted
    return data


def _parse(data: dict[str, Any], source: str = "config.json") -> ModelConfig:
    try:
        return parse_config(ModelConfig, DEFAULTS | data)
    except DesignError as error:
        raise DesignError(error.path, f"{error.reason} (as {source} makes it)") from error


def exported_design(design: ModelConfig, config: dict[str, Any], family: Family) -> ModelConfig:
    """The design that a family reads from the config it writes; an import finds multi-token modules by tensors."""
    modules = None if family.multi_token is None else family.multi_token.fitting(design)
    return _with_modules(design_from_config(config, family), modules)


def _with_modules(exported: ModelConfig, modules: MultiTokenConfig | None) -> ModelConfig:
    return exported if modules is None else exported.replace(multi_token=modules)


def exact_matches(
    design: ModelConfig, candidates: Iterable[tuple[Family, bool]]
) -> Iterator[tuple[FamilyMatch, ModelConfig]]:
    """The matches without a mismatch, each with the design as the family exports it.

    candidates: families, and whether the base class of each counts. Most that do not match show in plain data, before
    a design is built; of families that read the same data, it is built and compared once.
    """
    exported: dict[tuple[str, MultiTokenConfig | None], ModelConfig | None] = {}  # None: it differs
    for family, allow_base_class in candidates:
        config = _nearest_config(design, family, allow_base_class)
        try:
            data = _read(config, family)
            modules = None if family.multi_token is None else family.multi_token.fitting(design)
            if (key := (repr(data), modules)) not in exported:
                exported[key] = None
                if _kinds(data) <= _kinds_of(design):
                    other, entries = _with_modules(_parse(data), modules), [""] * design.resolved().depth
                    if next(_mismatches(design, other, entries, training=False), None) is None:
                        exported[key] = other
        except HeddleError:
            continue
        if (found := exported[key]) is not None:
            yield FamilyMatch(family, config, ()), found


@lru_cache(maxsize=1)  # of the design that is compared with every family
def _kinds_of(design: ModelConfig) -> frozenset[tuple[str, str]]:
    return _kinds([design.dump(), design.resolved().dump()])


def _kinds(data: Any, field: str = "") -> frozenset[tuple[str, str]]:
    """The kinds that plain data of a design names, each with its field, such as `("norm", "rms_norm")`."""
    if isinstance(data, list):
        return frozenset().union(*(_kinds(item, field) for item in data))
    if not isinstance(data, dict):
        return frozenset()
    own = {(field, data["kind"])} if isinstance(data.get("kind"), str) else set()
    return frozenset(own).union(*(_kinds(value, name) for name, value in data.items()))


def _matches(design: ModelConfig, preferred: str | None) -> Iterator[FamilyMatch]:
    """The match of every family but heddle's own: `preferred`, then the others in order of priority.

    A base class counts only for `preferred`.
    """
    return (match_family(design, *candidate) for candidate in _candidates(preferred))


def _candidates(preferred: str | None) -> list[tuple[Family, bool]]:
    """The families of `_matches` in their order, and whether the base class of each counts."""
    items = sorted(families().items(), key=lambda item: item[0] != preferred)
    return [(family, name == preferred) for name, family in items if name != HEDDLE]


def _total_weight(match: FamilyMatch) -> int:
    return sum(mismatch.weight for mismatch in match.mismatches)


def best_match(design: ModelConfig, preferred: str | None = None) -> FamilyMatch:
    """The family that an export uses: `preferred` if it matches exactly, else another that does, else heddle's own."""
    exact = (match for match, _ in exact_matches(design, _candidates(preferred)))
    return next(exact, None) or match_family(design, families()[HEDDLE])


def family_losses(design: ModelConfig, preferred: str | None = None) -> dict[str, tuple[str, ...]]:
    """The training fields that each family loses, of the families that match a design exactly, by model_type.

    First comes the default of an export, `preferred` if it fits; heddle's own family loses nothing.
    """
    heddle = match_family(design, families()[HEDDLE])
    exact = [
        *exact_matches(design, _candidates(preferred)),
        (heddle, exported_design(design, heddle.config, heddle.family)),
    ]
    lost = {id(exported): differences(design, exported, training=True) for _, exported in exact}
    return {
        match.family.model_type: tuple(f"{each.path}={_display(each.actual)}" for each in lost[id(exported)])
        for match, exported in exact
    }


def family_lines(design: ModelConfig, preferred: str | None = None) -> list[str]:
    """The lines of `match_report`; for a design that fits families, all of them, each with what it loses."""
    report = match_report(design, preferred)
    lines = report.lines()
    losses = family_losses(design, preferred) if report.nearest is None else {}
    if exact := [model_type for model_type, lost in losses.items() if not lost]:
        lines.append(f"  --family: {', '.join(exact)}")
    for model_type, lost in losses.items():
        if lost:
            without = f"{', '.join(lost[:MAX_LISTED])}{_and_more(lost)}"
            lines.append(f"  {model_type}: {families()[model_type].architecture}, without {without}")
    return lines


def chosen_match(design: ModelConfig, model_type: str) -> FamilyMatch:
    """The match of the family that a user chose. Raises ConfigError if there is none, or if the design does not fit."""
    if model_type not in families():
        raise ConfigError(f"family {short_repr(model_type)}: is not supported; choose {', '.join(families())}")
    match = match_family(design, families()[model_type])
    if match.mismatches:
        reasons = ", ".join(describe_mismatch(design, each) for each in match.mismatches[:MAX_LISTED])
        fitting = ", ".join(family_losses(design))
        raise ConfigError(f"family '{model_type}': cannot express this design ({reasons}); choose {fitting}")
    return match


def match_report(design: ModelConfig, preferred: str | None = None) -> MatchReport:
    """Which class a design exports as, and if it is heddle's own, why no other family matches.

    preferred: the family that the model was imported from, as in `best_match`.
    """
    matches = []
    for match in _matches(design, preferred):
        if not match.mismatches:
            return MatchReport(match.architecture)
        matches.append(match)
    nearest = min(matches, key=_total_weight)
    reasons = tuple(describe_mismatch(design, mismatch) for mismatch in nearest.mismatches)
    changes = tuple(str(mismatch) for mismatch in nearest.mismatches)
    return MatchReport(families()[HEDDLE].architecture, reasons, nearest.architecture, changes)


def differences(design: ModelConfig, other: ModelConfig, training: bool = False) -> list[Mismatch]:
    """Where two designs compute differently, by path of the field in `design` as the user wrote it.

    training: compare the fields of training as well.
    Layers that one entry repeats have the path of the entry. A difference in every entry is listed once, as `layers.*`.
    """
    paths = [path for path, _ in design.expand()]
    entries = [_dotted(path) for path in paths]
    by_entry: dict[str, dict[Mismatch, None]] = {}
    for path, actual, required in _mismatches(design, other, entries, training):
        entry, field = path, ""
        if path.startswith("layers."):
            _, index, field = path.split(".", 2)
            entry = entries[int(index)]
            if field == "shared" and actual:  # that of an entry around it
                entry = _dotted(design.shared_entry(paths[int(index)]))
        mismatch = Mismatch(
            field,
            actual if _is_scalar(actual) else repr(actual),
            required if _is_scalar(required) else repr(required),
        )
        by_entry.setdefault(entry, {})[mismatch] = None
    has_flat_entries = all(entry.count(".") == 1 for entry in entries)
    shared = _shared_by_all([by_entry.get(entry, {}) for entry in entries]) if has_flat_entries else []
    result = [mismatch._replace(path=f"layers.*.{mismatch.path}") for mismatch in shared]
    for entry, mismatches in by_entry.items():
        result += [
            mismatch._replace(path=f"{entry}.{mismatch.path}" if mismatch.path else entry)
            for mismatch in mismatches
            if mismatch not in shared
        ]
    return result


def describe_mismatch(design: ModelConfig, mismatch: Mismatch) -> str:
    """A field and its value, and the layers of its entry if layer and entry numbers differ."""
    paths = [_dotted(path) for path, _ in design.expand()]
    entry = ".".join(mismatch.path.split(".")[:2])
    layers = [index for index, path in enumerate(paths) if path == entry]
    where = ""
    if (layers and f"layers.{layers[0]}" != entry) or len(layers) > 1:
        numbers = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}–{layers[-1]}"
        where = f" (entry {entry.removeprefix('layers.')}, {numbers})"
    return f"{mismatch.path}{where} is {_display(mismatch.actual)}"


def _dotted(path: str) -> str:
    return path.replace("[", ".").replace("]", "")


def _mismatches(design: ModelConfig, other: ModelConfig, entries: list[str], training: bool) -> Iterator[Mismatch]:
    """The mismatches of two designs. Layers of one entry that differ in the same way are compared once."""
    first, second = design.resolved(), other.resolved()
    if first.depth != second.depth:
        yield from _compare(inference_fields(first), inference_fields(second), "")
        return
    fields, other_fields = _distinct_fields(first, training), _distinct_fields(second, training)
    for name in fields | other_fields:
        if name != "layers":
            yield from _compare(fields.get(name, MISSING), other_fields.get(name, MISSING), name)
            continue
        compared = set()
        for index, looped in enumerate(first.looped_layers):
            if first.weight_sources[index] != second.weight_sources[index]:
                yield Mismatch(f"layers.{index}.shared", looped, second.looped_layers[index])
        for index, (entry, *pair) in enumerate(zip(entries, first.layer_order, second.layer_order, strict=True)):
            if (entry, *pair) not in compared:
                compared.add((entry, *pair))
                yield from _compare(fields[name][pair[0]], other_fields[name][pair[1]], f"layers.{index}")


@lru_cache(maxsize=2)  # of the design that is compared with every family, and of the last family's
def _distinct_fields(design: ModelConfig, training: bool) -> dict[str, Any]:
    """As `inference_fields` of a resolved design, with each different layer once; `training`: all its fields."""
    layers = [layer.config.replace(repeat=1, shared=False) for layer in design.distinct_layers]
    fields: dict[str, Any] = {"layers": [layer.dump(with_later_fields=True) for layer in layers]}
    for name in (name for name in type(design).model_fields if name != "layers"):
        value = getattr(design, name)
        if value is not None:
            fields[name] = value.dump(with_later_fields=True) if isinstance(value, Config) else value
    plain: dict[str, Any] = fields if training else _without_training_fields(fields)
    return plain


def _shared_by_all(layers: list[dict[Mismatch, None]]) -> list[Mismatch]:
    """The mismatches that each of two or more layers has."""
    if len(layers) < 2:
        return []
    return [mismatch for mismatch in layers[0] if all(mismatch in layer for layer in layers)]


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def inference_fields(design: ModelConfig) -> dict[str, Any]:
    """The fields that decide what a trained model computes, as plain data with every default filled in."""
    data: dict[str, Any] = _without_training_fields(design.resolved().dump(with_later_fields=True))
    return data


def _without_training_fields(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_training_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    fields = {name: _without_training_fields(item) for name, item in value.items() if name not in TRAINING_FIELDS}
    return fields | ({"bias_update": 0.0} if "bias_update" in value else {})


def _compare(actual: Any, required: Any, path: str) -> Iterator[Mismatch]:
    if isinstance(actual, dict) and isinstance(required, dict) and actual.get("kind") == required.get("kind"):
        for name in actual | required:
            field = f"{path}.{name}" if path else name
            yield from _compare(actual.get(name, MISSING), required.get(name, MISSING), field)
    elif isinstance(actual, dict) and isinstance(required, dict):
        yield Mismatch(f"{path}.kind", actual.get("kind"), required.get("kind"))
    elif isinstance(actual, list) and isinstance(required, list) and len(actual) == len(required):
        for index, (item, required_item) in enumerate(zip(actual, required, strict=True)):
            yield from _compare(item, required_item, f"{path}.{index}")
    elif not _equal(actual, required):
        yield Mismatch(path, actual, required)


def _equal(a: Any, b: Any) -> bool:
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return math.isclose(a, b, rel_tol=1e-12) if are_numbers else type(a) is type(b) and a == b


def _and_more(items: tuple[str, ...]) -> str:
    """How many items a list of MAX_LISTED leaves out, in parentheses."""
    return f" (and {len(items) - MAX_LISTED} more)" if len(items) > MAX_LISTED else ""


def _display(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("kind", "a table"))
    if isinstance(value, list):
        return f"[{len(value)} entries]"
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else f"{value}"
