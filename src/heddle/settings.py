"""A verb's settings, written once: options, option files, run records and docs are all derived from them.

Each verb has a frozen dataclass derived from `VerbSettings`, with fields such as `seed: Annotated[int, Option("N",
"Seed.")]`. The field's name is the option's (`from_` is --from), and its type says how a value is parsed.
"""

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from heddle.errors import ConfigError, choices_hint

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MAX_AMOUNT = 1e40  # of parameters, tokens or FLOPs
MAX_LENGTH = 60  # characters of a value in an error message
_BOOLS = {"true": True, "false": False}
_WANTED = {int: "a whole number, such as 2000 or 2k", float: "a number"}


@dataclass(frozen=True)
class Option:
    """How a field is shown and parsed.

    metavar: the value's name in help; "" for a switch. parse: parses a string, and raises ValueError with what is
    wrong; None: the field's type does. short: one letter. hidden: not shown by help.
    """

    metavar: str
    help: str
    parse: Callable[[str], Any] | None = None
    short: str = ""
    hidden: bool = False


class Argument(Option):
    """A positional argument."""


@dataclass(frozen=True)
class Setting:
    """A field of a settings class. type: of one value. repeats: whether it takes several values, as a tuple."""

    field: str
    option: Option
    type: Any
    repeats: bool
    default: Any

    @property
    def name(self) -> str:
        """The name in Python, YAML and JSON: `batch_size`, and `from` for the field `from_`."""
        return self.field.rstrip("_")

    @property
    def flag(self) -> str:
        """The name on the command line: `--batch-size`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def label(self) -> str:
        """The name in an error message."""
        return self.option.metavar if isinstance(self.option, Argument) else self.flag

    @property
    def usage(self) -> str:
        """The name on the command line with its value: `--batch-size N`, `-q, --quiet`, `--compile, --no-compile`."""
        option = self.option
        if isinstance(option, Argument):
            return option.metavar
        short = f"-{option.short}, " if option.short else ""
        off = f", {self.off_flag}" if not option.metavar and self.default is None else ""
        return f"{short}{self.flag} {option.metavar}".strip() + off

    @property
    def off_flag(self) -> str:
        """The flag that turns a switch off: `--no-compile`."""
        return self.flag.replace("--", "--no-", 1)

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    @property
    def help(self) -> str:
        """What it does, with the default in brackets."""
        text, default = self.option.help, self.default
        if "[" in text or default is None or default is MISSING or isinstance(default, bool | tuple):
            return text
        return f"{text} [{default}]"

    def read(self, value: Any) -> Any:
        """Parse a string from the command line, or a plain value from a file or Python. Raises ConfigError."""
        if self.repeats:
            return tuple(map(self._read_one, value if isinstance(value, list | tuple) else [value]))
        if isinstance(value, list | tuple | dict) and self.type is not Any:
            raise ConfigError(f"{self.name}: takes one value; write a word or a number")
        return self._read_one(value)

    def _read_one(self, value: Any) -> Any:
        if self.type is Any:
            return str(value) if isinstance(value, Path) else value
        if self.type is bool:
            value = _BOOLS.get(value.lower(), value) if isinstance(value, str) else value
            if not isinstance(value, bool):
                raise ConfigError(f"{self.label} {shorten(value)}: must be true or false")
            return value
        if isinstance(value, bool):
            raise ConfigError(f"{self.name}: takes a word or a number, not {str(value).lower()}")
        text = str(value)
        if self.option.parse is not None:
            return parse_named(self.label, text, self.option.parse)
        try:
            return self.type(text)
        except ValueError:
            if self.type is int and text[-1:].lower() in UNITS and (count := _number(text)).is_integer():
                return int(count)  # as in --tokens, 10k is 10,000
            raise ConfigError(f"{self.label} {shorten(text)}: must be {_WANTED[self.type]}") from None


@dataclass(frozen=True, kw_only=True)
class VerbSettings:
    """Settings of a verb. SHOWN: the options that `--help` shows, in order; `--help-all` shows all."""

    SHOWN: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, values: Mapping[Any, Any], source: str = "options") -> Self:
        """Build settings from values by option name, given as strings or plain values; None means the default.

        Raises ConfigError for an unknown, missing or invalid option. source: named in the message about an unknown one.
        """
        settings = settings_of(cls)
        read = {}
        for key, value in values.items():
            setting = settings.get(str(key).rstrip("_"))
            if setting is None:
                name = str(key).rstrip("_")
                question, mark, _ = choices_hint(name, settings).partition("? ")
                hint = f"{question}?" if mark else "--help-all lists all"
                raise ConfigError(f"{source}: {name}: unknown option; {hint}")
            if value is not None:
                read[setting.field] = setting.read(value)
        for setting in settings.values():
            if setting.is_required and setting.field not in read:
                help_text = setting.option.help.rstrip(".")
                raise ConfigError(f"{setting.label}: is missing; give {help_text[:1].lower()}{help_text[1:]}")
        return cls(**read)

    def dump(self) -> dict[str, Any]:
        """Return plain values by option name, without options that are off: an option file, or a run's record."""
        values = {name: getattr(self, setting.field) for name, setting in settings_of(type(self)).items()}
        return {name: plain for name, value in values.items() if (plain := _plain(value)) is not None}

    def dump_for_any_folder(self) -> dict[str, Any]:
        """As `dump`, with the absolute paths of files and folders that are read."""
        named, reads = settings_of(type(self)), {"DESIGN", "PATH", "PROPOSAL"}
        return {
            name: _absolute(value)
            if name != "out" and (named[name].type is Path or reads & {*named[name].option.metavar.split("|")})
            else value
            for name, value in self.dump().items()
        }

    def command_line(self, verb: str) -> str:
        """Return the command with these settings, without options at their defaults."""
        words, arguments, settings = [], [], settings_of(type(self))
        for name, value in self.dump().items():
            setting = settings[name]
            if value == _plain(setting.default):
                continue
            texts = [str(item) for item in (value if isinstance(value, list) else [value])]
            if isinstance(setting.option, Argument):
                arguments += texts
            elif isinstance(value, bool):
                words.append(setting.flag if value else setting.off_flag)
            else:
                words += [word for text in texts for word in (setting.flag, text)]
        return shlex.join(["heddle", *verb.split(), *arguments, *words])


def shared(source: Any, target: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields of a dataclass that are also parameters of a function or class, as its keyword arguments."""
    names = inspect.signature(target).parameters
    return {field.name: getattr(source, field.name) for field in fields(source) if field.name in names}


def settings_of(cls: type[VerbSettings]) -> dict[str, Setting]:
    """The settings of a `VerbSettings` class by name: arguments first, settings of base classes last."""
    hints = get_type_hints(cls, include_extras=True)
    order = [name for base in cls.__mro__ for name in inspect.get_annotations(base)]
    found = []
    for field in sorted(fields(cls), key=lambda field: order.index(field.name)):
        kind, option = get_args(hints[field.name])
        repeats = get_origin(kind) is tuple
        if repeats or get_origin(kind) is UnionType:
            kind = next(argument for argument in get_args(kind) if argument is not NoneType)
        found.append(Setting(field.name, option, kind, repeats, field.default))
    found.sort(key=lambda setting: not isinstance(setting.option, Argument))
    return {setting.name: setting for setting in found}


def parse_named(label: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Parse a text; a ValueError becomes a ConfigError that names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{label} {shorten(text)}: {error}") from None


def parse_count(text: str, unit_name: str = "parameters") -> float:
    """Parse a number such as 500k, 1.5M or 2e6. Raises ValueError."""
    value = _number(text)
    if not 1 <= value <= MAX_AMOUNT:
        raise ValueError(f"must be a number of {unit_name}, such as 500k, 20M or 2e6")
    return value


def parse_tokens(text: str) -> int:
    """Parse a whole number of tokens, such as 100000, 500k or 1.5M. Raises ValueError."""
    try:
        return int(text)  # exactly, whatever its size
    except ValueError:
        value = _number(text)
    if not value.is_integer():
        raise ValueError("is not a whole number of tokens, such as 100000, 500k or 1.5M")
    return int(value)


def parse_length(text: str) -> int:
    """Parse a length in tokens, such as 4096 or 32k: k is 1,024, as in the names of context lengths. ValueError."""
    if not (match := re.fullmatch(r"(-?[0-9]+)(k?)", text.strip().lower())):
        raise ValueError("must be a whole number, such as 4096 or 4k (k is 1,024)")
    return int(match[1]) * (1024 if match[2] else 1)


def parse_port(text: str) -> int:
    """Parse a port, such as 8000; 0 is any free one. Raises ValueError."""
    if not (text.isdecimal() and int(text) < 2**16):
        raise ValueError("must be a port from 0 to 65535")
    return int(text)


def parse_text(text: str) -> str:
    """A text of the command line, whose bytes are UTF-8 in any locale; Python keeps those it cannot decode apart."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:  # half a surrogate pair, which the tokenizer names
        return text


def shorten(value: object) -> str:
    """A value, cut to fit an error message."""
    text = str(value)
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}…"


def _number(text: str) -> float:
    """The number that a text stands for; NaN if it is not one."""
    unit = UNITS.get(text[-1:].lower(), 1.0)
    try:
        return round(float(text[:-1] if unit != 1.0 else text) * unit, 6)
    except ValueError:
        return float("nan")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] or None
    return str(value) if isinstance(value, Path) else value


INPUT = re.compile(r"(?P<prefix>(?:chat:|hf:)?)(?P<path>.+?)(?P<weight>@[0-9.]+)?", re.DOTALL)


def _absolute(value: Any) -> Any:
    """The absolute path of an existing file; also within chat:FILE and PATH@2. Other values are unchanged."""
    if isinstance(value, list):
        return [_absolute(item) for item in value]
    if not isinstance(value, str) or value.partition("@")[0] == "stdlib" or (match := INPUT.fullmatch(value)) is None:
        return value
    for prefix, path, weight in (("", value, ""), match.group("prefix", "path", "weight")):
        if os.path.exists(path):
            return f"{prefix}{os.path.abspath(path)}{weight or ''}"
    return value


# Settings that verbs share.
PRECISIONS = ("fp32", "bf16", "bf16-params")

Device = Annotated[str, Option("NAME", "auto, cpu, cuda, cuda:N or mps.")]
Threads = Annotated[int | None, Option("N", "CPU threads. [torch's default]")]
Precision = Annotated[str, Option("NAME", "fp32 or bf16.")]
TrainingPrecision = Annotated[str, Option("NAME", "fp32, bf16 (autocast) or bf16-params (weights too).")]
Tf32 = Annotated[bool, Option("", "On CUDA: float32 matmuls in TF32, faster and less precise.")]
Deterministic = Annotated[bool, Option("", "Bitwise reproducible on CUDA, too: slower; refuses what cannot be.")]
Kernel = Annotated[tuple[str, ...], Option("OPERATION=KERNEL", "Force a kernel: attention=reference; repeatable.")]
PartFile = Annotated[tuple[Path, ...], Option("FILE", "A .py file that defines your own part; repeatable.")]
SpeedContexts = Annotated[tuple[int, ...], Option("N", "Context length for the speed test; repeatable.", parse_length)]
Quiet = Annotated[bool, Option("", "Print no progress on stderr.", short="q")]
Json = Annotated[bool, Option("", "Print JSON.")]


@dataclass(frozen=True, kw_only=True)
class SessionSettings(VerbSettings):
    """Settings of verbs that compute."""

    device: Device = "auto"
    threads: Threads = None
    part: PartFile = ()
    quiet: Quiet = False
