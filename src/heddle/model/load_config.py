"""Read a design: from a YAML, TOML or JSON file, `preset:NAME`, a checkpoint folder, or a dict.

Modules that take long to import, such as torch, are imported only when a design needs them.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from heddle.config import Config, DesignError, Part, Width, field_class, find_kind, is_slot, join, parse_config
from heddle.errors import ConfigError, describe_path, parse_error_reason
from heddle.model.config import refuse_overflow, too_many_layers
from heddle.model.presets import preset
from heddle.progress import print_status

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig


# The YAML and TOML parsers are slow: a file at its limit takes about a second.
MAX_FILE_BYTES = {".json": 4 * 2**20, ".toml": 2**16}
WEIGHT_SUFFIXES = frozenset({".gguf", ".safetensors"})
MAX_YAML_BYTES = 2**20
DEFAULTS = {"norm": {"kind": "rms"}, "residual": {"kind": "pre_norm"}}


def load_config(source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> "ModelConfig":
    """Read a design and apply overrides such as `layers.0.mixer.kv_heads=1`.

    Raises ConfigError (one sentence with the path of the field) for a design that cannot be built.
    """
    data = read_design(source, overrides)
    from heddle.model.config import ModelConfig

    with _refuse_deep_nesting():
        config = parse_config(ModelConfig, _with_defaults(data))
    _try_build(config)
    return config


def with_vocab_size(config: "ModelConfig", vocab_size: int) -> "ModelConfig":
    """Return the config, with this vocab_size if it sets none."""
    return config if config.vocab_size is not None else config.replace(vocab_size=vocab_size)


def read_design(source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the plain data of a design with overrides applied. Raises ConfigError if it is too wide or too deep.

    Nothing else is checked: only `load_config` imports the parts, and torch.
    """
    with _refuse_deep_nesting():
        data = _plain_data(source)
        replacements = [replacement for override in overrides for replacement in apply_override(data, override)]
        _check_limits(data)
    for line in dict.fromkeys(line for replacement in replacements for line in replacement.lines()):
        print_status(line)
    return data


class _Sizes(Config):
    """The field of a design whose limit is checked before its parts are parsed."""

    width: Width


def _check_limits(design: dict[str, Any], path: str = "") -> None:
    """Refuse a width or a number of layers that is too large. Other errors are left to `parse_config`."""
    if "width" in design:
        parse_config(_Sizes, {"width": design["width"]}, path)
    if reason := too_many_layers(_depth(design.get("layers"))):
        raise DesignError(join(path, "layers"), reason)
    if isinstance(design.get("encoder"), dict):
        _check_limits(design["encoder"], join(path, "encoder"))


def _depth(layers: Any) -> int:
    """Count the layers that a list of entries stands for. Invalid entries count as one layer."""
    if not isinstance(layers, list):
        return 1
    depth = 0
    for entry in layers:
        fields = entry if isinstance(entry, dict) else {}
        repeat = fields.get("repeat")
        depth += (repeat if type(repeat) is int and repeat > 0 else 1) * _depth(fields.get("layers"))
    return depth


@contextmanager
def _refuse_deep_nesting() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ConfigError("layers: are nested too deeply to read; use fewer levels, with repeat") from None


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of a design and of its encoder."""
    encoder = data.get("encoder")
    inner = {"encoder": DEFAULTS | encoder} if isinstance(encoder, dict) else {}
    return DEFAULTS | data | inner


def _try_build(config: "ModelConfig") -> None:
    """Build each distinct layer on the meta device, so that parts that do not fit together are refused here."""
    import torch

    from heddle.model.decoder import Decoder

    with refuse_overflow(), torch.device("meta"):
        Decoder(config if config.vocab_size is not None else config.replace(vocab_size=2), distinct_layers_only=True)


def _plain_data(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    if isinstance(source, dict):
        design: dict[str, Any] = json.loads(json.dumps(source))  # a deep copy of plain data
        return design
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a design cannot be read from {source!r}; give a file, preset:NAME, a checkpoint folder or a dict"
        )
    if str(source).startswith("preset:"):
        return preset(str(source).removeprefix("preset:"))
    path = Path(source)
    if describe_path(path) == "is a folder":
        path = _config_in(path)
    data = _read_file(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: is not a table of fields; a design starts with width: …")
    return data


def _config_in(folder: Path) -> Path:
    """Return the path of the config of a checkpoint folder, or of a run's newest checkpoint."""
    steps = sorted((folder / "checkpoints").glob("step-*/config.json"))
    for candidate in (folder / "config.json", *reversed(steps)):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{folder}: has no config.json; give a design file, preset:NAME or a checkpoint folder")


def _read_file(path: Path) -> Any:
    what = describe_path(path)
    if what not in ("is a file", "does not exist"):
        raise ConfigError(f"{path}: {what}; give a YAML, TOML or JSON file, preset:NAME or a checkpoint folder")
    if what == "does not exist":
        hint = f"; did you mean preset:{path}?" if re.fullmatch(r"[a-z_]+-(tiny|small|medium)", str(path)) else ""
        raise ConfigError(f"{path}: no such design file{hint or '; give a file, preset:NAME or a checkpoint folder'}")
    if path.suffix in WEIGHT_SUFFIXES:
        remedy = f"first `heddle import {path if path.suffix == '.gguf' else path.parent} FOLDER`, then give the folder"
        raise ConfigError(f"{path}: contains weights, not a design; {remedy}")
    try:
        limit = MAX_FILE_BYTES.get(path.suffix, MAX_YAML_BYTES)
        if path.stat().st_size > limit:
            raise ConfigError(f"{path}: is larger than {limit} bytes; a design is a small text file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; a design is a YAML, TOML or JSON file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as TOML ({parse_error_reason(error)}); fix the file") from None
    if path.suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON ({parse_error_reason(error)}); fix the file") from None

    return parse_yaml(text, str(path))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key '{key:.60}' is given twice")
        data[key] = value
    return data


LIST = re.compile(r"\d+(,\d+)+")  # of entries, in the path of an override


def apply_override(data: dict[str, Any], override: str) -> "list[KindReplacement]":
    """Set `path.to.field=value` in plain data, in place. `layers.*.` applies to every entry, `layers.0,2.` to some.

    null removes a field. `layers.*.mixer` also reaches the layers of groups. A word in place of a part sets its kind.
    Returns the parts whose kind changed. Raises ConfigError if the path or the value cannot be read.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"override '{override}': expected path.to.field=value, such as layers.0.mixer.heads=8")

    value = parse_yaml(text, f"override '{override}'")
    choices = [step.split(",") if LIST.fullmatch(step) else [step] for step in path.split(".")]
    paths = [each for steps in product(*choices) for each in _in_groups(data, list(steps), override, "")]
    return [replacement for each in paths for replacement in _override(data, each, value, override)]


def _override(data: dict[str, Any], steps: list[str], value: Any, override: str) -> "list[KindReplacement]":
    if isinstance(value, str) and steps[-1] != "kind":
        steps = [*steps, "kind"] if is_part_path(data, steps) else steps
    replacements = []
    if (steps[-1] == "kind" and isinstance(value, str)) or _crosses_word(data, steps[:-1]):
        replacements = replace_kinds(data, steps, value)
    _set(data, steps, value, override, "")
    return replacements


def _in_groups(node: Any, steps: list[str], override: str, at: str) -> Iterator[list[str]]:
    """The paths that a path means: one, but for `*` over entries of which some are groups of layers."""
    step, rest = steps[0], steps[1:]
    if isinstance(node, dict) and rest:
        inner = f"{at}.{step}" if at else step
        yield from ([step, *path] for path in _in_groups(node.get(step), rest, override, inner))
    elif isinstance(node, list) and rest and any(map(_is_group, node)) and rest[0] in ("mixer", "feedforward"):
        indices = range(len(node)) if step == "*" else [int(step)] if step.isdecimal() and len(step) < 10 else []
        for index in indices:
            if index >= len(node) or not _is_group(node[index]):
                yield [str(index), *rest]
            elif step == "*":
                inner = f"{at}.{index}.layers"
                paths = _in_groups(node[index]["layers"], ["*", *rest], override, inner)
                yield from ([str(index), "layers", *path] for path in paths)
            else:
                one, field = f"{at}.{index}.layers.0", ".".join(rest)
                problem = f"{at}[{index}] is a group of layers; name one of them, such as {one}.{field}, or all: "
                raise DesignError(f"override '{override}'", f"{problem}{at}.*.{field}")
        if not indices:
            yield steps
    else:
        yield steps


def _is_group(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("layers"), list)


def _crosses_word(node: Any, steps: list[str]) -> bool:
    """Whether a path goes through a word, which may be a part without fields."""
    if isinstance(node, list):
        return any(_crosses_word(item, steps[1:]) for item in node)
    return isinstance(node, str) or (
        isinstance(node, dict) and bool(steps) and _crosses_word(node.get(steps[0]), steps[1:])
    )


def _set(node: Any, steps: list[str], value: Any, override: str, at: str) -> None:
    step, rest = steps[0], steps[1:]
    if isinstance(node, list):
        if step != "*" and not (step.isdecimal() and len(step) < 10 and int(step) < len(node)):
            where = _entry_of_layer(node, int(step)) if at == "layers" and step.isdecimal() and len(step) < 10 else ""
            entries = f"0 to {len(node) - 1}, a list such as 0,2, or *"
            raise ConfigError(f"override '{override}': {at} has entries {entries}, not '{step}'{where}")
        for index in range(len(node)) if step == "*" else [int(step)]:
            if rest:
                _set(node[index], rest, value, override, f"{at}[{index}]")
            else:
                node[index] = deepcopy(value)
    elif isinstance(node, dict):
        if not rest:
            node[step] = deepcopy(value)  # a copy for each entry: a later override may change only one
        else:
            if step not in node or node[step] is None:
                node[step] = DEFAULTS[step].copy() if at in ("", "encoder") and step in DEFAULTS else {}
            _set(node[step], rest, value, override, f"{at}.{step}" if at else step)
    else:
        raise DesignError(f"override '{override}'", f"{at} is {node!r}, which has no field '{step}'; set {at} first")


def _entry_of_layer(entries: list[Any], layer: int) -> str:
    """Where the layer of a number is, for those who take an entry's number for a layer's; "" without such a layer."""
    ends = list(accumulate(_depth([entry]) for entry in entries))
    entry = next((index for index, end in enumerate(ends) if layer < end), None)
    return "" if entry is None else f"; an entry is a group of equal layers: layer {layer} is in entry {entry}"


# Parse YAML by its 1.2 core rules: `1e-4` is a number, `off` and `1:30` are text, `010` is ten.
#
# A repeated key is an error.


MAX_YAML_VALUES = 20_000  # the parser reads about 50,000 a second, and half as many on a busy machine


class _Yaml(yaml.SafeLoader):
    """YAML 1.2 core: no sexagesimals, no octal by a leading zero, no yes/no/on/off, no dates, no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r:.60} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key '{key:.60}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.values += 1
        if self.values > MAX_YAML_VALUES:
            problem = f"more than {MAX_YAML_VALUES} keys and values; write fewer layers, with repeat"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        event, mark = self.peek_event(), self.peek_event().start_mark
        if isinstance(event, yaml.AliasEvent):
            problem = "aliases (*name) are not supported; write it out, or use repeat"
            raise yaml.MarkedYAMLError(None, None, problem, mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(None, None, "tags (!name) are not supported", mark)
        return super().compose_node(parent, index)


def _integer(loader: _Yaml, node: yaml.ScalarNode) -> int:
    text = node.value
    return int(text[2:], 16) if text.startswith("0x") else int(text)


_Yaml.yaml_implicit_resolvers = {}
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Yaml.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?[0-9]{1,4000}|0x[0-9a-fA-F]{1,4000})$"),
    list("-+0123456789"),
)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)
_Yaml.add_constructor("tag:yaml.org,2002:int", _integer)


def parse_yaml(text: str, name: str) -> Any:
    """Return the plain data of a YAML text. Raises ConfigError with the line."""
    try:
        return _Yaml(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}, line {line}: {error.problem}; fix the YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, yaml.YAMLError) else parse_error_reason(error)
        raise ConfigError(f"{name}: cannot be read as YAML ({reason}); fix the file") from None


def parse_values(text: str, name: str) -> list[tuple[str, Any]]:
    """Parse comma-separated values, a YAML list without brackets. Returns (text, value) for each.

    Raises ConfigError if there is no value, or none between two commas.
    """
    written = f"[{text}]"
    data = parse_yaml(written, name) if text.strip() else []
    if not isinstance(data, list) or not data or text.rstrip().endswith(","):
        raise ConfigError(f"{name}: a value is empty; give comma-separated values, null for a field that is off")
    node = _Yaml(written).get_single_node()
    assert isinstance(node, yaml.SequenceNode)
    pieces = [written[item.start_mark.index : item.end_mark.index] for item in node.value]
    return list(zip(pieces, data, strict=True))


# When an override changes the kind of a part, the part gets the fields that its new kind needs.
#
# Fields that both kinds have are kept. The new kind's `default_fields` adds the others that it needs in the old one's
# place. Fields that do not fit it, such as a rotation of more dims than it rotates, are left out.


@dataclass(frozen=True, eq=False)
class KindReplacement:
    """A part in a design's plain data whose kind changed.

    chosen: fields that were added because the design did not give them. dropped: the paths of fields that did not fit.
    missing: fields of the old part that the new kind does not have, with their values. kept: fields of the old part
    that the new kind would do without, and that are not at its defaults.
    """

    part: dict[str, Any]
    kind: str
    chosen: dict[str, Any]
    dropped: tuple[str, ...]
    missing: dict[str, Any]
    kept: dict[str, Any]

    def lines(self) -> list[str]:
        """The changes as status lines; fields that were set afterwards are left out."""
        unset = {name: value for name, value in self.chosen.items() if self.part.get(name, value) == value}
        kept = {name: value for name, value in self.kept.items() if self.part.get(name) == value}
        parts = [f"{_name_values(unset)} chosen; set them to change"] if unset else []
        parts += [f"{_name_values(self.missing)} dropped, as {self.kind} has no such field"] if self.missing else []
        parts += [f"{_name_values(kept)} kept"] if kept else []
        lines = [f"{self.kind}: {'; '.join(parts)}"] if parts else []
        return lines + (
            [f"{self.kind}: {', '.join(self.dropped)} left out, as it does not fit"] if self.dropped else []
        )


def _name_values(fields: dict[str, Any]) -> str:
    words = {name: value.get("kind", value) if isinstance(value, dict) else value for name, value in fields.items()}
    return ", ".join(f"{name} {value}" for name, value in words.items())


def is_part_path(data: dict[str, Any], steps: list[str]) -> bool:
    """Whether the field at a path holds a part, or may hold one."""
    from heddle.model.config import ModelConfig

    holders = _parts_at(ModelConfig, data, steps[:-1], None)
    return any((cls := _field_class(base, node, steps[-1])) and issubclass(cls, Part) for node, base, _ in holders)


def replace_kinds(data: dict[str, Any], steps: list[str], kind: Any) -> list[KindReplacement]:
    """Expand words on a path to parts, in place; if the path ends at a kind, change the parts there to it.

    Returns the changes. An unknown kind is refused later.
    """
    from heddle.model.config import ModelConfig

    replacements = []
    for node, base, width in _parts_at(ModelConfig, data, steps[:-1], data.get("width")):
        if is_slot(base) and steps[-1] == "kind":
            replacement = _replace_kind(node, base, kind, width)
            replacements += [] if replacement is None else [replacement]
    return replacements


def _parts_at(cls: Any, node: Any, steps: list[str], width: Any) -> list[tuple[dict[str, Any], Any, Any]]:
    """The tables at a path, each with its config class (or its slot) and the width of its design."""
    if isinstance(node, list):
        chosen = [item for index, item in enumerate(node) if steps and steps[0] in ("*", str(index))]
        return [part for item in chosen for part in _parts_at(cls, item, steps[1:], width)]
    if not isinstance(node, dict) or cls is None:
        return []
    if not steps:
        return [(node, cls, width)]
    inner, inner_class = node.get(steps[0]), _field_class(cls, node, steps[0])
    if isinstance(inner, str) and inner_class is not None and issubclass(inner_class, Part):
        inner = node[steps[0]] = {"kind": inner}
    return _parts_at(inner_class, inner, steps[1:], node.get("width", width))


def _field_class(cls: type[Config], node: dict[str, Any], name: str) -> type[Config] | None:
    """The config class, or the slot, that a field holds. None if it holds none, or if its kind is unknown."""
    if issubclass(cls, Part) and is_slot(cls):
        kind = find_kind(cls.slot, node.get("kind"))
        if kind is None:
            return None
        cls = kind
    return field_class(cls, name)


def _replace_kind(node: dict[str, Any], base: type[Part], kind: str, width: Any) -> KindReplacement | None:
    """Change a part's fields for another kind, in place. None if none had to change; errors are reported later."""
    new, old = find_kind(base.slot, kind), find_kind(base.slot, node.get("kind"))
    if new is None or old is None or not issubclass(new, base):
        return None
    if new is old and kind not in new.aliases and node["kind"] not in old.aliases:
        return None
    own = {name: value for name, value in node.items() if name == "kind" or name in old.model_fields}
    explicit = {name: value for name, value in node.items() if name not in own}
    previous = _build_or_none(base, own, width) if type(width) is int and 0 < width <= 2**20 else None
    if previous is None or set(explicit) - set(new.model_fields):
        for name in set(old.model_fields) - set(new.model_fields):
            node.pop(name, None)
        return None
    carried = {name: value for name, value in _explicit_fields(previous, node).items() if name in new.model_fields}
    defaults = {} if new is old else new.default_fields(previous, width)
    unfit = tuple(name for name, value in defaults.items() if value is None and carried.pop(name, None) is not None)
    defaults = {name: value for name, value in defaults.items() if value is not None}
    fields = {**carried, **defaults, **explicit}
    optional = {name for name in carried if not new.model_fields[name].is_required()}
    dropped = (*unfit, *_drop_unfit(base, kind, fields, optional, width))
    chosen = {name: value for name, value in defaults.items() if name not in explicit and carried.get(name) != value}
    node.clear()
    node |= {"kind": kind, **fields}
    config = _build_or_none(base, node, width)
    implied = set() if config is None else config.model_fields_set
    chosen |= {
        name: getattr(config, name) for name in sorted(implied - fields.keys()) if _is_free(new, kind, fields, name)
    }
    kept = {
        name: deepcopy(fields[name])
        for name in carried
        if name in optional & fields.keys() - chosen.keys() - explicit.keys()
        and fields[name] != new.model_fields[name].default
    }
    own.pop("kind")
    missing = {name: value for name, value in own.items() if name not in new.model_fields and value is not None}
    dropped = tuple(path for path in dropped if path not in implied)
    return KindReplacement(node, kind, chosen, dropped, missing, kept)


def _is_free(new: type[Part], alias: str, fields: dict[str, Any], name: str) -> bool:
    """Whether a field that an alias adds could have another value: kv_heads under gqa, not under mqa."""
    try:
        new.fields_of_alias(alias, {**fields, name: object()})
    except DesignError:
        return False
    return True


def _build_or_none(base: type[Part], data: dict[str, Any], width: int) -> Part | None:
    """The part's config, if it can be built."""
    try:
        config = parse_config(base, data)
        _check_fit(config, width)
    except ConfigError:
        return None
    return config


def _explicit_fields(part: Part, node: dict[str, Any]) -> dict[str, Any]:
    """The fields that a part was given, or implied by its alias, as the design writes them."""
    from heddle.parts.mixers import MixerConfig

    inner = part.template if isinstance(part, MixerConfig) else part
    written = deepcopy(node) if inner is part else {}
    return {name: written.get(name, value) for name, value in inner.dump().items() if name in inner.model_fields_set}


def _drop_unfit(base: type[Part], kind: str, fields: dict[str, Any], optional: set[str], width: int) -> tuple[str, ...]:
    """Remove the optional fields that the new kind refuses, in place, and return their paths."""
    dropped: list[str] = []
    while True:
        try:
            _check_fit(parse_config(base, {"kind": kind, **deepcopy(fields)}), width)
        except DesignError as error:
            path = _optional_path(fields, optional, error.path)
            if not path:
                return tuple(dropped)
            table = fields
            for name in path[:-1]:
                table = table[name]
            del table[path[-1]]
            dropped.append(".".join(path))
        else:
            return tuple(dropped)


def _optional_path(fields: dict[str, Any], optional: set[str], path: str) -> list[str]:
    """The field at an error's path, or the nearest one around it, if it may be left out. Else nothing."""
    names: list[str] = []
    table: Any = fields
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        if not isinstance(table, dict) or name not in table:
            break
        names.append(name)
        table = table[name]
    return names if names and names[0] in optional and names[-1] != "kind" else []


def _check_fit(part: Part, width: int) -> None:
    """Build a mixer or a feed-forward on the meta device. Raises DesignError for a field that does not fit."""
    import torch

    from heddle.parts.build import BuildContext
    from heddle.parts.feedforwards import FeedforwardConfig
    from heddle.parts.mixers import MixerConfig
    from heddle.parts.norms import NormConfig

    if isinstance(part, MixerConfig | FeedforwardConfig):
        norm: NormConfig = parse_config(NormConfig, {"kind": "rms"})  # type: ignore[type-abstract]
        with refuse_overflow(), torch.device("meta"):
            part.build(BuildContext(width, norm))
