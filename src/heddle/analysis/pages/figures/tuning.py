"""The figures of tuning: bits per byte over the values of each tuned field, a line for each design."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from heddle.analysis.comparison.formatting import format_bits
from heddle.analysis.comparison.lookup import Report
from heddle.analysis.comparison.tuning_fields import format_value
from heddle.analysis.pages.figures.base import Figure, axis, base_layout, design_trace, dotted_line, plotly_text

LOSS_SPAN = 4.0  # the axis ends at so many times the spread of the better half; what diverges would hide the rest


def tuning_figures(report: Report) -> dict[str, Figure | None]:
    """A figure for each tuned field, named tuning-0, tuning-1 …; None where no trial finished."""
    tuning = report.get("tuning")
    fields = tuning["fields"] if tuning else []
    return {f"tuning-{index}": _tuning_figure(report, index) for index in range(len(fields))}


def profile(trials: Sequence[Mapping[str, Any]], axis_index: int) -> dict[Any, float]:
    """The lowest bits per byte for each value of a field, over the values of the other fields."""
    lowest: dict[Any, float] = {}
    for trial in trials:
        loss, value = trial["bits_per_byte"], trial["values"][axis_index]
        if loss is not None and loss < lowest.get(value, math.inf):
            lowest[value] = loss
    return lowest


def _tuning_figure(report: Report, index: int) -> Figure | None:
    """A line for each design, and a ring around its choice."""
    tuning = report["tuning"]
    field = tuning["fields"][index]
    is_log = field["is_number"] and min(field["values"]) > 0
    tuned = {design["name"]: design for design in tuning["designs"]}
    data: list[Figure] = []
    for design in report["designs"]:
        best = tuned[design["name"]]
        losses = profile(best["trials"], index)
        points = [(value, losses[value]) for value in field["values"] if value in losses]
        if points:
            texts = [f"{format_bits(loss)} bits per byte at {format_value(value)}" for value, loss in points]
            data.append(design_trace(report, design, points, texts))
        if best["bits_per_byte"] is not None:
            ring = design_trace(report, design, [(best["best"][index], best["bits_per_byte"])], [best["text"]])
            ring["marker"] |= {"symbol": "circle-open", "size": 18, "line": {"width": 2}}
            data.append(ring | {"mode": "markers", "hoverinfo": "skip"})
    if not data:
        return None
    for trace in data:
        trace["x"] = trace["x"] if field["is_number"] else [plotly_text(value) for value in trace["x"]]
    layout = base_layout(axis(plotly_text(field["name"])), axis("bits per byte"))
    labels = [plotly_text(format_value(value)) for value in field["values"]]
    layout["xaxis"] |= {"type": "log" if is_log else "linear", "tickvals": field["values"], "ticktext": labels}
    if not field["is_number"]:
        layout["xaxis"] = axis(plotly_text(field["name"])) | {"type": "category", "showline": True}
    else:
        layout["shapes"] = [dotted_line(tuning["shared_values"]["values"][index], color="soft", vertical=True)]
    layout["yaxis"]["range"] = _loss_range([y for trace in data for y in trace["y"]])
    return {"data": data, "layout": layout}


def _loss_range(losses: Sequence[float]) -> list[float]:
    """From below the lowest loss to what the better half needs: a value that nearly diverged leaves at the top."""
    ordered = sorted(losses)
    low, middle = ordered[0], ordered[len(ordered) // 2]
    high = min(ordered[-1], low + max(LOSS_SPAN * (middle - low), 0.02))
    margin = 0.06 * (high - low) + 1e-3
    return [low - margin, high + margin]
