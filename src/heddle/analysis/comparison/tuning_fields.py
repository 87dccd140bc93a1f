"""Training fields that are tuned for each design: parse `field=low..high` or `field=value,value` into grids."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from heddle.errors import ConfigError, choices_hint
from heddle.training.optimizer import LearningRateScales
from heddle.training.settings import OPTIMIZERS, SCHEDULES, Settings

Value = float | int | str
Candidate = tuple[Value, ...]  # a value for each tuned field, in the fields' order
MAX_RATIO = 2.0  # of two neighbors in the grid of a range
MAX_CANDIDATES = 64
LR_SCALE_PREFIX = "lr_scale."  # then the path of the parameters: lr_scale.layers.*.mixer
SETTINGS_NAMES = {
    "lr": "learning_rate",
    "weight_decay": "weight_decay",
    "batch_size": "batch_size",
    "warmup": "warmup",
    "optimizer": "optimizer",
    "schedule": "schedule",
}
INTEGER_FIELDS = ("batch_size", "warmup")
_BUDGET_UNITS = {"%": ("share", 0.01), "s": ("seconds", 1.0), "m": ("seconds", 60.0), "h": ("seconds", 3600.0)}
WORDS = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES}


@dataclass(frozen=True)
class TunedField:
    """A training field and its grid: numbers in ascending order, or words in the order of the user."""

    name: str
    values: tuple[Value, ...]

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers, so that each has neighbors."""
        return self.name not in WORDS

    def next_value(self, values: Sequence[Value], direction: int) -> Value | None:
        """The value that continues ascending numbers geometrically, below (−1) or above (+1) them.

        None where there is none: words, numbers that touch 0, an integer that stays the same.
        """
        if not self.is_number or len(values) < 2:
            return None
        edge, inner = (float(values[index]) for index in ((0, 1) if direction < 0 else (-1, -2)))
        if edge <= 0 or inner <= 0:
            return None
        value = _rounded(self.name, edge * edge / inner)
        return None if value == edge or value <= 0 else value


@dataclass(frozen=True)
class TuningPlan:
    """Which fields are tuned, and what the search may cost.

    budget_kind: "share" of the training of the comparison itself, or "seconds" of training steps.
    """

    fields: tuple[TunedField, ...]
    budget_kind: str
    budget_value: float


def parse_tuned_fields(assignments: Sequence[str]) -> tuple[TunedField, ...]:
    """Parse `field=low..high` or `field=value,value` texts, one for each field.

    A range becomes a grid in log space, whose neighbors differ by at most a factor of 2. Raises ConfigError for what
    cannot be tuned, and where the grids have over 64 combinations.
    """
    fields: dict[str, TunedField] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not name or not equals:
            raise ConfigError(
                f"tune {assignment}: expected field=low..high or field=value,value, such as lr=0.001..0.01"
            )
        name = "lr" if name == "learning_rate" else name
        if name in fields:
            raise ConfigError(f"tune {assignment}: {name} is tuned already; give all its values at once")
        known = name.startswith(LR_SCALE_PREFIX) and name != LR_SCALE_PREFIX
        if name not in SETTINGS_NAMES and not known:
            hint = choices_hint(name, [*SETTINGS_NAMES, f"{LR_SCALE_PREFIX}PATH"])
            raise ConfigError(f"tune {assignment}: {name} is no training field that can be tuned; {hint}")
        fields[name] = TunedField(name, _parse_grid(name, text, f"tune {assignment}"))
    count = math.prod(len(field.values) for field in fields.values())
    if count > MAX_CANDIDATES:
        factors = " × ".join(str(len(field.values)) for field in fields.values())
        raise ConfigError(
            f"tune: {factors} makes {count} combinations, and at most {MAX_CANDIDATES} are tried; narrow the ranges"
        )
    return tuple(fields.values())


def parse_tuning_budget(text: str) -> tuple[str, float]:
    """("share", x) of `0.5` or `50%`, ("seconds", x) of `90s`, `10m` or `2h`. Raises ConfigError for anything else."""
    kind, factor = _BUDGET_UNITS.get(text[-1:], ("share", 1.0))
    try:
        value = float(text[:-1] if text[-1:] in _BUDGET_UNITS else text) * factor
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"tuning budget {text}: expected a share of the comparison's training, such as 0.5, or a time, such as 10m"
        )
    return kind, value


def all_candidates(fields: Sequence[TunedField]) -> list[Candidate]:
    """Every combination of the fields' values; the last field changes fastest."""
    return list(product(*(field.values for field in fields)))


def tuned_settings(fields: Sequence[TunedField], candidate: Candidate, lr_scale: LearningRateScales) -> dict[str, Any]:
    """The fields of `Settings` that a candidate sets. lr_scale: of all designs; tuned paths come after them."""
    settings: dict[str, Any] = {}
    scales = list(lr_scale)
    for field, value in zip(fields, candidate, strict=True):
        if field.name.startswith(LR_SCALE_PREFIX):
            scales.append((field.name.removeprefix(LR_SCALE_PREFIX), float(value)))
        else:
            settings[SETTINGS_NAMES[field.name]] = value
    return settings | ({"lr_scale": tuple(scales)} if len(scales) > len(lr_scale) else {})


def tuned_paths(fields: Sequence[TunedField]) -> LearningRateScales:
    """(path, factor) for each tuned `lr_scale.PATH`, to check that the paths exist."""
    names = [field.name for field in fields if field.name.startswith(LR_SCALE_PREFIX)]
    return tuple((name.removeprefix(LR_SCALE_PREFIX), 1.0) for name in names)


def describe_candidate(names: Sequence[str], candidate: Sequence[Value]) -> str:
    """`lr 0.003, weight_decay 0.1`."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in zip(names, candidate, strict=True))


def format_value(value: Value) -> str:
    """A value as the user writes it: 0.003, 16, muon."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _parse_grid(name: str, text: str, argument: str) -> tuple[Value, ...]:
    low_text, is_range, high_text = text.partition("..")
    if is_range:
        return _log_grid(name, low_text, high_text, argument)
    values = [_parse_value(name, part.strip(), argument) for part in text.split(",")]
    if len(values) < 2:
        raise ConfigError(f"{argument}: is one value; give at least two, or a range such as {name}=low..high")
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ConfigError(f"{argument}: {format_value(value)} is given twice; leave one out")
    return tuple(values if name in WORDS else sorted(values, key=float))


def _log_grid(name: str, low_text: str, high_text: str, argument: str) -> tuple[Value, ...]:
    """Values from low to high, evenly spaced in log space."""
    if name in WORDS:
        raise ConfigError(f"{argument}: {name} has no range; list values of {', '.join(WORDS[name])}")
    low, high = (float(_parse_value(name, end.strip(), argument)) for end in (low_text, high_text))
    if low <= 0:
        raise ConfigError(f"{argument}: a range begins above 0, since its values are spaced by factors; list 0 instead")
    if low >= high:
        remedy = f"write {name}={high_text}..{low_text}" if low > high else "give two ends that differ"
        raise ConfigError(f"{argument}: the range has its lower end first; {remedy}")
    intervals = max(1, math.ceil(math.log(high / low) / math.log(MAX_RATIO) - 1e-9))
    if intervals >= MAX_CANDIDATES:
        raise ConfigError(f"{argument}: the range spans over {MAX_CANDIDATES} factors of {MAX_RATIO:g}; narrow it")
    inner = [_rounded(name, low * (high / low) ** (index / intervals)) for index in range(1, intervals)]
    ends = [int(end) if name in INTEGER_FIELDS else end for end in (low, high)]
    return tuple(sorted({ends[0], *inner, ends[1]}))


def _rounded(name: str, value: float) -> float | int:
    """Three digits; a whole number where the field takes no other."""
    return round(value) if name in INTEGER_FIELDS else float(f"{value:.3g}")


def _parse_value(name: str, text: str, argument: str) -> Value:
    if name in WORDS:
        if text not in WORDS[name]:
            raise ConfigError(f"{argument}: {text} is no {name}; {choices_hint(text, WORDS[name])}")
        return text
    try:
        value: float | int = int(text) if name in INTEGER_FIELDS else float(text)
    except ValueError:
        kind = "a whole number" if name in INTEGER_FIELDS else "a number"
        raise ConfigError(f"{argument}: '{text}' is not {kind}") from None
    if not 0 <= value < math.inf:
        raise ConfigError(f"{argument}: {text} must be at least 0 and finite")
    probe: Mapping[str, Any] = {} if name.startswith(LR_SCALE_PREFIX) else {SETTINGS_NAMES[name]: value}
    try:
        Settings(steps=1, **probe)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}") from None
    return value
