"""Rows and columns that the terminal and the report's page share: costs, effects of varied fields, equal sizes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from heddle.lab.compare.results import (
    BaselineRow,
    Budget,
    Design,
    Difference,
    Interval,
    LengthChange,
    PairRow,
    ProbeSummary,
    Report,
    VariedField,
)
from heddle.lab.compare.statistics import finished_runs

# Format numbers as text: units, percent, signs, intervals, lists of names.


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


def format_budget(budget: Budget) -> str:
    """The budget of a run: "500 k tokens", "60 seconds", "1.00 P FLOPs"."""
    if budget.kind == "seconds":
        return f"{budget.value:g} seconds"
    return f"{format_number(budget.value)} {'FLOPs' if budget.kind == 'flops' else budget.kind}"


def format_context(context: int) -> str:
    """A context length in tokens: 8192 → "8k", 512 → "512"."""
    return f"{context // 1024}k" if context >= 1024 and context % 1024 == 0 else str(context)


def format_bits(value: float | None) -> str:
    """Bits per byte with three decimals."""
    return NO_VALUE if value is None or not math.isfinite(value) else f"{value:z.3f}"


def format_percent(value: float | None) -> str:
    """A fraction of 1 as a percentage: "98 %", below ten with one decimal: "8.3 %"."""
    if value is None or not math.isfinite(value):
        return NO_VALUE
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.1f} %"


def half_width(interval: Interval | None) -> float | None:
    """Half of high − low, or None where there is no interval."""
    if interval is None or interval.low is None or interval.high is None:
        return None
    return float(interval.high - interval.low) / 2


def format_difference(difference: Interval | None) -> str:
    """A difference as "+0.012 ± 0.015", with enough decimals to show which of the two numbers is larger."""
    if difference is None or difference.mean is None:
        return NO_VALUE
    mean, half = float(difference.mean), half_width(difference)
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


def judgment(difference: Difference | None) -> str:
    """What the interval of a difference supports: "better", "worse", "equal", "not resolved" or "not measured".

    "so far": planned runs are pending, so nothing is judged.

    "equal": every pair of runs gave the same number. With a single pair of runs ", one seed" is added to "better" and
    "worse".
    """
    if difference is None or difference.mean is None:
        return "not measured"
    if difference.final is False:
        return "so far"
    if not difference.resolved:
        return "equal" if difference.mean == 0 and half_width(difference) == 0 else "not resolved"
    word = "better" if difference.mean < 0 else "worse"
    return word + (", one seed" if difference.pairs == 1 else "")


def join_names(names: Iterable[str], limit: int = 3) -> str:
    """ "a", "a and b", "a, b and c"; more than `limit` names give "a, b and 4 more"."""
    items = list(names)
    if len(items) > limit:
        items = [*items[: limit - 1], f"{len(items) - limit + 1} more"]
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


# Read values out of a comparison's report: means, differences, recall, and series over the context length.


PREFERRED_CONTEXT = 8192


def value_at(series: Iterable[Sequence[Any]] | None, context: float | None) -> float | None:
    """The value of a series of [context, value, …] at one context, or None."""
    return next((row[1] for row in series or () if row[0] == context), None)


def range_at(series: Iterable[Sequence[Any]] | None, context: float | None) -> tuple[float, float] | None:
    """The range of a series of [context, value, low, high] at one context, or None. [context, value] has no range."""
    return next(((row[2], row[3]) for row in series or () if row[0] == context and len(row) > 2), None)


def series_of(design: Design, name: str) -> Sequence[Sequence[Any]]:
    """A series over the context: "state_bytes", "prefill" or "decode"."""
    series: Sequence[Sequence[Any]] = getattr(design, name)
    return series


def shared_context(designs: Iterable[Design], name: str) -> int | None:
    """A context at which all designs with a series were measured: 8192, or else the largest, or None."""
    every_series = [series_of(design, name) for design in designs]
    measured = [{row[0] for row in series if row[1] is not None} for series in every_series if series]
    common = set.intersection(*measured) if measured else set()
    return PREFERRED_CONTEXT if PREFERRED_CONTEXT in common else max(common, default=None)


def mean_loss(design: Design) -> float | None:
    """The design's mean bits per byte, or None where no run finished."""
    return None if design.bits_per_byte is None else design.bits_per_byte.mean


def seed_counts(report: Report) -> dict[str, int]:
    """The finished seeds of each design; while trainings are pending, the planned ones."""
    stages = (stage for stage in report.progress.stages if stage.title == "training runs")
    if any(stage.finished < stage.planned for stage in stages):
        return {design.name: len(report.budget.seeds) for design in report.designs}
    return {design.name: len(finished_runs(design.runs)) for design in report.designs}


def seeds_text(report: Report) -> str:
    """ "3 seeds each", or "2 to 3 seeds" where designs differ."""
    counts = sorted(set(seed_counts(report).values()))
    number = " to ".join(map(str, (counts[0], *counts[1:][-1:])))
    each = " each" if len(report.designs) > 1 and len(counts) == 1 else ""
    return f"{number} seed{'' if counts[-1] == 1 else 's'}{each}"


def ranked_designs(report: Report) -> list[Design]:
    """The designs, lowest bits per byte first; designs without a finished run are last.

    The leader is first, also of equal means.
    """

    def key(design: Design) -> tuple[bool, float]:
        mean = mean_loss(design)
        return design.name != report.leader, math.inf if mean is None else mean

    return sorted(report.designs, key=key)


def baseline_design(report: Report) -> Design:
    """The design that the others are compared with."""
    return next(design for design in report.designs if design.name == report.baseline)


def difference_to_baseline(report: Report, name: str) -> BaselineRow | None:
    """The paired difference of a design to the baseline; None for the baseline itself."""
    return next((row for row in report.differences if row.design == name), None)


def differences_to_leader(report: Report) -> list[PairRow]:
    """The rows of the pairs of the leader (their `design`) and another (their `reference`), nearest first."""
    return [row for row in report.pairs if row.design == report.leader]


def recall_accuracy(design: Design, probe: str) -> float | None:
    """Accuracy on a recall probe, or None where it was not measured."""
    result = design.recall.get(probe)
    return None if result is None else result.accuracy


def first_probe(report: Report) -> tuple[str, ProbeSummary] | None:
    """(name, description) of the first recall probe, which represents all in summaries; None where there is none."""
    return next(iter(report.recall.items()), None)


def missing_reason(row: LengthChange) -> str:
    """Why a design has no number at a multiple of the trained length: "refused", "not finite" or "not measured"."""
    if row.refusal is not None:
        return "refused"
    return "not finite" if row.not_finite else "not measured"


# of each kind of size: its key in a design's report, and its name in a sentence
SIZE_WORDS = {
    "parameters": ("parameters", "parameters"),
    "active-parameters": ("active_parameters", "active parameters per token"),
    "flops": ("flops_per_token", "forward FLOPs per token"),
}


@dataclass(frozen=True)
class CostColumn:
    """A cost of all designs. context: where it was measured; values: by the design's name.

    ranges: of the measurements of a speed, (low, high) by the design's name; none for what is counted.
    """

    name: str
    context: int | None
    format: Formatter
    less_is_better: bool
    values: Mapping[str, float | None]
    ranges: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """ "State at 8k"."""
        return self.name if self.context is None else f"{self.name} at {format_context(self.context)}"

    def range_text(self, name: str) -> str:
        """The range of a design's measurements: "16.8 to 17.6 k"; "" where it has none."""
        ends = self.ranges.get(name)
        if ends is None:
            return ""
        low, high = (format_number(end) for end in ends)
        unit = high.partition(" ")[2]
        return f"{low.removesuffix(f' {unit}')} to {high}"  # "16.8 to 17.6 k"


@dataclass(frozen=True)
class TextTable:
    """A table of formatted numbers; the first column names the row."""

    header: list[str]
    rows: list[list[str]]
    label: str = ""


def cost_columns(report: Report) -> list[CostColumn]:
    """What the designs cost: training speed, peak memory, state, decoding speed."""
    designs = report.designs
    training_speed = {design.name: design.train_tokens_per_second for design in designs}
    peak_memory = {design.name: design.peak_memory_bytes for design in designs}
    state_context, decode_context = shared_context(designs, "state_bytes"), shared_context(designs, "decode")
    states = {design.name: value_at(design.state_bytes, state_context) for design in designs}
    decode_speed = {design.name: value_at(design.decode, decode_context) for design in designs}
    training_ranges = {design.name: design.train_speed_range for design in designs}
    decode_ranges = {design.name: range_at(design.decode, decode_context) for design in designs}
    return [
        CostColumn("Training", None, format_rate, False, training_speed, training_ranges),
        CostColumn("Peak memory", None, format_bytes, True, peak_memory),
        CostColumn("State", state_context, format_bytes, True, states),
        CostColumn("Decode", decode_context, format_rate, False, decode_speed, decode_ranges),
    ]


def effect_table(field: VariedField) -> TextTable:
    """A row for each value of a varied field: its mean, its difference to the baseline's value, and the judgment."""
    rows = []
    for value in field.values:
        difference = ["", "baseline"]
        if value.difference:
            difference = [format_difference(value.difference), judgment(value.difference)]
        rows.append([value.label, format_bits(value.mean), *difference])
    header = [field.title, "bits per byte", f"difference to {field.baseline}", ""]
    return TextTable(header, rows, f"Bits per byte by {field.title}")


def equal_size_words(report: Report) -> str:
    """The size that all designs share, in words: "parameters"."""
    kind, _, context = (report.equal_size or "").partition("@")
    if context:
        return f"state bytes at {context} tokens"
    at = f" at {report.budget.sequence_length:,} tokens" if kind == "flops" else ""
    return SIZE_WORDS[kind][1] + at


def equal_size_table(report: Report) -> TextTable:
    """A row for each design: what was changed, its size, and its deviation from the baseline's.

    What changed is the width (before and after), or the fields that set the size of a state.
    """
    kind, baseline = report.equal_size or "", baseline_design(report)
    is_state = "@" in kind

    def size(design: Design) -> float:
        amount: float = getattr(design, "equal_state_bytes" if is_state else SIZE_WORDS[kind][0])
        return amount

    rows = []
    for design in report.designs:
        original, trained = design.width.original, design.width.trained
        change = str(trained) if original == trained else f"{original} → {trained}"
        if is_state:
            change = ", ".join(design.scaled_fields) or "nothing"
        amount = (format_bytes if is_state else format_number)(size(design))
        deviation = f"{format_signed(100 * (size(design) / size(baseline) - 1), 1)}%"
        rows.append([design.name, change, amount, "baseline" if design.name == baseline.name else deviation])
    header = ["design", "changed" if is_state else "width", equal_size_words(report), "deviation"]
    return TextTable(header, rows, "States of equal size" if is_state else "Widths of equal size")
