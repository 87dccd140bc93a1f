"""The four figures of a comparison as plotly specifications: plain data, drawn by the page itself.

Colours are names of the page's own variables ("series-2", "ink"), so that the page can paint them for a light
or a dark scheme. Every trace carries the index of its design in `meta`, which the legend switches by.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from heddle.analysis.comparison import wording

COLOURS = 6
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
MARKERS = ("circle", "square", "diamond", "triangle-up", "pentagon", "triangle-down", "star", "hexagon")
LABELLED_DESIGNS = 8
Figure = dict[str, Any]
Points = list[tuple[float, float]]


def styles(report: wording.Report) -> dict[str, tuple[str, str, str]]:
    """Colour variable, dash and marker of each design; the baseline is always the ink one, solid, round."""
    others = [design["name"] for design in report["designs"] if design["name"] != report["baseline"]]
    chosen = {report["baseline"]: ("series-0", DASHES[0], MARKERS[0])}
    for place, name in enumerate(others):
        # 6 colours, 5 dashes and 8 markers in step: no two of 30 designs share both colour and dash
        dash, marker = DASHES[(place + 1) % len(DASHES)], MARKERS[(place + 1) % len(MARKERS)]
        chosen[name] = (f"series-{1 + place % COLOURS}", dash, marker)
    return chosen


def figures(report: wording.Report) -> dict[str, Figure | None]:
    """The figures by name, each {"data", "layout"}, or None where nothing was measured for it."""
    made = {"loss": _loss, "state": _state, "speed": _speed, "trade": _trade}
    drawn = {name: draw(report) for name, draw in made.items()}
    return {name: figure if figure["data"] else None for name, figure in drawn.items()}


def mean_curve(design: wording.Design) -> Points:
    """[(tokens, bits per byte)] averaged over the finished seeds, as far as all of them reached."""
    curves = [_points(run["curve"]) for run in design["runs"] if run["status"] == "done"]
    arrays = [np.array(curve) for curve in curves if curve]
    if not arrays:
        return []
    start, stop = max(curve[0, 0] for curve in arrays), min(curve[-1, 0] for curve in arrays)
    places = arrays[0][(arrays[0][:, 0] >= start) & (arrays[0][:, 0] <= stop), 0]
    values = np.mean([np.interp(places, curve[:, 0], curve[:, 1]) for curve in arrays], axis=0)
    return list(zip(places.tolist(), values.tolist(), strict=True))


def _points(series: Iterable[Sequence[Any]] | None) -> Points:
    """The finite points of a series; a diverged curve ends where its numbers do."""
    return [(x, y) for x, y in series or () if y is not None and math.isfinite(y)]


def design_line(report: wording.Report, design: wording.Design, points: Points, words: list[str]) -> Figure:
    """A line with markers in the design's style; `words` say each point for the pointer."""
    colour, dash, marker = styles(report)[design["name"]]
    # plotly reads tags and %{…} in names: a design's name must be neither
    name = html.escape(design["name"]).replace("%{", "% {")
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": name,
        "meta": report["designs"].index(design),
        "line": {"color": colour, "dash": dash, "width": 2.25},
        "marker": {"color": colour, "symbol": marker, "size": 8},
        "text": words,
        "hovertemplate": "<b>%{fullData.name}</b><br>%{text}<extra></extra>",
        "showlegend": False,
    }


def axis(title: str) -> dict[str, Any]:
    """An axis in the page's colours."""
    return {
        "title": {"text": title, "standoff": 10, "font": {"size": 12.5}},
        "gridcolor": "grid",
        "linecolor": "line",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"color": "soft"},
    }


def plain_layout(x: dict[str, Any], y: dict[str, Any]) -> dict[str, Any]:
    """What every figure shares, around its two axes."""
    return {
        "paper_bgcolor": "clear",
        "plot_bgcolor": "clear",
        "font": {"color": "soft", "size": 13},
        "margin": {"l": 58, "r": 16, "t": 12, "b": 48},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "card", "bordercolor": "line", "font": {"color": "ink"}, "namelength": -1},
        "xaxis": {**x, "showline": True},
        "yaxis": y,
        "modebar": {"bgcolor": "clear", "color": "soft", "activecolor": "ink"},
        "dragmode": False,
    }


def _contexts(places: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis of contexts, marked at the measured ones (every second where there are many)."""
    every = sorted({int(place) for place in places})
    marks = every[::-1][:: -(-len(every) // 5)][::-1] if every else []
    words = [wording.context_name(mark) for mark in marks]
    return axis("context, tokens") | {"type": "log", "tickvals": marks, "ticktext": words}


def _bytes(title: str, values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis of bytes, marked at 1, 10, 100 … or, over a short range, 1, 2, 5, 10 …"""
    sizes = list(values)
    if not sizes:
        return axis(title)
    low, high = math.log10(min(sizes)) - 0.15, math.log10(max(sizes)) + 0.15
    steps = (1,) if high - low > 2.5 else (1, 2, 5)
    marks = [step * 10.0**power for power in range(math.floor(low), math.ceil(high)) for step in steps]
    marks = [mark for mark in marks if low <= math.log10(mark) <= high]
    # whole marks read "10 MB", not "10.0 MB"
    words = [wording.scaled(mark, "B").replace(".00", "").replace(".0", "") for mark in marks]
    return axis(title) | {"type": "log", "tickvals": marks, "ticktext": words, "range": [low, high]}


def _loss(report: wording.Report) -> Figure:
    data: list[Figure] = []
    means: list[Points] = []
    for design in report["designs"]:
        for run in design["runs"]:
            points = _points(run["curve"])
            thin = design_line(report, design, points, []) | {"mode": "lines", "opacity": 0.3, "hoverinfo": "skip"}
            thin["line"] = {"color": thin["line"]["color"], "width": 1}
            del thin["hovertemplate"]
            data += [thin] if points else []
            if points and run["status"] != "done":
                end = design_line(report, design, points[-1:], [f"seed {run['seed']} {run['status']} here"])
                end["marker"] = {"color": end["marker"]["color"], "symbol": "x", "size": 10}
                data.append(end | {"mode": "markers"})
    for design in report["designs"]:
        points = mean_curve(design)
        words = [f"{wording.bits(y)} bits per byte at {wording.scaled(x)} tokens" for x, y in points]
        if points:
            means.append(points)
            data.append(design_line(report, design, points, words) | {"mode": "lines"})
    layout = plain_layout(axis("tokens trained on") | {"tickformat": "~s"}, axis("bits per byte"))
    if means:
        layout["yaxis"]["range"] = _late_range(means)
    return {"data": data, "layout": layout}


def _late_range(curves: Sequence[Points]) -> list[float]:
    """The values from an eighth of the training on: the fall before it would flatten all that differs."""
    late = [y for curve in curves for x, y in curve if x >= curve[-1][0] / 8]
    margin = (max(late) - min(late)) * 0.06 + 1e-3
    return [min(late) - margin, max(late) + margin]


def _state(report: wording.Report) -> Figure:
    data = []
    for design in report["designs"]:
        points = [(x, y) for x, y in _points(design["state_bytes"]) if y > 0]
        words = [f"{wording.scaled(y, 'B')} at {wording.context_name(int(x))}" for x, y in points]
        data += [design_line(report, design, points, words)] if points else []
    sizes = [y for trace in data for y in trace["y"]]
    contexts = _contexts(x for trace in data for x in trace["x"])
    return {"data": data, "layout": plain_layout(contexts, _bytes("state of one sequence", sizes))}


def _speed(report: wording.Report) -> Figure:
    data = []
    for key, scale_of in (("decode", "y"), ("prefill", "y2")):
        for design in report["designs"]:
            points = _points(design[key])
            rates = [f"{wording.scaled(y)} tokens/s, {key} at {wording.context_name(int(x))}" for x, y in points]
            data += [design_line(report, design, points, rates) | {"yaxis": scale_of}] if points else []
    layout = plain_layout(_contexts(x for trace in data for x in trace["x"]), {})
    scale = {"tickformat": "~s", "rangemode": "tozero", "nticks": 5}
    layout["yaxis"] = axis("decode, tokens/s") | scale | {"domain": [0.56, 1]}
    layout["yaxis2"] = axis("prefill, tokens/s") | scale | {"domain": [0, 0.44], "anchor": "x"}
    layout["xaxis"]["anchor"] = "y2"
    return {"data": data, "layout": layout}


def _trade(report: wording.Report) -> Figure:
    """Bits per byte over state. A bar, the difference's interval, crosses the baseline's line or not."""
    context = wording.shared_context(report["designs"], "state_bytes")
    anchor = next((wording.mean_of(row) for row in report["designs"] if row["name"] == report["baseline"]), None)
    data = []
    for design in report["designs"]:
        size, mean = wording.at(design["state_bytes"], context), wording.mean_of(design)
        difference = wording.difference_of(report, design["name"])
        if difference is not None and difference["mean"] is not None and anchor is not None:
            mean = anchor + difference["mean"]
        if mean is not None and size:
            trace = design_line(report, design, [(size, mean)], [_spoken(mean, size, difference)])
            trace["mode"] = "markers"
            trace["marker"] = {**trace["marker"], "size": 13}
            half = wording.half_width(difference)
            if half is not None:
                bar = {"type": "data", "array": [half], "color": trace["line"]["color"], "thickness": 1.75}
                trace["error_y"] = bar | {"width": 5}
            data.append(trace)
    sizes = [trace["x"][0] for trace in data]
    place = "" if context is None else f" at {wording.context_name(context)}"
    layout = plain_layout(_bytes(f"state of one sequence{place}", sizes), axis("bits per byte"))
    if len(data) > 1:
        layout["yaxis"]["range"] = _room(data, anchor)
        layout["shapes"] = _baseline_line(anchor)
        layout["annotations"] = [_towards(), *_names(data)]
    return {"data": data, "layout": layout}


def _room(data: Sequence[Figure], anchor: float | None) -> list[float]:
    """The values with their bars, and below them the place of the words."""
    values = [] if anchor is None else [anchor]
    for trace in data:
        half = trace["error_y"]["array"][0] if "error_y" in trace else 0.0
        values += [trace["y"][0] - half, trace["y"][0] + half]
    span = max(max(values) - min(values), 0.01)
    return [min(values) - 0.18 * span, max(values) + 0.08 * span]


def _spoken(mean: float, size: float, difference: Mapping[str, Any] | None) -> str:
    words = f"{wording.bits(mean)} bits per byte, {wording.scaled(size, 'B')}"
    if difference is None:
        return words
    return f"{words}<br>{wording.signed(difference)}, {wording.judgement(difference)}"


def _baseline_line(anchor: float | None) -> list[dict[str, Any]]:
    if anchor is None:
        return []
    line = {"color": "series-0", "width": 1.25, "dash": "dot"}
    return [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": anchor, "y1": anchor, "line": line}]


def _towards() -> dict[str, Any]:
    place = {"xref": "paper", "yref": "paper", "x": 0.015, "y": 0.02, "xanchor": "left", "yanchor": "bottom"}
    return place | {
        "text": "↙ better: less memory, lower loss",
        "showarrow": False,
        "font": {"color": "soft"},
    }


def _names(data: Sequence[Figure]) -> list[dict[str, Any]]:
    """Each point's name beside it, on the side where there is room; none where they are too many."""
    if len(data) > LABELLED_DESIGNS:
        return []
    logs = [math.log10(trace["x"][0]) for trace in data]
    middle = (min(logs) + max(logs)) / 2
    made = []
    for trace, place in zip(data, logs, strict=True):
        left = place <= middle
        spot = {"x": place, "y": trace["y"][0], "xanchor": "left" if left else "right", "showarrow": False}
        text = {
            "text": trace["name"],
            "xshift": 12 if left else -12,
            "font": {"color": "ink", "size": 13},
            "bgcolor": "card",
        }
        made.append(spot | text | {"name": str(trace["meta"])})
    return made
