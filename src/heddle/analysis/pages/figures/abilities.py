"""The charts of what designs can do: recall over the number of pairs, and over the bytes of state."""

import math

from heddle.analysis.comparison.formatting import format_bytes, format_percent
from heddle.analysis.comparison.lookup import Report
from heddle.analysis.pages.design_styles import design_styles
from heddle.analysis.pages.figures.base import byte_axis
from heddle.analysis.pages.figures.svg import Chart, Scale, Series, Value, line_chart

MAX_LINES = 8  # more lines are told by the table alone
FULL_SCALE = Scale(-0.03, 1.05)


def recall_curve_chart(report: Report) -> Chart | None:
    """Accuracy over the number of pairs, a line for each design; None where nothing was measured, or too much."""
    styles, pairs = design_styles(report), report["recall_curve"]["pairs"]
    series = []
    for design in report["designs"]:
        values = [
            Value(point["pairs"], point["accuracy"], title=_title(design["name"], point))
            for point in design["recall_curve"]
            if point["accuracy"] is not None
        ]
        if values:
            series.append(Series(design["name"], styles[design["name"]], values))
    if not series or len(series) > MAX_LINES:
        return None
    x_scale = Scale(pairs[0] / 1.3, pairs[-1] * 1.3, math.log)
    ticks = [(x_scale.percent(count), str(count)) for count in pairs]
    return line_chart(
        series, x_scale, ticks, ("pairs in a text", "right answers"), y_scale=FULL_SCALE, y_text=_percent_tick
    )


def frontier_chart(report: Report) -> Chart | None:
    """Accuracy at the most pairs over the bytes of state, a point for each design; None without two sizes of state."""
    styles, series = design_styles(report), []
    sizes = []
    for design in report["designs"]:
        point = design["recall_curve"][-1] if design["recall_curve"] else None
        if point is not None and point["accuracy"] is not None and point["state_bytes"]:
            sizes.append(point["state_bytes"])
            value = Value(point["state_bytes"], point["accuracy"], title=_title(design["name"], point))
            series.append(Series(design["name"], styles[design["name"]], [value], has_line=False))
    if len(set(sizes)) < 2:
        return None
    axis = byte_axis("", sizes)
    x_scale = Scale(10 ** axis["range"][0], 10 ** axis["range"][1], math.log10)
    ticks = [(x_scale.percent(v), text) for v, text in zip(axis["tickvals"], axis["ticktext"], strict=True)]
    most = report["recall_curve"]["pairs"][-1]
    titles = (f"state of the small copy after {most} pairs", f"right answers, {most} pairs")
    return line_chart(series, x_scale, ticks, titles, y_scale=FULL_SCALE, y_text=_percent_tick)


def _title(name: str, point: dict[str, float]) -> str:
    state = f", state {format_bytes(point['state_bytes'])}" if point["state_bytes"] else ""
    return f"{name}, {point['pairs']} pairs: {format_percent(point['accuracy'])}{state}"


def _percent_tick(value: float) -> str:
    return f"{100 * value:.0f} %"
