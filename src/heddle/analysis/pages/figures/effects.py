"""The figures of varied fields: bits per byte over the values of each field."""

from collections.abc import Mapping, Sequence
from typing import Any

from heddle.analysis.comparison.formatting import format_bits, format_difference, half_width, judgment
from heddle.analysis.comparison.lookup import Report, mean_loss
from heddle.analysis.pages.figures.base import (
    Figure,
    axis,
    base_layout,
    design_trace,
    dotted_line,
    error_bar,
    plotly_text,
)

Field = Mapping[str, Any]
Value = Mapping[str, Any]
LOG_AXIS_RATIO = 8  # of the largest number to the smallest; from there on their axis is logarithmic


def effect_figures(report: Report) -> dict[str, Figure | None]:
    """A figure for each varied field, named effect-0, effect-1 …; None where nothing was measured."""
    return {f"effect-{index}": _effect_figure(report, field) for index, field in enumerate(report["effects"]["fields"])}


def centered_mean(field: Field, value: Value) -> float | None:
    """Where a value is drawn: the baseline value's mean plus the paired difference, so that its interval fits."""
    baseline_mean = next(candidate["mean"] for candidate in field["values"] if candidate["label"] == field["baseline"])
    difference = value["difference"]
    if baseline_mean is None or difference is None or difference["mean"] is None:
        return None if value["mean"] is None else float(value["mean"])
    return float(baseline_mean + difference["mean"])


def _effect_figure(report: Report, field: Field) -> Figure | None:
    """Numbers are drawn along x with the loss above; other values are drawn as rows, with the loss along x."""
    values = [value for value in field["values"] if centered_mean(field, value) is not None]
    if not values:
        return None
    numeric = all(value["number"] is not None for value in values)
    if numeric:
        values = sorted(values, key=lambda value: value["number"])
    means = _coordinates(values, [centered_mean(field, value) for value in values], numeric)
    data: list[Figure] = []
    if numeric:
        line = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
        data.append(line | {"line": {"color": "soft", "width": 1.5}, **means})
    averaged = any(len(value["designs"]) > 1 for value in values)
    designs = {design["name"]: design for design in report["designs"]}
    for value in values:
        for design in (designs[name] for name in value["designs"]):
            loss = mean_loss(design)
            if loss is not None:
                point = design_trace(report, design, [(0.0, loss)], [f"{format_bits(loss)} bits per byte"])
                point["marker"] |= {"size": 9, "opacity": 0.5} if averaged else {"size": 13}
                data.append(point | {"mode": "markers"} | _coordinates([value], [loss], numeric))
    data.append(_mean_trace(values, numeric, averaged) | means)
    layout = base_layout(*_axes(field, values, numeric))
    baseline = next((centered_mean(field, value) for value in values if value["label"] == field["baseline"]), None)
    layout["shapes"] = [] if baseline is None else [dotted_line(baseline, color="series-0", vertical=not numeric)]
    return {"data": data, "layout": layout}


def _coordinates(values: Sequence[Value], losses: Sequence[float | None], numeric: bool) -> dict[str, Any]:
    if numeric:
        return {"x": [value["number"] for value in values], "y": list(losses)}
    return {"x": list(losses), "y": [plotly_text(value["label"]) for value in values]}


def _mean_trace(values: Sequence[Value], numeric: bool, averaged: bool) -> Figure:
    """The values' means as bars with their intervals; only the intervals where a value is a single design."""
    halves = [half_width(value["difference"]) or 0.0 for value in values]
    color = "series-0" if averaged else "clear"
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {
            "color": color,
            "symbol": "line-ew" if numeric else "line-ns",
            "size": 22,
            "line": {"color": color, "width": 3},
        },
        "error_y" if numeric else "error_x": error_bar(halves, "series-0"),
        "customdata": [plotly_text(value["label"]) for value in values],
        "text": [_hover_text(value) for value in values],
        "showlegend": False,
    }


def _hover_text(value: Value) -> str:
    text = f"{format_bits(value['mean'])} bits per byte"
    if value["difference"] is None:
        return text
    return f"{text}\n{format_difference(value['difference'])}, {judgment(value['difference'])}"


def _axes(field: Field, values: Sequence[Value], numeric: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The x and the y axis."""
    loss_axis, value_axis = axis("bits per byte"), axis(plotly_text(field["title"]))
    if not numeric:
        return loss_axis, value_axis | {"type": "category", "autorange": "reversed"}
    numbers = [value["number"] for value in values]
    is_wide = numbers[0] > 0 and numbers[-1] >= LOG_AXIS_RATIO * numbers[0]
    ticks = {"tickvals": numbers, "ticktext": [plotly_text(value["label"]) for value in values]}
    return value_axis | ticks | {"type": "log" if is_wide else "linear"}, loss_axis
