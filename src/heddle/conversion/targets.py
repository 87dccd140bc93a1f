"""What a conversion is asked for: `kv_heads=2,merge=mean`, `layers.3.mixer.position.layout=interleaved`."""

import re
from collections.abc import Sequence
from typing import Any

from heddle.config import DesignError, parse_config
from heddle.conversion.rewrite import Rewrite, rewrites
from heddle.errors import ConfigError, choices_hint
from heddle.model.parse_yaml import parse_yaml

LAYERS = re.compile(r"layers\.(?P<layers>\*|\d+(?:,\d+)*)\.")
PART_NAMES = ("mixer.", "feedforward.")
NEXT_OPTION = re.compile(r",(?=[a-z_]+=)")


def parse_rewrite(text: str) -> Rewrite:
    """Read one target, `[layers.N.][mixer.]NAME[=VALUE][,OPTION=VALUE…]`. Raises ConfigError.

    NAME: a field that a rewrite changes, such as `kv_heads`, or the name of a rewrite.
    """
    layers = LAYERS.match(text)
    rest = text[layers.end() :] if layers else text
    for part in PART_NAMES:
        rest = rest.removeprefix(part)
    head, *options = NEXT_OPTION.split(rest)
    name, equals, value = head.partition("=")
    if not name:
        raise ConfigError(f"'{text}': expected FIELD=VALUE or the name of a rewrite, such as kv_heads=2")
    cls, option = _find(name, text)
    fields: dict[str, Any] = {}
    if equals and option is None:
        raise ConfigError(f"'{text}': {name} takes no value, only options such as {_example(cls)}")
    if option is not None and (equals or name not in rewrites()):
        if not equals:
            raise ConfigError(f"'{text}': {name} needs a value, such as {name}=…")
        fields[option] = parse_yaml(value, text)
    for pair in options:
        option_name, _, option_value = pair.partition("=")
        fields[option_name] = parse_yaml(option_value, text)
    if layers and layers["layers"] != "*":
        fields["layers"] = [int(number) for number in layers["layers"].split(",")]
    try:
        return parse_config(cls, fields)
    except DesignError as error:
        raise ConfigError(f"'{text}': {error}") from None


def parse_rewrites(texts: Sequence[str]) -> tuple[Rewrite, ...]:
    """Read targets, in the order in which they are applied. Raises ConfigError."""
    return tuple(parse_rewrite(text) for text in texts)


def _find(name: str, text: str) -> tuple[type[Rewrite], str | None]:
    """The rewrite of a name, and the option that takes the value, None for a rewrite named by itself."""
    by_target = {target: (cls, option) for cls in rewrites().values() for target, option in cls.targets.items()}
    if name in by_target:
        return by_target[name]
    if name in rewrites():
        return rewrites()[name], None
    hint = choices_hint(name, sorted({*by_target, *rewrites()}))
    raise ConfigError(f"'{text}': no rewrite changes {name!r}; {hint}")


def _example(cls: type[Rewrite]) -> str:
    names = [name for name in cls.model_fields if name != "layers"]
    return f"{names[0]}=…" if names else "none"
