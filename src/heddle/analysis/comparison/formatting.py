"""Format the numbers of a comparison as text: units, percent, signs, intervals, lists of names."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

NO_VALUE = "–"
Formatter = Callable[[float | None], str]


def format_number(value: float | None, unit: str = "") -> str:
    """Three digits and a decimal prefix: 1310000 → "1.31 M"; with unit "B", 6.0e6 → "6.00 MB"; None → "–"."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value, power = value / 1000, power + 1
    prefix = ("", "k", "M", "G", "T", "P")[power]
    digits = 0 if abs(value) >= 99.95 or (not power and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def format_rate(value: float | None) -> str:
    """Tokens per second: 24100 → "24.1 k tok/s"."""
    return NO_VALUE if value is None else f"{format_number(value)} tok/s"


def format_bytes(value: float | None) -> str:
    """Bytes: 6.0e6 → "6.00 MB"."""
    return format_number(value, "B")


def format_budget(budget: Mapping[str, Any]) -> str:
    """The budget of a run: "500 k tokens", "60 seconds", "1.00 P FLOPs"."""
    if budget["kind"] == "seconds":
        return f"{budget['value']:g} seconds"
    return f"{format_number(budget['value'])} {'FLOPs' if budget['kind'] == 'flops' else budget['kind']}"


def format_context(context: int) -> str:
    """A context length in tokens: 8192 → "8k", 512 → "512"."""
    return f"{context // 1024}k" if context >= 1024 and context % 1024 == 0 else str(context)


def format_bits(value: float | None) -> str:
    """Bits per byte with three decimals."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:.3f}"


def format_percent(value: float | None) -> str:
    """A fraction of 1 as a percentage: "98 %", below ten with one decimal: "8.3 %"."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def half_width(interval: Mapping[str, Any] | None) -> float | None:
    """Half of high − low, or None where there is no interval."""
    if interval is None or interval["low"] is None or interval["high"] is None:
        return None
    return float(interval["high"] - interval["low"]) / 2


def format_difference(difference: Mapping[str, Any] | None) -> str:
    """A difference as "+0.012 ± 0.015", with enough decimals to show which of the two numbers is larger."""
    if difference is None or difference["mean"] is None:
        return NO_VALUE
    mean, half = float(difference["mean"]), half_width(difference)
    if half is None:
        return format_signed(mean, 3)
    digits = 3
    while digits < 6 and half > 1e-6 and (round(half, digits) in (0, round(abs(mean), digits))):
        digits += 1
    return f"{format_signed(mean, digits)} ± {half:.{digits}f}"


def format_signed(value: float, digits: int = 3) -> str:
    """ "+0.012" or "−0.012"; a value that rounds to zero has no sign: "0.000"."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(digit in "123456789" for digit in text) else text[1:]


def format_bound(value: float) -> str:
    """An upper bound of bits per byte, rounded up to three decimals, or to two digits below 0.001."""
    if value <= 0:
        return "0"
    digits = 3 if value >= 0.001 else 1 - math.floor(math.log10(value))
    return f"{math.ceil(value * 10**digits - 1e-9) / 10**digits:.{digits}f}"


def format_share(part: float, whole: float) -> str:
    """`part` as a share of `whole`, to be followed by "of": "a quarter", "38 %", "2.3 times"."""
    ratio = part / whole
    for words, value in (("half", 1 / 2), ("a third", 1 / 3), ("a quarter", 1 / 4), ("an eighth", 1 / 8)):
        if abs(ratio / value - 1) < 0.03:
            return words
    if ratio > 1:
        return f"{ratio:.1f} times"
    return f"{100 * ratio:.0f} %" if ratio >= 0.01 else "under 1 %"


def judgment(difference: Mapping[str, Any] | None) -> str:
    """What the interval of a difference supports: "better", "worse", "equal", "not resolved" or "not measured".

    "so far": the planned runs of a comparison are not all there, so nothing is judged.

    "equal": every pair of runs gave the same number. With a single pair of runs ", one seed" is added to "better" and
    "worse".
    """
    if difference is None or difference["mean"] is None:
        return "not measured"
    if not difference.get("final", True):
        return "so far"
    if not difference["resolved"]:
        return "equal" if difference["mean"] == 0 and half_width(difference) == 0 else "not resolved"
    word = "better" if difference["mean"] < 0 else "worse"
    return word + (", one seed" if difference["pairs"] == 1 else "")


def join_names(names: Iterable[str], limit: int = 3) -> str:
    """ "a", "a and b", "a, b and c"; more than `limit` names give "a, b and 4 more"."""
    items = list(names)
    if len(items) > limit:
        items = [*items[: limit - 1], f"{len(items) - limit + 1} more"]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
