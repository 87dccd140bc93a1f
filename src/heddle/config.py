"""Designs as frozen, strictly typed data. `parse_config` reads plain data and reports errors with exact paths.

A slot is a folder of `heddle.parts`. A kind is a file in it, and the file's name is the `kind` on disk. A kind's module
is imported only once its name is found in the folder (or was added by `load_part`). A kind's class lists its aliases,
so looking one up imports every kind of the slot.
"""

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from heddle.errors import ConfigError, choices_hint, describe_path, describe_value, shorten_value

# Inspect field annotations: which config class a field holds, and whether it is a list on disk.

T = TypeVar("T")


def nested_class(annotation: Any, base: type[T]) -> type[T] | None:
    """Find the class derived from `base` inside an annotation such as `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, base):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        for argument in get_args(annotation):
            if nested := nested_class(argument, base):
                return nested
    return None


def nested_field(fields: Mapping[str, FieldInfo], name: Any, base: type[BaseModel]) -> str | None:
    """The path of a field one level down, such as `layers.*.mixer`; None if no nested config has it, or several do."""
    places = []
    for outer, field in fields.items():
        nested = nested_class(field.annotation, base)
        if nested is not None and name in nested.model_fields:
            places.append(f"{outer}.*.{name}" if is_list(field.annotation) else f"{outer}.{name}")
    return places[0] if len(places) == 1 else None


def is_list(annotation: Any) -> bool:
    """Whether an annotation is `tuple[X, ...]` or `tuple[X, ...] | None`: a list on disk."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(is_list(argument) for argument in get_args(annotation))
    return get_origin(annotation) is tuple


def literal_values(annotation: Any) -> tuple[Any, ...]:
    """The values of `Literal[…]`, alone or inside an annotation such as `Literal[…] | None`; empty for others."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return tuple(value for argument in get_args(annotation) for value in literal_values(argument))
    return ()


def has_words(annotation: Any) -> bool:
    """Whether an annotation such as `tuple[X, ...] | Literal["learned"]` allows a word instead of a list."""
    return any(get_origin(argument) is Literal for argument in get_args(annotation))


B = TypeVar("B")
C = TypeVar("C", bound="Config")

PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
Width = Annotated[int, Field(gt=0, le=2**20)]  # also a number of heads or experts; some parts loop over it
Probability = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]

PARTS = Path(__file__).parent / "parts"


class DesignError(ConfigError):
    """One sentence with the path of the field: `layers[0].mixer.heads: …`."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason

    def under(self, prefix: str) -> "DesignError":
        """Return the same error with a prefix before its path: as seen from the config that holds this one."""
        return DesignError(join(prefix, self.path), self.reason)


def join(prefix: str, path: str) -> str:
    """Join two paths: `layers[0]` and `mixer` make `layers[0].mixer`. An index is joined without a dot."""
    if not prefix or not path or path.startswith("["):
        return prefix + path
    return f"{prefix}.{path}"


def refuse(field: str, reason: str) -> NoReturn:
    """Raise a validation error for `field`, from within a validator of its config."""
    raise PydanticCustomError("refused", "{reason}", {"field": field, "reason": reason})


def build_under(path: str, build: Callable[..., B], *arguments: Any) -> B:
    """Call `build(*arguments)`. A DesignError that it raises gets `path` before its own path."""
    try:
        return build(*arguments)
    except DesignError as error:
        raise error.under(path) from None


class Config(BaseModel):
    """Plain data about an architecture. No device, precision, kernel or batch size.

    later_fields: fields that earlier versions do not have. At their defaults, dumps and fingerprints omit them.
    absent_fields: fields of related configs that this one lacks, and why.
    """

    later_fields: ClassVar[tuple[str, ...]] = ()
    absent_fields: ClassVar[tuple[tuple[str, str], ...]] = ()

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _explain(type(self), error) from None

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return the config itself: nothing in it can change, and a copied model shares it."""
        return self

    def replace(self, **fields: Any) -> Self:
        """Return the same config with some fields changed, validated again."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | fields)

    def dump(self, with_later_fields: bool = False) -> dict[str, Any]:
        """Return JSON-ready data from which `parse_config` makes an equal config.

        Fields that are None are omitted. So are later fields at their defaults, unless `with_later_fields` is set.
        """
        plain = {name: _plain(getattr(self, name), with_later_fields) for name in type(self).model_fields}
        for name in () if with_later_fields else self.later_fields:
            if plain[name] == type(self).model_fields[name].default:
                del plain[name]
        return {name: value for name, value in plain.items() if value is not None}


class Part(Config):
    """A config that fits a slot. Its `kind` is the name of the file that defines it.

    data_dependent: optional fields that act only in training, and only on some data, such as the capacity of experts.
    aliases: other names of this kind in the literature, accepted in designs.
    """

    slot: ClassVar[str]
    data_dependent: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[tuple[str, ...]] = ()

    @property
    def kind(self) -> str:
        """The name on disk."""
        return type(self).__module__.rpartition(".")[2]

    def dump(self, with_later_fields: bool = False) -> dict[str, Any]:
        """As `Config.dump`, with the kind first."""
        return {"kind": self.kind, **super().dump(with_later_fields)}

    @classmethod
    def fields_of_alias(cls, alias: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given fields plus those that an alias implies. Raises DesignError if they contradict."""
        return {**fields}

    @classmethod
    def default_fields(cls, previous: "Part", width: int) -> dict[str, Any]:
        """Return the fields to set where this kind replaces the part `previous`, in a design of this width.

        None: a field of both kinds that means something else in this one is left out.
        """
        return {}


def _plain(value: Any, with_later_fields: bool) -> Any:
    if isinstance(value, Config):
        return value.dump(with_later_fields)
    return [_plain(item, with_later_fields) for item in value] if isinstance(value, tuple) else value


def kinds(slot: str) -> list[str]:
    """Return the kinds of a slot: the files of its folder, and those that `load_part` added."""
    package = f"heddle.parts.{slot}."
    added = {name.removeprefix(package) for name in list(sys.modules) if name.startswith(package)}
    return sorted(_own_kinds(slot) | added)


def is_kind(slot: str, name: Any) -> bool:
    """Whether a slot has a kind of this name. Faster than to list all kinds."""
    return isinstance(name, str) and (name in _own_kinds(slot) or f"heddle.parts.{slot}.{name}" in sys.modules)


@cache
def _own_kinds(slot: str) -> frozenset[str]:
    """Return the kinds whose files are in the folder of the slot."""
    return frozenset(file.stem for file in (PARTS / slot).glob("*.py") if not file.stem.startswith("_"))


@cache
def kind_class(slot: str, kind: str) -> type[Part]:
    """Return the config class that a kind's file defines."""
    return own_class(importlib.import_module(f"heddle.parts.{slot}.{kind}"), Part, "part")


def with_implied(alias: str, fields: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the fields plus one that an alias implies. Raises DesignError if it is set to another value."""
    if fields.get(name) not in (None, value):
        reason = f"{shorten_value(fields[name])} contradicts {alias}, which means {value!r}"
        raise DesignError(name, f"{reason}; leave it out, or name another kind")
    return {name: value, **{field: each for field, each in fields.items() if each is not None}}


def find_kind(slot: str, name: Any) -> type[Part] | None:
    """Return the class of a kind by its name or an alias. None if no kind has that name.

    Raises DesignError if several kinds have the alias.
    """
    if is_kind(slot, name):
        return kind_class(slot, name)
    named = [kind for kind in kinds(slot) if isinstance(name, str) and name in kind_class(slot, kind).aliases]
    if len(named) > 1:
        raise DesignError("", f"'{name}' is an alias of {' and '.join(named)}; use one of these names")
    return kind_class(slot, named[0]) if named else None


def kind_names(base: type[Part]) -> list[str]:
    """Return the kinds that fit a field of type `base`, followed by their aliases."""
    fitting = {kind: kind_class(base.slot, kind) for kind in kinds(base.slot)}
    fitting = {kind: cls for kind, cls in fitting.items() if issubclass(cls, base)}
    return [*fitting, *sorted(alias for cls in fitting.values() for alias in cls.aliases)]


def is_slot(cls: type[Part]) -> bool:
    """Whether a class stands for a slot, which several kinds fit, rather than for one kind."""
    return cls is not Part and cls.__module__ == f"heddle.parts.{cls.slot}"


def own_class(module: types.ModuleType, base: type[C], name: str) -> type[C]:
    """Return the one subclass of `base`, a `name`, that a file defines. Raises ConfigError for none or several."""
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base))
    own = [value for value in classes if value.__module__ == module.__name__]
    if len(own) != 1:
        reason = f"defines {len(own)} {name} configs; define exactly one in a {name} file"
        raise ConfigError(f"{module.__file__}: {reason}")
    return own[0]


def load_part(file: Path) -> type[Part]:
    """Load a user's part from a file: the config that it defines gives the slot, the file's name gives the kind.

    Raises ConfigError if the file cannot be read, fails to run, or has the name of an existing kind.
    """
    name = f"heddle.parts.{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    what = describe_path(file)
    if what != "is a file" or spec is None or spec.loader is None:
        reason = "is not a Python file" if what == "is a file" else what
        raise ConfigError(f"part {file}: {reason}; give the .py file that defines the part")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"part {file}: failed to run ({type(error).__name__}: {error}); fix the file") from error
    part = own_class(module, Part, "part")
    if is_kind(part.slot, file.stem):
        taken = f"{part.slot} already has a kind '{file.stem}'"
        raise ConfigError(f"part {file}: {taken}; omit --part to use that one, or rename the file")
    sys.modules[name] = sys.modules[f"heddle.parts.{part.slot}.{file.stem}"] = module
    return part


def parse_config(target: type[C], data: Any, path: str = "") -> C:
    """Convert plain data to a config of class `target`. Raises DesignError with the path, the value and the remedy."""
    cls: type[Config] = target
    slot = target if issubclass(target, Part) and is_slot(target) else None
    if slot is not None and isinstance(data, str):  # a kind without fields
        data = {"kind": data}
    if not isinstance(data, dict):
        raise DesignError(path, f"expected a table of fields, got {describe_value(data)}")
    if slot is not None:
        cls, data = _resolve(slot, data, path)
    known = cls.model_fields
    for name in data:
        if name not in known and name in dict(cls.absent_fields):
            raise DesignError(join(path, name), dict(cls.absent_fields)[name])
        if name not in known:
            raise DesignError(path, _unknown("field", name, sorted(known), nested_field(known, name, Config)))
    values = {name: _decode_value(_content(cls, name), value, join(path, name)) for name, value in data.items()}
    config = build_under(path, lambda: cls(**values))
    assert isinstance(config, target)
    return config


def _resolve(base: type[Part], data: dict[str, Any], path: str) -> tuple[type[Part], dict[str, Any]]:
    """Find the class of a part by its `kind`, and its fields with those that an alias implies."""
    if "kind" not in data:
        raise DesignError(path, f"has no kind; set kind to one of {', '.join(kind_names(base))}")
    name = data["kind"]
    cls = build_under(path, find_kind, base.slot, name)
    if cls is None:
        problem = _unknown("kind", name, kind_names(base))
        raise DesignError(path, f"{problem}; for your own part, pass the file that defines it: --part FILE")
    if not issubclass(cls, base):
        raise DesignError(path, f"kind '{name}' does not belong here; choices: {', '.join(kind_names(base))}")
    fields = {field: value for field, value in data.items() if field != "kind"}
    return cls, build_under(path, cls.fields_of_alias, name, fields) if name in cls.aliases else fields


def field_class(cls: type[Config], name: str) -> type[Config] | None:
    """Return the config class, or the slot, that a field of a config class holds. None if it holds none."""
    field = cls.model_fields.get(name)
    return None if field is None else nested_class(field.annotation, Config)


@cache
def _content(cls: type[Config], name: str) -> tuple[type[Config] | None, bool, bool]:
    """The config class within a field, whether the field is a list, and whether a word may stand for the list."""
    annotation = cls.model_fields[name].annotation
    return nested_class(annotation, Config), is_list(annotation), has_words(annotation)


def _decode_value(content: tuple[type[Config] | None, bool, bool], value: Any, path: str) -> Any:
    nested, listed, words = content
    if value is None or isinstance(value, Config):
        return value
    if listed and not (isinstance(value, str) and words):
        if not isinstance(value, list | tuple):
            remedy = "; write it in brackets, with commas" if nested is None else ""
            raise DesignError(path, f"expected a list, got {describe_value(value)}{remedy}")
        if nested is None:
            return tuple(value)
        return tuple(
            item if isinstance(item, Config) else parse_config(nested, item, f"{path}[{index}]")
            for index, item in enumerate(value)
        )
    return value if nested is None else parse_config(nested, value, path)


def _explain(cls: type[Config], error: ValidationError) -> DesignError:
    """Turn the first of pydantic's errors into one sentence."""
    errors = error.errors(include_url=False)
    first = errors[0]
    field, *rest = first["loc"] or ("",)
    path = f"{field}" + "".join(f"[{index}]" for index in rest if isinstance(index, int))
    kind, context, value = first["type"], first.get("ctx", {}), first["input"]
    if kind == "refused":
        return DesignError(join(path, context["field"]), context["reason"])
    if kind == "missing":
        return DesignError(path, "is required; give it a value")
    if kind == "extra_forbidden":
        return DesignError("", _unknown("field", path, sorted(cls.model_fields)))
    if kind == "literal_error":
        allowed = [choice.strip("' ") for choice in context["expected"].replace(" or ", ",").split(",")]
        return DesignError(path, _unknown("value", value, allowed))
    reasons = [first["msg"]]
    if any(isinstance(tag, str) for tag in rest):  # pydantic reports one error for each member of a union
        reasons = [details["msg"] for details in errors if details["loc"][0] == field]
    allowed_values = " or ".join(reason.removeprefix("Input should be ") for reason in reasons)
    number = _whole_numbers(value) if "integer" in allowed_values else ""
    return DesignError(path, f"should be {allowed_values}, got {describe_value(value)}{number}")


def _whole_numbers(value: Any) -> str:
    """The numbers to write for a text such as 32k: a count, or a length, whose k is 1,024."""
    match = re.fullmatch(r"([0-9]{1,9})([km])", value.lower()) if isinstance(value, str) else None
    if match is None:
        return ""
    count, power = int(match[1]), "km".index(match[2]) + 1
    return f"; write the number out: {count * 1000**power}, or {count * 1024**power} where k is 1,024"


def _unknown(what: str, value: Any, choices: list[str], nested: str | None = None) -> str:
    hint = f"did you mean '{nested}'?" if nested else choices_hint(str(value), choices)
    return f"unknown {what} {shorten_value(value)}; {hint}"
