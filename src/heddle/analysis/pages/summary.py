"""The data of the report's summary table: a row for each design, its interval relative to the baseline."""

from dataclasses import dataclass

from heddle.analysis.comparison.formatting import (
    format_bits,
    format_difference,
    format_number,
    format_percent,
    half_width,
    judgment,
)
from heddle.analysis.comparison.lookup import (
    Design,
    Report,
    difference_to_baseline,
    first_probe,
    mean_loss,
    ranked_designs,
    recall_accuracy,
)
from heddle.analysis.comparison.tables import CostColumn, cost_columns
from heddle.analysis.pages.design_styles import DesignStyle, design_styles

INTERVAL_MARGIN = 1.08  # room around the largest interval


@dataclass(frozen=True)
class Bar:
    """A number in a cell with a bar below it. percent: the bar's length, None without a bar.

    ends: the range of a speed's measurements, as text. note: in the header.
    """

    title: str
    text: str
    percent: float | None
    note: str = ""
    ends: str = ""


@dataclass(frozen=True)
class Interval:
    """A point with an interval on a scale of percents, 50 of which is the baseline. filled: whether it is resolved."""

    mean: float
    low: float | None
    high: float | None
    filled: bool


@dataclass(frozen=True)
class DifferenceCell:
    """The difference to the baseline. look: better, worse or unresolved."""

    text: str
    judgment: str
    look: str
    method: str
    interval: Interval | None


@dataclass(frozen=True)
class SummaryRow:
    """A design. difference: None where it is the baseline; baseline_point: its point at 0, if it has a mean."""

    name: str
    style: DesignStyle
    size: str
    loss: str
    loss_interval: str
    loss_basis: str
    difference: DifferenceCell | None
    baseline_point: Interval | None
    recall: Bar | None
    costs: list[Bar]


@dataclass(frozen=True)
class SummaryTable:
    """The rows, lowest bits per byte first. baseline: its name; compares: whether there is a second design.

    recall_title, chance: of the first probe, where there is one; chance is the percentage that guessing gives.
    """

    rows: list[SummaryRow]
    baseline: str
    compares: bool
    recall_title: str | None
    chance: float | None


def summary_table(report: Report) -> SummaryTable:
    """The summary of a report."""
    columns, scale = cost_columns(report), _scale(report)
    probe = first_probe(report)
    return SummaryTable(
        rows=[_row(report, design, columns, scale) for design in ranked_designs(report)],
        baseline=report["baseline"],
        compares=len(report["designs"]) > 1,
        recall_title=None if probe is None else probe[1]["title"],
        chance=None if probe is None else 100 * probe[1]["chance"],
    )


def _scale(report: Report) -> float:
    """The largest difference, with its interval, that the scale must show on both sides of 0."""
    ends = [abs(row[key]) for row in report["differences"] for key in ("mean", "low", "high") if row[key] is not None]
    return max(ends, default=0.0) * INTERVAL_MARGIN or 1.0


def _row(report: Report, design: Design, columns: list[CostColumn], scale: float) -> SummaryRow:
    mean, half = mean_loss(design), half_width(design["bits_per_byte"])
    is_baseline = design["name"] == report["baseline"]
    return SummaryRow(
        name=design["name"],
        style=design_styles(report)[design["name"]],
        size=parameters_text(design),
        loss=format_bits(mean),
        loss_interval="" if half is None else f"± {half:.3f}",
        loss_basis=(design["bits_per_byte"] or {}).get("basis", ""),
        difference=None if is_baseline else _difference(report, design["name"], scale),
        baseline_point=Interval(50.0, None, None, True) if is_baseline and mean is not None else None,
        recall=_recall(report, design),
        costs=[_cost(column, design["name"]) for column in columns],
    )


def parameters_text(design: Design) -> str:
    """ "1.31 M parameters", for a mixture of experts with the active ones: "9.00 M parameters, 1.31 M active"."""
    text = f"{format_number(design['parameters'])} parameters"
    if design["active_parameters"] in (None, design["parameters"]):
        return text
    return f"{text}, {format_number(design['active_parameters'])} active"


def _difference(report: Report, name: str, scale: float) -> DifferenceCell:
    row = difference_to_baseline(report, name)
    word = judgment(row)
    # one seed gives no certain judgment, so it looks like an unresolved one
    look = word if word in ("better", "worse") else "unresolved"
    interval = None
    if row is not None and row["mean"] is not None:
        half = half_width(row)
        low, high = (None, None) if not half else (row["mean"] - half, row["mean"] + half)
        interval = Interval(
            mean=_position(row["mean"], scale),
            low=None if low is None else _position(low, scale),
            high=None if high is None else _position(high, scale),
            filled=look != "unresolved",
        )
    return DifferenceCell(format_difference(row), word, look, "" if row is None else row["method"], interval)


def _position(value: float, scale: float) -> float:
    return 50 + 50 * value / scale


def _recall(report: Report, design: Design) -> Bar | None:
    probe = first_probe(report)
    if probe is None:
        return None
    accuracy = recall_accuracy(design, probe[0])
    percent = None if accuracy is None else 100 * accuracy
    return Bar(f"Recall, {probe[1]['title']}", format_percent(accuracy), percent)


def _cost(column: CostColumn, name: str) -> Bar:
    value = column.values[name]
    largest = max((known for known in column.values.values() if known is not None), default=0.0)
    percent = 100 * value / largest if value is not None and largest else None
    note = "less is better" if column.less_is_better else "more is better"
    return Bar(column.title, column.format(value), percent, note, column.range_text(name))
