"""The figure of length extrapolation: bits per byte over the length of the text that is read at once."""

import math
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from heddle.analysis.comparison.formatting import (
    format_bits,
    format_context,
    format_difference,
    half_width,
    judgment,
)
from heddle.analysis.comparison.lookup import Design, Report, missing_reason
from heddle.analysis.pages.figures.base import Figure, axis, base_layout, design_trace, dotted_line, error_bar

Row = Mapping[str, Any]  # a design at one multiple of the trained length


def length_figure(report: Report) -> Figure | None:
    """A line for each design, ended by a cross where it gives no further number; None where nothing was measured."""
    trained_length, multiples = report["extrapolation"]["sequence_length"], report["extrapolation"]["multiples"]
    data: list[Figure] = []
    for design in report["designs"]:
        rows = list(takewhile(lambda row: row["bits_per_byte"] is not None, design["extrapolation"]))
        if rows:
            data.append(_line(report, design, rows))
            data += [_cross(data[-1], missing) for missing in design["extrapolation"][len(rows) :][:1]]
    if not data:
        return None
    ticks = [trained_length * multiple for multiple in multiples]
    labels = [f"{format_context(tick)}\n{multiple} ×" for tick, multiple in zip(ticks, multiples, strict=True)]
    half_doubling = math.log10(2) / 2
    layout = base_layout(axis("tokens read at once, and times the trained length"), axis("bits per byte"))
    layout["xaxis"] |= {
        "type": "log",
        "tickvals": ticks,
        "ticktext": labels,
        "range": [math.log10(ticks[0]) - half_doubling, math.log10(ticks[-1]) + half_doubling],
    }
    layout["shapes"] = [dotted_line(trained_length, color="soft", vertical=True)]
    layout["annotations"] = [
        {
            "x": math.log10(trained_length),
            "yref": "paper",
            "y": 1,
            "xanchor": "left",
            "yanchor": "top",
            "xshift": 4,
            "text": "trained",
            "showarrow": False,
            "font": {"color": "soft", "size": 12},
        }
    ]
    return {"data": data, "layout": layout}


def _line(report: Report, design: Design, rows: list[Row]) -> Figure:
    """The mean at the trained length, then this mean plus the paired changes; so a failed seed moves no point."""
    trained_length, first_mean = report["extrapolation"]["sequence_length"], rows[0]["bits_per_byte"]
    points, texts, halves = [], [], []
    for row in rows:
        change, length = row["change"], row["multiple"] * trained_length
        loss = row["bits_per_byte"] if change is None or change["mean"] is None else first_mean + change["mean"]
        points.append((length, loss))
        texts.append(f"{format_bits(loss)} bits per byte, {length} tokens read at once{_change_text(row)}")
        halves.append(half_width(change) or 0.0)
    trace = design_trace(report, design, points, texts)
    return trace | {"error_y": error_bar(halves, trace["line"]["color"], width=4, thickness=1.5)}


def _change_text(row: Row) -> str:
    if row["change"] is None:
        return ""
    missing = f", {row['not_finite']} seeds not finite" if row["not_finite"] else ""
    return f"\n{format_difference(row['change'])}, {judgment(row['change'])}{missing}"


def _cross(line: Figure, missing: Row) -> Figure:
    """A cross on a line's last point, which says why there is no next one."""
    marker = {"color": line["marker"]["color"], "symbol": "x", "size": 11}
    text = f"at {missing['multiple']} × {missing_reason(missing)}"
    cross = {key: value for key, value in line.items() if key != "error_y"}
    return cross | {"mode": "markers", "x": line["x"][-1:], "y": line["y"][-1:], "marker": marker, "text": [text]}
