"""The four figures of every comparison: learning curves, loss against state, state and speed over the context."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heddle.analysis.comparison.formatting import (
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    half_width,
    judgment,
)
from heddle.analysis.comparison.lookup import (
    Design,
    Report,
    baseline_design,
    difference_to_baseline,
    mean_loss,
    shared_context,
    value_at,
)
from heddle.analysis.pages.figures.base import (
    Figure,
    Points,
    axis,
    base_layout,
    byte_axis,
    context_axis,
    design_trace,
    dotted_line,
    error_bar,
    finite_points,
    range_bar,
)

MAX_LABELED_DESIGNS = 8


def overview_figures(report: Report) -> dict[str, Figure | None]:
    """The figures by name, each {"data", "layout"}, or None where nothing was measured for it."""
    figures = {
        "loss": _loss_figure(report),
        "tradeoff": _tradeoff_figure(report),
        "state": _state_figure(report),
        "speed": _speed_figure(report),
    }
    return {name: figure if figure["data"] else None for name, figure in figures.items()}


def mean_curve(design: Design) -> Points:
    """[(tokens, bits per byte)] averaged over the finished seeds, over the range that all of them cover."""
    curves = [finite_points(run["curve"]) for run in design["runs"] if run["status"] == "done"]
    arrays = [np.array(curve) for curve in curves if curve]
    if not arrays:
        return []
    start, stop = max(curve[0, 0] for curve in arrays), min(curve[-1, 0] for curve in arrays)
    tokens = arrays[0][(arrays[0][:, 0] >= start) & (arrays[0][:, 0] <= stop), 0]
    losses = np.mean([np.interp(tokens, curve[:, 0], curve[:, 1]) for curve in arrays], axis=0)
    return list(zip(tokens.tolist(), losses.tolist(), strict=True))


def _loss_figure(report: Report) -> Figure:
    """Thin lines for the runs, a cross where one diverged, thick lines for the means."""
    data: list[Figure] = []
    for design in report["designs"]:
        for run in design["runs"]:
            points = finite_points(run["curve"])
            if not points:
                continue
            thin = design_trace(report, design, points, []) | {"mode": "lines", "opacity": 0.3, "hoverinfo": "skip"}
            thin["line"] = {"color": thin["line"]["color"], "width": 1}
            data.append(thin)
            if run["status"] != "done":
                end = design_trace(report, design, points[-1:], [f"seed {run['seed']} {run['status']} here"])
                end["marker"] = {"color": end["marker"]["color"], "symbol": "x", "size": 10}
                data.append(end | {"mode": "markers"})
    mean_curves = []
    for design in report["designs"]:
        points = mean_curve(design)
        if points:
            mean_curves.append(points)
            texts = [f"{format_bits(y)} bits per byte at {format_number(x)} tokens" for x, y in points]
            data.append(design_trace(report, design, points, texts) | {"mode": "lines"})
    layout = base_layout(axis("tokens trained on") | {"tickformat": "~s"}, axis("bits per byte"))
    if mean_curves:
        layout["yaxis"]["range"] = _late_range(mean_curves)
    return {"data": data, "layout": layout}


def _late_range(curves: Sequence[Points]) -> list[float]:
    """The range of the losses after an eighth of the training; the steep start would flatten all differences."""
    late = [y for curve in curves for x, y in curve if x >= curve[-1][0] / 8]
    margin = (max(late) - min(late)) * 0.06 + 1e-3
    return [min(late) - margin, max(late) + margin]


def _state_figure(report: Report) -> Figure:
    data = []
    for design in report["designs"]:
        points = [(x, y) for x, y in finite_points(design["state_bytes"]) if y > 0]
        texts = [f"{format_bytes(y)} at {format_context(int(x))}" for x, y in points]
        data += [design_trace(report, design, points, texts)] if points else []
    sizes = [y for trace in data for y in trace["y"]]
    contexts = context_axis(x for trace in data for x in trace["x"])
    return {"data": data, "layout": base_layout(contexts, byte_axis("state of one sequence", sizes))}


def _speed_figure(report: Report) -> Figure:
    """Decode above, prefill below. Bars are the ranges of the measurements."""
    data = []
    for key, y_axis in (("decode", "y"), ("prefill", "y2")):
        for design in report["designs"]:
            points = finite_points(design[key])
            texts = [f"{format_number(y)} tokens/s, {key} at {format_context(int(x))}" for x, y in points]
            if points:
                trace = design_trace(report, design, points, texts) | {"yaxis": y_axis}
                data.append(trace | {"error_y": range_bar(design[key], trace["line"]["color"])})
    layout = base_layout(context_axis(x for trace in data for x in trace["x"]), {})
    scale = {"tickformat": "~s", "rangemode": "tozero", "nticks": 5}
    layout["yaxis"] = axis("decode, tokens/s") | scale | {"domain": [0.56, 1]}
    layout["yaxis2"] = axis("prefill, tokens/s") | scale | {"domain": [0, 0.44], "anchor": "x"}
    layout["xaxis"]["anchor"] = "y2"
    return {"data": data, "layout": layout}


def _tradeoff_figure(report: Report) -> Figure:
    """Bits per byte over state. An error bar is the difference's interval; the dotted line is the baseline."""
    context = shared_context(report["designs"], "state_bytes")
    baseline_loss = mean_loss(baseline_design(report))
    data = []
    for design in report["designs"]:
        size, loss = value_at(design["state_bytes"], context), mean_loss(design)
        difference = difference_to_baseline(report, design["name"])
        if difference is not None and difference["mean"] is not None and baseline_loss is not None:
            loss = baseline_loss + difference["mean"]  # so that the bar crosses the line exactly where it is unresolved
        if loss is None or not size:
            continue
        trace = design_trace(report, design, [(size, loss)], [_hover_text(loss, size, difference)])
        trace["mode"] = "markers"
        trace["marker"] = {**trace["marker"], "size": 13}
        half = half_width(difference)
        if half is not None:
            trace["error_y"] = error_bar([half], trace["line"]["color"])
        data.append(trace)
    sizes = [trace["x"][0] for trace in data]
    position = "" if context is None else f" at {format_context(context)}"
    layout = base_layout(byte_axis(f"state of one sequence{position}", sizes), axis("bits per byte"))
    if len(data) > 1:
        layout["yaxis"]["range"] = _range_with_margin(data, baseline_loss)
        layout["shapes"] = [] if baseline_loss is None else [dotted_line(baseline_loss, color="series-0")]
        layout["annotations"] = [_direction_note(), *_design_labels(data)]
    return {"data": data, "layout": layout}


def _range_with_margin(data: Sequence[Figure], baseline_loss: float | None) -> list[float]:
    """The range of the losses with their error bars, and room for the note below them."""
    values = [] if baseline_loss is None else [baseline_loss]
    for trace in data:
        half = trace["error_y"]["array"][0] if "error_y" in trace else 0.0
        values += [trace["y"][0] - half, trace["y"][0] + half]
    span = max(max(values) - min(values), 0.01)
    return [min(values) - 0.18 * span, max(values) + 0.08 * span]


def _hover_text(loss: float, size: float, difference: Mapping[str, Any] | None) -> str:
    text = f"{format_bits(loss)} bits per byte, {format_bytes(size)}"
    if difference is None:
        return text
    return f"{text}\n{format_difference(difference)}, {judgment(difference)}"


def _direction_note() -> dict[str, Any]:
    corner = {"xref": "paper", "yref": "paper", "x": 0.015, "y": 0.02, "xanchor": "left", "yanchor": "bottom"}
    return corner | {"text": "↙ better: less memory, lower loss", "showarrow": False, "font": {"color": "soft"}}


def _design_labels(data: Sequence[Figure]) -> list[dict[str, Any]]:
    """A label next to each point, on the side with more room; none where there are too many designs."""
    if len(data) > MAX_LABELED_DESIGNS:
        return []
    logs = [math.log10(trace["x"][0]) for trace in data]
    middle = (min(logs) + max(logs)) / 2
    labels = []
    for trace, log in zip(data, logs, strict=True):
        on_the_right = log <= middle
        labels.append(
            {
                "x": log,
                "y": trace["y"][0],
                "xanchor": "left" if on_the_right else "right",
                "xshift": 12 if on_the_right else -12,
                "showarrow": False,
                "text": trace["name"],
                "font": {"color": "ink", "size": 13},
                "bgcolor": "card",
                "name": str(trace["meta"]),
            }
        )
    return labels
