"""How a comparison's numbers are read and written: units, signs, better, worse, not resolved."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

MISSING = "–"
WISHED_CONTEXT = 8192
Report = Mapping[str, Any]
Design = Mapping[str, Any]
Writer = Callable[[float | None], str]


def scaled(value: float | None, unit: str = "") -> str:
    """Three digits and a decimal prefix: 1310000 → "1.31 M"; with unit "B", 6.0e6 → "6.00 MB"; None → "–"."""
    if value is None or not math.isfinite(value):
        return MISSING
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value, power = value / 1000, power + 1
    prefix = ("", "k", "M", "G", "T", "P")[power]
    digits = 0 if abs(value) >= 99.95 or (not power and value == int(value)) else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {prefix}{unit}".rstrip()


def rate(value: float | None) -> str:
    """Tokens a second: 24100 → "24.1 k tok/s"."""
    return MISSING if value is None else f"{scaled(value)} tok/s"


def size(value: float | None) -> str:
    """Bytes: 6.0e6 → "6.00 MB"."""
    return scaled(value, "B")


def budget(given: Mapping[str, Any]) -> str:
    """The budget of a run: "500 k tokens", "60 seconds", "1.00 P FLOPs"."""
    if given["kind"] == "seconds":
        return f"{given['value']:g} seconds"
    return f"{scaled(given['value'])} {'FLOPs' if given['kind'] == 'flops' else given['kind']}"


def context_name(context: int) -> str:
    """8192 → "8k", 512 → "512"."""
    return f"{context // 1024}k" if context >= 1024 and context % 1024 == 0 else str(context)


def bits(value: float | None) -> str:
    """Bits per byte with three decimals."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.3f}"


def percent(value: float | None) -> str:
    """A share as "98 %", "8.3 %" below ten."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def half_width(interval: Mapping[str, Any] | None) -> float | None:
    """Half of high − low, or None where there is no interval."""
    if interval is None or interval["low"] is None or interval["high"] is None:
        return None
    return float(interval["high"] - interval["low"]) / 2


def signed(difference: Mapping[str, Any] | None) -> str:
    """A difference as "+0.012 ± 0.015", with as many decimals as it takes to not blur which is larger."""
    if difference is None or difference["mean"] is None:
        return MISSING
    mean, half = float(difference["mean"]), half_width(difference)
    if half is None:
        return signed_alone(mean, 3)
    digits = 3
    while digits < 6 and half > 1e-6 and (round(half, digits) in (0, round(abs(mean), digits))):
        digits += 1
    return f"{signed_alone(mean, digits)} ± {half:.{digits}f}"


def signed_alone(value: float, digits: int = 3) -> str:
    """ "+0.012", "−0.012", and "0.000" for what rounds to nothing: nothing has no sign."""
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text if any(digit in "123456789" for digit in text) else text[1:]


def judgement(difference: Mapping[str, Any] | None) -> str:
    """What the interval allows to be said: "better", "worse", "not resolved" or "not measured"."""
    if difference is None or difference["mean"] is None:
        return "not measured"
    if not difference["resolved"]:
        return "not resolved"
    word = "better" if difference["mean"] < 0 else "worse"
    return word + (", one seed" if difference["pairs"] == 1 else "")


def lacking(row: Mapping[str, Any]) -> str:
    """In a word or two why a design has no number for a multiple of the trained context."""
    if row["refusal"] is not None:
        return "refused"
    return "not finite" if row["not_finite"] else "not measured"


def listing(names: Iterable[str], limit: int = 3) -> str:
    """ "a", "a and b", "a, b and c", and beyond the limit "a, b and 4 more"."""
    every = list(names)
    if len(every) > limit:
        every = [*every[: limit - 1], f"{len(every) - limit + 1} more"]
    return every[0] if len(every) == 1 else ", ".join(every[:-1]) + " and " + every[-1]


def share(part: float, whole: float) -> str:
    """How much `part` is of `whole`, in words that go before "of": "a quarter", "38 %", "2.3 times"."""
    ratio = part / whole
    for words, value in (("half", 1 / 2), ("a third", 1 / 3), ("a quarter", 1 / 4), ("an eighth", 1 / 8)):
        if abs(ratio / value - 1) < 0.03:
            return words
    if ratio > 1:
        return f"{ratio:.1f} times"
    return f"{100 * ratio:.0f} %" if ratio >= 0.01 else "under 1 %"


def at(series: Iterable[Iterable[Any]] | None, context: float | None) -> float | None:
    """The value a series of [context, value] has at a context, or None."""
    return next((value for place, value in series or () if place == context), None)


def shared_context(designs: Iterable[Design], key: str) -> int | None:
    """8192 where every design with this series has it, else the largest context all have, else None."""
    measured = [design[key] for design in designs if design[key]]
    places = [{place for place, value in series if value is not None} for series in measured]
    common = set.intersection(*places) if places else set()
    return WISHED_CONTEXT if WISHED_CONTEXT in common else max(common, default=None)


def mean_of(design: Design) -> float | None:
    """The design's mean bits per byte, or None where no run finished."""
    interval = design.get("bits_per_byte")
    return None if interval is None else interval["mean"]


def ranked(report: Report) -> list[Design]:
    """The designs, lowest bits per byte first, those without a finished run last."""

    def key(design: Design) -> float:
        mean = mean_of(design)
        return math.inf if mean is None else mean

    return sorted(report["designs"], key=key)


def difference_of(report: Report, name: str) -> Mapping[str, Any] | None:
    """The design's difference to the baseline, or None."""
    return next((row for row in report["differences"] if row["design"] == name), None)


def unfinished(design: Design) -> int:
    """How many of the design's runs diverged or failed."""
    return sum(run["status"] != "done" for run in design["runs"])
