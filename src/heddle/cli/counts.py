"""Read a number of tokens or parameters that is given on the command line: 100000, 500k, 1.5M or 2e6."""

from typing import Any

import typer

from heddle.errors import ConfigError

UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MAX_LENGTH = 60  # of a number in an error message


def parse_count(option: str, text: str, unit_name: str = "parameters") -> float:
    """Parse a number of parameters such as 500k, 1.5M or 2e6. Raises ConfigError."""
    value = _number(text)
    if not 1 <= value < float("inf"):
        raise ConfigError(f"{option} {_short(text)}: must be a number of {unit_name}, such as 500k, 20M or 2e6")
    return value


def token_count(text: Any) -> int:
    """Parse a whole number of tokens, for an option. Raises BadParameter, which names the option."""
    try:
        return int(text)  # exactly, whatever its size
    except ValueError:
        value = _number(str(text))
    if not value.is_integer():
        raise typer.BadParameter(f"{_short(text)} is no whole number of tokens, such as 100000, 500k or 1.5M")
    return int(value)


def _short(text: str) -> str:
    """A text, cut to fit an error message."""
    return text if len(text) <= MAX_LENGTH else f"{text[:MAX_LENGTH]}…"


def _number(text: str) -> float:
    """The number that a text stands for; NaN if none."""
    unit = UNITS.get(text[-1:].lower(), 1.0)
    try:
        return round(float(text[:-1] if unit != 1.0 else text) * unit, 6)
    except ValueError:
        return float("nan")
