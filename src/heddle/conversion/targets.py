"""Parse the targets of a conversion: `kv_heads=2,merge=mean`, `layers.3.mixer.position.layout=interleaved`."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from heddle.config import DesignError, literal_values, parse_config
from heddle.conversion.rewrite import Rewrite, rewrites
from heddle.errors import ConfigError, choices_hint
from heddle.model.load_config import parse_yaml
from heddle.progress import print_text

LAYERS = re.compile(r"layers\.(?P<layers>\*|\d+(?:,\d+)*)\.")
PART_NAMES = ("mixer.", "feedforward.")
NEXT_OPTION = re.compile(r",(?=[a-z_]+=)(?![^\[]*\])")  # not within a list


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


# Several conversions of one model: every combination of a sweep's values, and every method of a rewrite.
#
# A sweep is written as a target of `--to`, with several values at a comma: `kv_heads=8,4,merge=mean,first` is four
# conversions.


NOT_IN_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class ConversionVariant:
    """One of several conversions. name: its targets. method: its rewrites and methods, without sizes."""

    name: str
    method: str
    rewrites: tuple[Rewrite, ...]

    @property
    def file_name(self) -> str:
        """The name, made safe for a folder."""
        return NOT_IN_A_FILE_NAME.sub("-", self.name).strip("-.")


def conversion_variants(
    targets: Sequence[str], sweep: Sequence[str] = (), all_methods: bool = False
) -> tuple[ConversionVariant, ...]:
    """The conversions that a command asks for. Raises ConfigError.

    targets: applied first in all of them. sweep: targets with several values, in which they differ. all_methods:
    whether a rewrite with methods, of which none is chosen, is applied by each.
    """
    variants: dict[str, ConversionVariant] = {}
    swept = [text for values in sweep for text in _combinations(values)]
    for texts in [[*targets, text] for text in swept] or [list(targets)]:
        choices = [list(_with_methods(text)) if all_methods else [text] for text in texts]
        for chosen in itertools.product(*choices):
            rewrites = parse_rewrites(chosen)
            own = chosen[len(targets) :] if sweep else chosen
            name = "; ".join(own).replace(",", ", ")
            if name in variants:
                raise ConfigError(f"'{name}': is given twice; leave one out")
            variants[name] = ConversionVariant(name, "; ".join(map(_method, rewrites[-len(own) :])), rewrites)
    file_names = [variant.file_name.lower() for variant in variants.values()]
    for name, file_name in zip(variants, file_names, strict=True):
        if file_names.count(file_name) > 1:
            raise ConfigError(f"'{name}': has the same file name as another conversion, {file_name}; leave one out")
    return tuple(variants.values())


def _combinations(text: str) -> Iterator[str]:
    """A target for every combination of the values in `text`."""
    pairs = [piece.partition("=") for piece in NEXT_OPTION.split(text)]
    choices = [[f"{name}{equals}{value}" for value in values.split(",")] for name, equals, values in pairs]
    for combination in itertools.product(*choices):
        yield ",".join(combination)


def _with_methods(text: str) -> Iterator[str]:
    """The target with each of its rewrite's methods, or alone if it has none or names one of their options."""
    rewrite = parse_rewrite(text)
    methods: Sequence[Mapping[str, str]] = type(rewrite).methods
    if not methods or any(name in rewrite.model_fields_set for method in methods for name in method):
        yield text
        return
    for method in methods:
        yield ",".join([text, *(f"{name}={value}" for name, value in method.items())])


def _method(rewrite: Rewrite) -> str:
    """A rewrite with its options that are words: how it converts, but not to which size."""
    order = list(type(rewrite).model_fields)
    named = sorted(rewrite.model_fields_set, key=order.index)
    words = [str(value) for name in named if isinstance(value := getattr(rewrite, name), str)]
    return ", ".join([rewrite.name, *words])


def print_rewrites() -> None:
    """Every rewrite with its targets and options."""
    for name, cls in rewrites().items():
        targets = [f"{target}={option.upper()}" for target, option in cls.targets.items()] or [name]
        print_text(f"{', '.join(targets)}")
        print_text(f"    {(cls.__doc__ or '').strip().splitlines()[0]}")
        for option, field in cls.model_fields.items():
            if option not in ("layers", *cls.targets.values()):
                print_text(f"        {_describe_option(option, field)}")


def _describe_option(option: str, field: FieldInfo) -> str:
    """The option with its choices and its default, such as `merge=mean|first [mean]`, or that it is required."""
    annotation, default = field.annotation, field.default
    choices = "|".join(map(str, literal_values(annotation))) or ("true|false" if annotation is bool else "…")
    shown = str(default).lower() if isinstance(default, bool) else str(default)
    if field.is_required():
        return f"{option}={choices} [required]"
    return f"{option}={choices}" + ("" if default is None else f" [{shown}]")
