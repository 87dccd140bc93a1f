"""The four figures of every comparison: learning curves, loss against state, state and speed over the context."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from heddle.lab.compare.plan import format_value
from heddle.lab.compare.results import (
    Design,
    Difference,
    LengthChange,
    Report,
    TrialResult,
    TuningReport,
    VariedField,
    VariedValue,
)
from heddle.lab.compare.tables import (
    baseline_design,
    difference_to_baseline,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    half_width,
    judgment,
    mean_loss,
    missing_reason,
    series_of,
    shared_context,
    value_at,
)
from heddle.lab.pages.figures import (
    Figure,
    Points,
    Series,
    Value,
    axis,
    base_layout,
    byte_axis,
    context_axis,
    design_trace,
    dotted_line,
    error_bar,
    finite_points,
    line_figure,
    named_axis,
    plotly_text,
    range_bar,
)
from heddle.lab.pages.render import report_styles

MAX_LABELED_DESIGNS = 8
PLOT_WIDTHS, PLOT_HEIGHT = (260, 500), 290  # in pixels, on a phone and on a wide screen
LABEL, MARKER = (8, 18), 12  # pixels: width of a character and height of a line; from a point to its label


def overview_figures(report: Report) -> dict[str, Figure | None]:
    """The figures by name, each {"data", "layout"}, or None if nothing was measured for it."""
    figures = {
        "loss": _loss_figure(report),
        "tradeoff": _tradeoff_figure(report),
        "state": _state_figure(report),
        "speed": _speed_figure(report),
    }
    return {name: figure if figure["data"] else None for name, figure in figures.items()}


def mean_curve(design: Design) -> Points:
    """[(tokens, bits per byte)] averaged over the finished seeds, over the range that all of them cover.

    It is shifted to the design's mean where that is adjusted to the seeds of the others.
    """
    curves = [finite_points(run.curve) for run in design.runs if run.status == "done"]
    arrays = [np.array(curve) for curve in curves if curve]
    if not arrays:
        return []
    start, stop = max(curve[0, 0] for curve in arrays), min(curve[-1, 0] for curve in arrays)
    tokens = arrays[0][(arrays[0][:, 0] >= start) & (arrays[0][:, 0] <= stop), 0]
    losses = np.mean([np.interp(tokens, curve[:, 0], curve[:, 1]) for curve in arrays], axis=0)
    own = [run.bits_per_byte for run in design.runs if run.status == "done" and run.bits_per_byte is not None]
    if own and (mean := mean_loss(design)) is not None:
        losses += mean - np.mean(own)
    return list(zip(tokens.tolist(), losses.tolist(), strict=True))


def _loss_figure(report: Report) -> Figure:
    """Thin lines for the runs (dotted while they run, a cross where one diverged), thick lines for the means."""
    data: list[Figure] = []
    for design in report.designs:
        for run in design.runs:
            points = finite_points(run.curve)
            if not points:
                continue
            thin = design_trace(report, design, points, []) | {"mode": "lines", "opacity": 0.3, "hoverinfo": "skip"}
            thin["line"] = {"color": thin["line"]["color"], "width": 1}
            data.append(thin)
            if run.status != "done":
                end = design_trace(report, design, points[-1:], [f"seed {run.seed} {run.status} here"])
                end["marker"] = {"color": end["marker"]["color"], "symbol": "x", "size": 10}
                data.append(end | {"mode": "markers"})
    by_name = {design.name: design for design in report.designs}
    for running in report.running or ():
        thin = design_trace(report, by_name[running.design], finite_points(running.curve), [])
        line = {"color": thin["line"]["color"], "width": 1, "dash": "dot"}
        data.append(thin | {"mode": "lines", "hoverinfo": "skip", "line": line})
    mean_curves = {design.name: points for design in report.designs if (points := mean_curve(design))}
    for name, points in mean_curves.items():
        texts = [f"{format_bits(y)} bits per byte at {format_number(x)} tokens" for x, y in points]
        data.append(design_trace(report, by_name[name], points, texts) | {"mode": "lines"})
    layout = base_layout(axis("tokens trained on") | {"tickformat": "~s"}, axis("bits per byte"))
    if mean_curves:
        layout["yaxis"]["range"] = _late_range(list(mean_curves.values()))
    return {"data": data, "layout": layout}


def _late_range(curves: Sequence[Points]) -> list[float]:
    """The range of the losses after an eighth of the training; the steep start would flatten all differences."""
    late = [y for curve in curves for x, y in curve if x >= curve[-1][0] / 8]
    margin = (max(late) - min(late)) * 0.06 + 1e-3
    return [min(late) - margin, max(late) + margin]


def _state_figure(report: Report) -> Figure:
    data = []
    for design in report.designs:
        points = [(x, y) for x, y in finite_points(design.state_bytes) if y > 0]
        texts = [f"{format_bytes(y)} at {format_context(int(x))}" for x, y in points]
        data += [design_trace(report, design, points, texts)] if points else []
    sizes = [y for trace in data for y in trace["y"]]
    contexts = context_axis(x for trace in data for x in trace["x"])
    return {"data": data, "layout": base_layout(contexts, byte_axis("state of one sequence", sizes))}


def _speed_figure(report: Report) -> Figure:
    """Decode above, prefill below. Bars are the ranges of the measurements."""
    data = []
    for key, y_axis in (("decode", "y"), ("prefill", "y2")):
        for design in report.designs:
            points = finite_points(series_of(design, key))
            texts = [f"{format_number(y)} tokens/s, {key} at {format_context(int(x))}" for x, y in points]
            if points:
                trace = design_trace(report, design, points, texts) | {"yaxis": y_axis}
                data.append(trace | {"error_y": range_bar(series_of(design, key), trace["line"]["color"])})
    layout = base_layout(context_axis(x for trace in data for x in trace["x"]), {})
    scale = {"tickformat": "~s", "rangemode": "tozero", "nticks": 5}
    layout["yaxis"] = axis("decode, tokens/s") | scale | {"domain": [0.56, 1]}
    layout["yaxis2"] = axis("prefill, tokens/s") | scale | {"domain": [0, 0.44], "anchor": "x"}
    layout["xaxis"]["anchor"] = "y2"
    return {"data": data, "layout": layout}


def _tradeoff_figure(report: Report) -> Figure:
    """Bits per byte over state. An error bar is the difference's interval; the dotted line is the baseline."""
    context = shared_context(report.designs, "state_bytes")
    baseline_loss = mean_loss(baseline_design(report))
    data = []
    for design in report.designs:
        size, loss = value_at(design.state_bytes, context), mean_loss(design)
        difference = difference_to_baseline(report, design.name)
        if difference is not None and difference.mean is not None and baseline_loss is not None:
            loss = baseline_loss + difference.mean  # so that the bar crosses the line exactly if it is unresolved
        if loss is None or not size:
            continue
        text = with_difference(f"{format_bits(loss)} bits per byte, {format_bytes(size)}", difference)
        trace = design_trace(report, design, [(size, loss)], [text])
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
        layout["annotations"] = [
            _direction_note(),
            *_design_labels(data, layout["xaxis"]["range"], layout["yaxis"]["range"]),
        ]
    return {"data": data, "layout": layout}


def _range_with_margin(data: Sequence[Figure], baseline_loss: float | None) -> list[float]:
    """The range of the losses with their error bars, and room for the note below them."""
    values = [] if baseline_loss is None else [baseline_loss]
    for trace in data:
        half = trace["error_y"]["array"][0] if "error_y" in trace else 0.0
        values += [trace["y"][0] - half, trace["y"][0] + half]
    span = max(max(values) - min(values), 0.01)
    return [min(values) - 0.18 * span, max(values) + 0.08 * span]


def with_difference(text: str, difference: Difference | None) -> str:
    """The hover text of a point, with its difference and what this supports on a second line."""
    return text if difference is None else f"{text}\n{format_difference(difference)}, {judgment(difference)}"


def _direction_note() -> dict[str, Any]:
    corner = {"xref": "paper", "yref": "paper", "x": 0.015, "y": 0.02, "xanchor": "left", "yanchor": "bottom"}
    return corner | {"text": "↙ better: less memory, lower loss", "showarrow": False, "font": {"color": "soft"}}


def _design_labels(data: Sequence[Figure], x_range: Sequence[float], y_range: Sequence[float]) -> list[dict[str, Any]]:
    """A label next to each point, on the side with more room, moved up or down off other labels and points.

    The ranges are the axes'; for bytes, of their logarithm. No labels if there are too many designs.
    """
    if len(data) > MAX_LABELED_DESIGNS:
        return []
    logs = [math.log10(trace["x"][0]) for trace in data]
    middle = (min(logs) + max(logs)) / 2
    columns = [[width * (log - x_range[0]) / (x_range[1] - x_range[0]) for width in PLOT_WIDTHS] for log in logs]
    heights = [PLOT_HEIGHT * (trace["y"][0] - y_range[0]) / (y_range[1] - y_range[0]) for trace in data]
    # what stands on the plot: left and right at each width, and height
    taken = [([(x - MARKER, x + MARKER) for x in xs], y) for xs, y in zip(columns, heights, strict=True)]
    labels = []
    for trace, log, xs, y in zip(data, logs, columns, heights, strict=True):
        is_right, length = log <= middle, LABEL[0] * len(trace["name"])
        own = [(x + MARKER, x + MARKER + length) if is_right else (x - MARKER - length, x - MARKER) for x in xs]
        near = [at for spans, at in taken if any(a < d and c < b for (a, b), (c, d) in zip(own, spans, strict=True))]
        steps = sorted(range(-2 * len(taken), 2 * len(taken) + 1), key=abs)
        shift = next(step * LABEL[1] for step in steps if all(abs(y + step * LABEL[1] - at) >= LABEL[1] for at in near))
        taken.append((own, y + shift))
        labels.append(
            {
                "x": log,
                "y": trace["y"][0],
                "xanchor": "left" if is_right else "right",
                "xshift": MARKER if is_right else -MARKER,
                "yshift": shift,
                "showarrow": False,
                "text": trace["name"],
                "font": {"color": "ink", "size": 13},
                "bgcolor": "card",
                "name": str(trace["meta"]),
            }
        )
    return labels


# The figures of varied fields: bits per byte over the values of each field.


LOG_AXIS_RATIO = 8  # of the largest number to the smallest; from there on their axis is logarithmic


def effect_figures(report: Report) -> dict[str, Figure | None]:
    """A figure for each varied field, named effect-0, effect-1 …; None if nothing was measured."""
    return {f"effect-{index}": _effect_figure(report, field) for index, field in enumerate(report.effects.fields)}


def centered_mean(field: VariedField, value: VariedValue) -> float | None:
    """Where a value is drawn: the baseline value's mean plus the paired difference, so that its interval fits."""
    baseline_mean = next(candidate.mean for candidate in field.values if candidate.label == field.baseline)
    difference = value.difference
    if baseline_mean is None or difference is None or difference.mean is None:
        return None if value.mean is None else float(value.mean)
    return float(baseline_mean + difference.mean)


def _effect_figure(report: Report, field: VariedField) -> Figure | None:
    """Numbers are on the x axis and the loss on y; other values are rows, with the loss on x."""
    values = [value for value in field.values if centered_mean(field, value) is not None]
    if not values:
        return None
    numeric = all(value.number is not None for value in values)
    if numeric:
        values = sorted(values, key=lambda value: value.number or 0.0)
    means = _coordinates(values, [centered_mean(field, value) for value in values], numeric)
    data: list[Figure] = []
    if numeric:
        line = {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "showlegend": False}
        data.append(line | {"line": {"color": "soft", "width": 1.5}, **means})
    averaged = any(len(value.designs) > 1 for value in values)
    designs = {design.name: design for design in report.designs}
    for value in values:
        for design in (designs[name] for name in value.designs):
            loss = mean_loss(design)
            if loss is not None:
                point = design_trace(report, design, [(0.0, loss)], [f"{format_bits(loss)} bits per byte"])
                point["marker"] |= {"size": 9, "opacity": 0.5} if averaged else {"size": 13}
                data.append(point | {"mode": "markers"} | _coordinates([value], [loss], numeric))
    data.append(_mean_trace(values, numeric, averaged) | means)
    layout = base_layout(*_axes(field, values, numeric))
    baseline = next((centered_mean(field, value) for value in values if value.label == field.baseline), None)
    layout["shapes"] = [] if baseline is None else [dotted_line(baseline, color="series-0", vertical=not numeric)]
    return {"data": data, "layout": layout}


def _coordinates(values: Sequence[VariedValue], losses: Sequence[float | None], numeric: bool) -> dict[str, Any]:
    if numeric:
        return {"x": [value.number for value in values], "y": list(losses)}
    return {"x": list(losses), "y": [plotly_text(value.label) for value in values]}


def _mean_trace(values: Sequence[VariedValue], numeric: bool, averaged: bool) -> Figure:
    """The values' means as bars with their intervals; only the intervals if a value is a single design."""
    halves = [half_width(value.difference) or 0.0 for value in values]
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
        "customdata": [plotly_text(value.label) for value in values],
        "text": [with_difference(f"{format_bits(value.mean)} bits per byte", value.difference) for value in values],
        "showlegend": False,
    }


def _axes(field: VariedField, values: Sequence[VariedValue], numeric: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The x and the y axis."""
    loss_axis, value_axis = axis("bits per byte"), axis(plotly_text(field.title))
    if not numeric:
        return loss_axis, value_axis | {"type": "category", "autorange": "reversed"}
    numbers = [value.number or 0.0 for value in values]
    is_wide = numbers[0] > 0 and numbers[-1] >= LOG_AXIS_RATIO * numbers[0]
    ticks = {"tickvals": numbers, "ticktext": [plotly_text(value.label) for value in values]}
    return value_axis | ticks | {"type": "log" if is_wide else "linear"}, loss_axis


# The figure of length extrapolation: bits per byte over the sequence length.


def length_figure(report: Report) -> Figure | None:
    """A line for each design, which ends in a cross if later numbers are missing; None if nothing was measured."""
    trained_length, multiples = report.extrapolation.sequence_length, report.extrapolation.multiples
    data: list[Figure] = []
    for design in report.designs:
        rows = list(takewhile(lambda row: row.bits_per_byte is not None, design.extrapolation))
        if rows:
            data.append(_length_line(report, design, rows))
            data += [_cross(data[-1], missing) for missing in design.extrapolation[len(rows) :][:1]]
    if not data:
        return None
    ticks = [trained_length * multiple for multiple in multiples]
    labels = [f"{format_context(tick)}\n{multiple} ×" for tick, multiple in zip(ticks, multiples, strict=True)]
    half_doubling = math.log10(2) / 2
    layout = base_layout(axis("tokens, and trained lengths"), axis("bits per byte"))
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


def _length_line(report: Report, design: Design, rows: list[LengthChange]) -> Figure:
    """The mean at the trained length, then this mean plus the paired changes, so that a failed seed moves no point."""
    trained_length, first_mean = report.extrapolation.sequence_length, rows[0].bits_per_byte or 0.0
    points: Points = []
    texts, halves = [], []
    for row in rows:
        change, length = row.change, row.multiple * trained_length
        loss = row.bits_per_byte if change is None or change.mean is None else first_mean + change.mean
        points.append((length, loss or 0.0))
        missing = f", {row.not_finite} seeds not finite" if change is not None and row.not_finite else ""
        texts.append(with_difference(f"{format_bits(loss)} bits per byte, at {length} tokens", change) + missing)
        halves.append(half_width(change) or 0.0)
    trace = design_trace(report, design, points, texts)
    return trace | {"error_y": error_bar(halves, trace["line"]["color"], width=4, thickness=1.5)}


def _cross(line: Figure, missing: LengthChange) -> Figure:
    """A cross on a line's last point; its text says why the line ends."""
    marker = {"color": line["marker"]["color"], "symbol": "x", "size": 11}
    text = f"at {missing.multiple} × {missing_reason(missing)}"
    cross = {key: value for key, value in line.items() if key != "error_y"}
    return cross | {"mode": "markers", "x": line["x"][-1:], "y": line["y"][-1:], "marker": marker, "text": [text]}


# The charts of the loss by position and by token frequency.


MAX_LINES = 8  # with more lines there is only the table


def profile_figure(report: Report, name: str, labels: Sequence[str], x_title: str) -> Figure | None:
    """The difference to the baseline in each group, with its interval; with one design its bits per byte.

    name: "positions" or "frequencies". None where nothing was measured, or for too many designs.
    """
    designs = [design for design in report.designs if design.profile(name)]
    compares = len(report.designs) > 1
    shown = [design for design in designs if not compares or design.name != report.baseline]
    styles = report_styles(report)
    series = [Series(design.name, styles[design.name], _values(design, name, labels, compares)) for design in shown]
    series = [line for line in series if line.values]
    if not series or len(series) > MAX_LINES:
        return None
    y_title = f"bits per byte, difference to {report.baseline}" if compares else "bits per byte"
    dotted = [(0.0, report.baseline)] if compares else []
    return line_figure(series, named_axis(x_title, labels), axis(plotly_text(y_title)), dotted)


def _values(design: Design, name: str, labels: Sequence[str], compares: bool) -> list[Value]:
    values = []
    for index, (row, label) in enumerate(zip(design.profile(name), labels, strict=True)):
        loss, difference = row.bits_per_byte, row.difference
        title = f"{design.name}, {label}: {format_bits(loss)} bits per byte"
        if compares and difference.mean is not None:
            half = half_width(difference) or 0.0
            title += f", {format_difference(difference)}, {judgment(difference)}"
            mean = difference.mean
            values.append(Value(index + 0.5, mean, mean - half, mean + half, title))
        elif not compares and loss is not None:
            values.append(Value(index + 0.5, loss, title=title))
    return values


# The figures of tuning: bits per byte over the values of each tuned field, a line for each design.


LOSS_SPAN = 4.0  # the axis ends at this many times the spread of the better half; diverging values would hide the rest


def tuning_figures(report: Report) -> dict[str, Figure | None]:
    """A figure for each tuned field, named tuning-0, tuning-1 …; None where no trial finished."""
    tuning = report.tuning
    if tuning is None:
        return {}
    return {f"tuning-{index}": _tuning_figure(report, tuning, index) for index in range(len(tuning.fields))}


def profile(trials: Sequence[TrialResult], axis_index: int) -> dict[Any, float]:
    """The lowest bits per byte for each value of a field, over the values of the other fields."""
    lowest: dict[Any, float] = {}
    for trial in trials:
        loss, value = trial.bits_per_byte, trial.values[axis_index]
        if loss is not None and loss < lowest.get(value, math.inf):
            lowest[value] = loss
    return lowest


def _tuning_figure(report: Report, tuning: TuningReport, index: int) -> Figure | None:
    """A line for each design, and a ring around its choice."""
    field = tuning.fields[index]
    is_log = field.is_number and min(field.values) > 0
    tuned = {design.name: design for design in tuning.designs}
    data: list[Figure] = []
    for design in report.designs:
        best = tuned[design.name]
        losses = profile(best.trials, index)
        points = [(value, losses[value]) for value in field.values if value in losses]
        if points:
            texts = [f"{format_bits(loss)} bits per byte at {format_value(value)}" for value, loss in points]
            data.append(design_trace(report, design, points, texts))
        if best.bits_per_byte is not None:
            ring = design_trace(report, design, [(best.best[index], best.bits_per_byte)], [best.text])
            ring["marker"] |= {"symbol": "circle-open", "size": 18, "line": {"width": 2}}
            data.append(ring | {"mode": "markers", "hoverinfo": "skip"})
    if not data:
        return None
    for trace in data:
        trace["x"] = trace["x"] if field.is_number else [plotly_text(value) for value in trace["x"]]
    layout = base_layout(axis(plotly_text(field.name)), axis("bits per byte"))
    labels = [plotly_text(format_value(value)) for value in field.values]
    layout["xaxis"] |= {"type": "log" if is_log else "linear", "tickvals": field.values, "ticktext": labels}
    if not field.is_number:
        layout["xaxis"] = axis(plotly_text(field.name)) | {"type": "category", "showline": True}
    else:
        layout["shapes"] = [dotted_line(tuning.shared_values.values[index], color="soft", vertical=True)]
    layout["yaxis"]["range"] = _loss_range([y for trace in data for y in trace["y"]])
    return {"data": data, "layout": layout}


def _loss_range(losses: Sequence[float]) -> list[float]:
    """From below the lowest loss to the range of the better half; nearly diverged values lie outside the plot."""
    ordered = sorted(losses)
    low, middle = ordered[0], ordered[len(ordered) // 2]
    high = min(ordered[-1], low + max(LOSS_SPAN * (middle - low), 0.02))
    margin = 0.06 * (high - low) + 1e-3
    return [low - margin, high + margin]
