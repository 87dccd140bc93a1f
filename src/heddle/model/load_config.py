"""Read a design: from a YAML, TOML or JSON file, `preset:NAME`, a checkpoint folder, or a dict.

Modules that take long to import, such as torch, are imported only when a design needs them.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heddle.config import Config, DesignError, Width, join, parse_config
from heddle.errors import ConfigError, describe_path, parse_error_reason
from heddle.model.limits import refuse_overflow, too_many_layers
from heddle.model.presets import preset
from heddle.progress import print_status

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig
    from heddle.model.kind_replacement import KindReplacement

# The parsers of YAML and TOML are slow: each limit is read in about a second.
MAX_FILE_BYTES = {".json": 4 * 2**20, ".toml": 2**16}
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
    """Return the plain data of a design with its overrides. Raises ConfigError for one that is too wide or too deep.

    Anything else may still be invalid: only `load_config` imports the parts, and torch.
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
    """Count the layers that a list of entries stands for. What is not valid counts as one layer."""
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
        raise ConfigError("layers: nest too deeply to be read; write fewer levels, with repeat") from None


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
    what = describe_path(path)
    if what not in ("is a file", "does not exist"):
        raise ConfigError(f"{path}: {what}; name a YAML, TOML or JSON file, preset:NAME or a checkpoint folder")
    if what == "does not exist":
        hint = f"; did you mean preset:{path}?" if re.fullmatch(r"[a-z_]+-(tiny|small|medium)", str(path)) else ""
        raise ConfigError(f"{path}: no such design file{hint or '; name a file, preset:NAME or a checkpoint folder'}")
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
    from heddle.model.parse_yaml import parse_yaml

    return parse_yaml(text, str(path))


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key '{key:.60}' is given twice")
        data[key] = value
    return data


def apply_override(data: dict[str, Any], override: str) -> "list[KindReplacement]":
    """Set `path.to.field=value` in plain data, in place. `layers.*.` applies to every entry, null removes a field.

    A word where a part stands is its new kind. Returns the parts whose kind changed.
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"override '{override}': expected path.to.field=value, such as layers.0.mixer.heads=8")
    from heddle.model.parse_yaml import parse_yaml

    steps, value = path.split("."), parse_yaml(text, f"override '{override}'")
    if isinstance(value, str) and steps[-1] != "kind":
        from heddle.model.kind_replacement import is_part_path

        steps = [*steps, "kind"] if is_part_path(data, steps) else steps
    replacements = []
    if (steps[-1] == "kind" and isinstance(value, str)) or _crosses_word(data, steps[:-1]):
        from heddle.model.kind_replacement import replace_kinds

        replacements = replace_kinds(data, steps, value)
    _set(data, steps, value, override, "")
    return replacements


def _crosses_word(node: Any, steps: list[str]) -> bool:
    """Whether a word, which may be a part without fields, stands on a path."""
    if isinstance(node, list):
        return any(_crosses_word(item, steps[1:]) for item in node)
    return isinstance(node, str) or (
        isinstance(node, dict) and bool(steps) and _crosses_word(node.get(steps[0]), steps[1:])
    )


def _set(node: Any, steps: list[str], value: Any, override: str, at: str) -> None:
    step, rest = steps[0], steps[1:]
    if isinstance(node, list):
        if step != "*" and not (step.isdecimal() and len(step) < 10 and int(step) < len(node)):
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
