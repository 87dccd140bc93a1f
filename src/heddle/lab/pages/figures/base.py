"""What the figures share: axes, layout, and a trace in the style of a design.

Colors are names of the page's CSS variables ("series-2", "ink"), which the script replaces, so that figures follow the
light and the dark scheme. Every trace of a design has the design's index in `meta`, by which the legend hides it. Line
breaks in texts are "\\n"; the script turns them into plotly's markup.
"""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from heddle.lab.compare.results import Design, Report
from heddle.lab.compare.tables import format_context, format_number
from heddle.lab.pages.render import report_styles

MAX_CONTEXT_TICKS = 5
Figure = dict[str, Any]
Points = list[tuple[float, float]]


def finite_points(series: Iterable[Sequence[Any]] | None) -> Points:
    """The points of a series that are finite; the curve of a diverged run ends where its numbers do."""
    return [(x, y) for x, y, *_ in series or () if y is not None and math.isfinite(y)]


def plotly_text(text: str) -> str:
    """Escape a text for plotly, which interprets tags and %{…} in it."""
    return html.escape(text).replace("%{", "% {")


def design_trace(report: Report, design: Design, points: Points, texts: list[str]) -> Figure:
    """A line with markers in the design's style. texts: hover text of each point."""
    style = report_styles(report)[design.name]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": plotly_text(design.name),
        "meta": report.designs.index(design),
        "line": {"color": style.color, "dash": style.dash, "width": 2.25},
        "marker": {"color": style.color, "symbol": style.marker, "size": 8},
        "text": texts,
        "showlegend": False,
    }


def error_bar(half_widths: Sequence[float], color: str, width: float = 5, thickness: float = 1.75) -> dict[str, Any]:
    """The error bars of a trace: half-widths of intervals."""
    return {"type": "data", "array": list(half_widths), "color": color, "thickness": thickness, "width": width}


def range_bar(rows: Sequence[Sequence[float]], color: str) -> dict[str, Any]:
    """The error bars of a trace from rows (x, value, low, high)."""
    return error_bar([high - value for _, value, _, high in rows], color, 4, 1.25) | {
        "symmetric": False,
        "arrayminus": [value - low for _, value, low, _ in rows],
    }


def dotted_line(value: float, *, color: str, vertical: bool = False) -> dict[str, Any]:
    """A line across the whole figure, at a value of y, or of x if it is vertical."""
    line = {"type": "line", "line": {"color": color, "width": 1.25, "dash": "dot"}}
    if vertical:
        return line | {"yref": "paper", "y0": 0, "y1": 1, "x0": value, "x1": value}
    return line | {"xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}


def axis(title: str) -> dict[str, Any]:
    """An axis in the page's colors."""
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 12.5}},
        "gridcolor": "grid",
        "linecolor": "line",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"color": "soft"},
    }


def context_axis(contexts: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis of contexts, with ticks at the measured ones, or at every second one if there are many."""
    measured = sorted({int(context) for context in contexts})
    ticks = measured[::-1][:: -(-len(measured) // MAX_CONTEXT_TICKS)][::-1] if measured else []
    labels = [format_context(tick) for tick in ticks]
    return axis("context, tokens") | {"type": "log", "tickvals": ticks, "ticktext": labels}


def byte_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis of bytes, with ticks at 1, 10, 100 … or, over a short range, at 1, 2, 5, 10 …"""
    sizes = list(values)
    if not sizes:
        return axis(title)
    low, high = math.log10(min(sizes)) - 0.15, math.log10(max(sizes)) + 0.15
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    ticks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in steps]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    # ticks are round numbers: "10 MB", not "10.0 MB"
    labels = [format_number(tick, "B").replace(".00", "").replace(".0", "") for tick in ticks]
    return axis(title) | {"type": "log", "tickvals": ticks, "ticktext": labels, "range": [low, high]}


def base_layout(x_axis: dict[str, Any], y_axis: dict[str, Any]) -> dict[str, Any]:
    """The layout of every figure, around its two axes."""
    return {
        "paper_bgcolor": "clear",
        "plot_bgcolor": "clear",
        "font": {"color": "soft", "size": 13},
        "margin": {"l": 58, "r": 16, "t": 12, "b": 48},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "card", "bordercolor": "line", "font": {"color": "ink"}, "namelength": -1},
        "xaxis": {**x_axis, "showline": True},
        "yaxis": y_axis,
        "modebar": {"bgcolor": "clear", "color": "soft", "activecolor": "ink"},
        "dragmode": False,
    }
