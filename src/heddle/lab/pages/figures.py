"""What the figures share: axes, layout, a trace in the style of a design, and figures of lines.

Colors are names of the page's CSS variables ("series-2", "ink"), which the script replaces, so that figures follow the
light and the dark scheme. Every trace of a design has the design's index in `meta`, by which the legend hides it. Line
breaks in texts are "\\n"; the script turns them into plotly's markup.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.lab.compare.results import Design, Report
from heddle.lab.compare.tables import format_context, format_number
from heddle.lab.pages.render import DesignStyle, report_styles

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


def dotted_line(value: float, *, color: str, vertical: bool = False, dash: str = "dot") -> dict[str, Any]:
    """A line across the whole figure, at a value of y, or of x if it is vertical."""
    line = {"type": "line", "line": {"color": color, "width": 1.25, "dash": dash}}
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
    labels = [round_number(tick, "B") for tick in ticks]
    return axis(title) | {"type": "log", "tickvals": ticks, "ticktext": labels, "range": [low, high]}


def round_number(value: float, unit: str = "") -> str:
    """A tick that is a round number: "10 MB", not "10.0 MB"."""
    return format_number(value, unit).replace(".00", "").replace(".0", "")


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


# Figures of lines: curves with bands, points with intervals, dotted lines across the plot.

BAND, BEHIND = 0.14, 0.4  # opacities
RULE_DASHES = ("dot", "dashdot")  # of lines across the plot
# Below the axis and its title; the script makes the figure higher by it.
LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "maxheight": 1} | {
    "font": {"color": "ink", "size": 12}
}


@dataclass(frozen=True)
class Value:
    """A point with its interval and its hover text."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    title: str = ""


@dataclass(frozen=True)
class Series:
    """The values of one line of a figure.

    name: in the legend, "" for a line that is not listed. has_line: whether a line connects the points. filled:
    whether the markers are filled. is_curve: whether it has a band for its intervals and no markers. is_behind: whether
    it is thin and pale, behind other lines.
    """

    name: str
    style: DesignStyle
    values: Sequence[Value]
    has_line: bool = True
    filled: bool = True
    is_curve: bool = False
    is_behind: bool = False


def line_figure(
    series: Iterable[Series], x_axis: dict[str, Any], y_axis: dict[str, Any], dotted: Sequence[tuple[float, str]] = ()
) -> Figure:
    """A figure of lines. dotted: (value of y, name) of lines across the plot; the legend names them, above no point."""
    shown = [each for each in series if each.values]
    data = [trace for each in shown if each.is_curve for trace in _band(each)] + [_trace(each) for each in shown]
    layout = base_layout(x_axis, y_axis)
    rules = [(value, name, RULE_DASHES[index % len(RULE_DASHES)]) for index, (value, name) in enumerate(dotted)]
    layout["shapes"] = [dotted_line(value, color="soft", dash=dash) for value, _, dash in rules]
    data += [_rule_name(name, dash) for _, name, dash in rules]
    if rules or any(each.name for each in shown):
        layout["showlegend"] = True
        layout["legend"] = LEGEND
    return {"data": data, "layout": layout}


def _trace(series: Series) -> Figure:
    style, values = series.style, [value for value in series.values if math.isfinite(value.y)]
    has_markers = not series.is_curve and not series.is_behind
    trace: Figure = {
        "type": "scatter",
        "mode": "+".join(["lines"] * series.has_line + ["markers"] * has_markers) or "lines",
        "x": [value.x for value in values],
        "y": [value.y for value in values],
        "name": plotly_text(series.name),
        "showlegend": bool(series.name),
        "line": {"color": style.color, "dash": style.dash, "width": 1 if series.is_behind else 2.25},
        "marker": {"color": style.color, "symbol": style.marker + ("" if series.filled else "-open"), "size": 8},
    }
    if any(value.title for value in values):
        trace["text"] = trace["hovertext"] = [plotly_text(value.title) for value in values]
        trace["customdata"] = [" "] * len(values)  # the hover text names the line already
    else:
        trace["hoverinfo"] = "skip"
    if series.is_behind:
        trace |= {"opacity": BEHIND, "hoverinfo": "skip"}
    elif not series.is_curve and any(value.high is not None for value in values):
        above = [0.0 if value.high is None else max(0.0, value.high - value.y) for value in values]
        below = [0.0 if value.low is None else max(0.0, value.y - value.low) for value in values]
        trace["error_y"] = error_bar(above, style.color, 4, 1.5) | {"symmetric": False, "arrayminus": below}
    return trace


def _band(series: Series) -> list[Figure]:
    """The area between the ends of a curve's intervals; empty without intervals."""
    ends = [(value.x, value.low, value.high) for value in series.values if value.low is not None]
    if not ends:
        return []
    corners = [(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)]
    return [
        {
            "type": "scatter",
            "mode": "none",
            "fill": "toself",
            "fillcolor": series.style.color,
            "opacity": BAND,
            "x": [x for x, _ in corners],
            "y": [y for _, y in corners],
            "showlegend": False,
            "hoverinfo": "skip",
        }
    ]


def _rule_name(name: str, dash: str) -> Figure:
    """A line's entry in the legend; it draws nothing."""
    line = {"color": "soft", "dash": dash, "width": 1.25}
    empty = {"type": "scatter", "mode": "lines", "x": [None], "y": [None], "hoverinfo": "skip"}
    return empty | {"name": plotly_text(name), "showlegend": True, "line": line}


def value_range(series: Iterable[Series], include: Iterable[float] = ()) -> tuple[float, float]:
    """The lowest and highest ends of all intervals, with a margin on both sides."""
    ends = [end for each in series for value in each.values for end in (value.y, value.low, value.high)]
    finite = [*include, *(end for end in ends if end is not None and math.isfinite(end))]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def named_axis(title: str, labels: Sequence[str]) -> dict[str, Any]:
    """An axis with a label at 0.5, 1.5, …"""
    places = [index + 0.5 for index in range(len(labels))]
    return axis(title) | {"range": [0, len(labels)], "tickvals": places, "ticktext": list(labels), "showgrid": False}


def log_range(low: float, high: float) -> list[float]:
    """The range of a logarithmic axis."""
    return [math.log10(low), math.log10(high)]
