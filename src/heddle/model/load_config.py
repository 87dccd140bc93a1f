"""Read a design: from a YAML, TOML or JSON file, `preset:NAME`, a checkpoint folder, or a dict.

YAML is read by its 1.2 core rules: `1e-4` is a number, `off` and `1:30` are text, `010` is ten. A repeated key is an
error.
"""

import json
import re
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from heddle.config import Config, DesignError, field_class, fields_of, parse_config
from heddle.errors import ConfigError
from heddle.model.config import MAX_LAYERS, ModelConfig
from heddle.model.presets import preset

MAX_FILE_BYTES = 4 * 2**20
MAX_YAML_VALUES = 30_000  # the parser reads about 50,000 a second
DEFAULTS = {"norm": {"kind": "rms"}, "residual": {"kind": "pre_norm"}}


class _Yaml(yaml.SafeLoader):
    """YAML 1.2 core: no sexagesimals, no octal by a leading zero, no yes/no/on/off, no dates, no duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key '{key}' is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.values += 1
        if self.values > MAX_YAML_VALUES:
            problem = f"more than {MAX_YAML_VALUES} keys and values; write fewer layers, with repeat"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                None,
                None,
                "an alias (*name) is not read; write it out, or use repeat",
                self.peek_event().start_mark,
            )
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
        raise ConfigError(f"{name}, line {line}: {error.problem}; mend the YAML") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: cannot be read as YAML ({str(error).splitlines()[0]}); mend the file") from None


def parse_values(text: str, name: str) -> list[tuple[str, Any]]:
    """Parse comma-separated values, a YAML list without brackets. Returns (text, value) for each.

    Raises ConfigError if there is no value, or none between two commas.
    """
    written = f"[{text}]"
    data = parse_yaml(written, name) if text.strip() else []
    if not isinstance(data, list) or not data or text.rstrip().endswith(","):
        raise ConfigError(f"{name}: a value is empty; give values between commas, null for a field that is off")
    node = _Yaml(written).get_single_node()
    assert isinstance(node, yaml.SequenceNode)
    pieces = [written[item.start_mark.index : item.end_mark.index] for item in node.value]
    return list(zip(pieces, data, strict=True))


def load_config(source: str | Path | dict[str, Any], overrides: Sequence[str] = ()) -> ModelConfig:
    """Read a design and apply overrides such as `layers.0.mixer.kv_heads=1`.

    Raises ConfigError (one sentence with the path of the field) for a design that cannot be built.
    """
    try:
        data = read_design(source)
        for override in overrides:
            apply_override(data, override)
        _check_entries(data)
        config = parse_config(ModelConfig, _with_defaults(data))
    except RecursionError:
        raise ConfigError("layers: nest too deeply to be read; write fewer levels, with repeat") from None
    _try_build(config)
    return config


def _check_entries(data: dict[str, Any]) -> None:
    """Refuse too many entries of layers before any is decoded. Each stands for at least one layer."""
    encoder = data.get("encoder")
    designs = {"layers": data, "encoder.layers": encoder if isinstance(encoder, dict) else {}}
    for path, design in designs.items():
        entries, pending = 0, [design.get("layers")]
        while pending:
            layers = pending.pop()
            for layer in layers if isinstance(layers, list) else ():
                nested = layer.get("layers") if isinstance(layer, dict) else None
                entries += nested is None
                pending.append(nested)
        if entries > MAX_LAYERS:
            raise ConfigError(f"{path}: has {entries} entries; at most {MAX_LAYERS} layers are built")


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of a design and of its encoder."""
    encoder = data.get("encoder")
    inner = {"encoder": DEFAULTS | encoder} if isinstance(encoder, dict) else {}
    return DEFAULTS | data | inner


def _try_build(config: ModelConfig) -> None:
    """Build each distinct layer on the meta device, so that parts that do not fit together are refused here."""
    import torch

    from heddle.model.decoder import Decoder, refuse_overflow

    with refuse_overflow(), torch.device("meta"):
        Decoder(config if config.vocab_size is not None else config.replace(vocab_size=2), distinct_layers_only=True)


def read_design(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """Return the plain data of a design, not yet validated."""
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
    if path.is_dir():
        path = _config_in(path)
    data = _read_file(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds no table of fields; a design starts with width: …")
    return data


def _config_in(folder: Path) -> Path:
    """Return the path of the config of a checkpoint folder, or of a run's newest checkpoint."""
    steps = sorted((folder / "checkpoints").glob("step-*/config.json"))
    for candidate in (folder / "config.json", *reversed(steps)):
        if candidate.is_file():
            return candidate
    raise ConfigError(f"{folder}: holds no config.json; name a design file, preset:NAME or a checkpoint folder")


def _read_file(path: Path) -> Any:
    if not path.is_file():
        hint = f"; did you mean preset:{path}?" if re.fullmatch(r"[a-z_]+-(tiny|small|medium)", str(path)) else ""
        raise ConfigError(f"{path}: no such design file{hint or '; name a file, preset:NAME or a checkpoint folder'}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; a design is a small text file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text; a design is a YAML, TOML or JSON file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as TOML ({error}); mend the file") from None
    if path.suffix == ".json":
        try:
            return json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON ({error}); mend the file") from None
    return parse_yaml(text, str(path))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key '{key}' is given twice")
        data[key] = value
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set `path.to.field=value` in plain data, in place. `layers.*.` applies to every entry, null removes a field.

    A new `kind` keeps the fields that both kinds have and drops the others.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"override '{override}': expected path.to.field=value, such as layers.0.mixer.heads=8")
    steps, value = path.split("."), parse_yaml(text, f"override '{override}'")
    if steps[-1] == "kind" and isinstance(value, str):
        _change_kind(ModelConfig, data, steps[:-1], value)
    _set(data, steps, value, override, "")


def _change_kind(cls: type[Config] | None, node: Any, steps: list[str], kind: str) -> None:
    """Drop the fields of the old kind that the new kind does not have. Unknown fields stay and are refused later."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            if steps and steps[0] in ("*", str(index)):
                _change_kind(cls, item, steps[1:], kind)
    elif isinstance(node, dict) and cls is not None:
        if steps:
            _change_kind(field_class(cls, node.get("kind"), steps[0]), node.get(steps[0]), steps[1:], kind)
        elif fields_of(cls, kind):
            for name in fields_of(cls, node.get("kind")) - fields_of(cls, kind):
                node.pop(name, None)


def _set(node: Any, steps: list[str], value: Any, override: str, at: str) -> None:
    step, rest = steps[0], steps[1:]
    if isinstance(node, list):
        if step != "*" and not (step.isdecimal() and int(step) < len(node)):
            raise ConfigError(f"override '{override}': {at} has entries 0 to {len(node) - 1} or *, not '{step}'")
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
