"""The charts of a conversion's page: added loss over the state, and loss, errors and speed of each model."""

import math
from collections.abc import Callable, Sequence

from heddle.analysis.comparison.formatting import (
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_percent,
)
from heddle.analysis.conversion.costs import speeds_of, state_context, state_per_token
from heddle.analysis.conversion.differences import added_loss, added_share, describe_change, difference
from heddle.analysis.conversion.results import CONVERTED, ORIGINAL, ConversionResults, ModelResult
from heddle.analysis.conversion.verdict import TOLERANCE, format_signed_percent
from heddle.analysis.pages.conversion_summary import model_styles
from heddle.analysis.pages.design_styles import DesignStyle
from heddle.analysis.pages.figures.base import byte_axis
from heddle.analysis.pages.figures.svg import (
    Chart,
    Scale,
    Series,
    Value,
    line_chart,
    linear_ticks,
    scaled_lines,
    symlog_ticks,
    value_range,
)
from heddle.training.evaluation.scores import finite_ratio

MAX_LINES = 7  # more lines are told by the table alone
LINEAR_LIMIT = 8  # an added loss of more than so many times the tolerance is drawn on a stretched scale


def sweep_chart(results: ConversionResults) -> Chart | None:
    """Added loss over state bytes a token, a line for each method and stage; None below two sizes of the state."""
    conversions = [model for model in results.converted_models if model.stage == CONVERTED]
    if len({state_per_token(results, model) for model in conversions} - {None}) < 2:
        return None
    tolerance = TOLERANCE * (finite_ratio(results.original.windows) or 1.0)
    styles = model_styles(results)
    groups: dict[tuple[str, str], list[ModelResult]] = {}
    for model in results.converted_models:
        groups.setdefault((model.method, model.stage), []).append(model)
    series = [_sweep_line(results, results.original.name, [results.original], styles[results.original.name])]
    for (method, stage), models in groups.items():
        style = styles[models[0].name]
        series.append(_sweep_line(results, f"{method}, {stage}" if method else stage, models, style))
    return _sweep_axes(results, [each for each in series if each.values], tolerance)


def _sweep_axes(results: ConversionResults, series: Sequence[Series], tolerance: float) -> Chart:
    low, high = value_range(series, (0.0, 1.5 * tolerance))
    y_scale = Scale(low, high)
    if is_stretched := high > LINEAR_LIMIT * tolerance:
        lowest = min(value.y if value.low is None else value.low for each in series for value in each.values)
        y_scale = Scale(1.5 * min(lowest, -0.3 * tolerance), high, lambda value: math.asinh(value / tolerance))
    axis = byte_axis("", [value.x for each in series for value in each.values])
    x_scale = Scale(10 ** axis["range"][0], 10 ** axis["range"][1], math.log10)
    context = state_context(results)
    at_context = "" if context is None else f" (of {format_context(context)} tokens)"
    return Chart(
        label="Added bits per byte over state bytes a token",
        x_title=f"state bytes a token{at_context}",
        y_title="bits per byte added" + (", stretched around 0" if is_stretched else ""),
        x_ticks=[(x_scale.percent(v), text) for v, text in zip(axis["tickvals"], axis["ticktext"], strict=True)],
        y_ticks=symlog_ticks(y_scale) if is_stretched else linear_ticks(y_scale, _signed),
        lines=scaled_lines(series, x_scale, y_scale),
        dotted=[
            (100 - y_scale.percent(0.0), "the original’s loss"),
            (100 - y_scale.percent(tolerance), f"+{100 * TOLERANCE:g} %"),
        ],
    )


def _signed(value: float) -> str:
    return f"{value:g}".replace("-", "−")


def _sweep_line(results: ConversionResults, name: str, models: Sequence[ModelResult], style: DesignStyle) -> Series:
    values = []
    for model in models:
        size, added = state_per_token(results, model), added_loss(results, model)
        if size and added["mean"] is not None:
            percent = format_signed_percent(added_share(results, model))
            change = "the original" if model.stage == ORIGINAL else f"{format_difference(added)} ({percent})"
            title = f"{model.name}: {change}, {format_bytes(size)} a token"
            values.append(Value(size, added["mean"], added["low"], added["high"], title))
    values.sort(key=lambda value: value.x)
    return Series(name, style, values, has_line=len(values) > 1, filled=models[0].stage != CONVERTED)


def position_chart(results: ConversionResults) -> Chart | None:
    """Bits per byte over the position; a bar is the interval of the difference to the original."""
    ranges = results.text.positions
    if len(results.models) > MAX_LINES:
        return None

    def values(model: ModelResult) -> list[Value]:
        rows = []
        for index, (scores, reference) in enumerate(zip(model.positions, results.original.positions, strict=True)):
            loss, change = finite_ratio(scores), difference(scores, reference)
            if loss is not None:
                half = 0.0 if change["low"] is None else (change["high"] - change["low"]) / 2
                title = f"{model.name}, positions {ranges[index][0]} to {ranges[index][1] - 1}: {format_bits(loss)}"
                if model.stage != ORIGINAL:
                    title += f" ({format_difference(change)}, {describe_change(change)})"
                rows.append(Value(index + 0.5, loss, loss - half, loss + half, title))
        return rows

    labels = [f"{first}–{end - 1}" for first, end in ranges]
    ticks = [(100 * (index + 0.5) / len(ranges), label) for index, label in enumerate(labels)]
    return _model_chart(
        results, values, Scale(0, len(ranges)), ticks, ("position of the token in its document", "bits per byte")
    )


def layer_chart(results: ConversionResults) -> Chart | None:
    """The relative error of each mixer's output, and fainter that of the stream after each layer."""
    compared = [model for model in results.converted_models if model.layer_errors]
    if not compared or len(compared) > MAX_LINES:
        return None
    styles, series = model_styles(results), []
    for model in compared:
        for title in ("mixer", "stream"):
            errors = [(error.layer, getattr(error, title)) for error in model.layer_errors]
            values = [
                Value(layer, error, title=f"{model.name}, {title} of layer {layer}: {format_percent(error)}")
                for layer, error in errors
                if error is not None
            ]
            name = model.name if title == "mixer" else ""
            series.append(Series(name, styles[model.name], values, filled=title == "mixer"))
    depth = max(len(model.layer_errors) for model in compared)
    x_scale, y_scale = Scale(-0.5, depth - 0.5), Scale(0.0, value_range(series, (0.0,))[1])
    step = -(-depth // 8)
    return Chart(
        label="Relative error by layer",
        x_title="layer",
        y_title="relative error",
        x_ticks=[(x_scale.percent(layer), str(layer)) for layer in range(0, depth, step)],
        y_ticks=linear_ticks(y_scale, lambda value: format_percent(value) if value else "0"),
        lines=scaled_lines(series, x_scale, y_scale),
        dotted=[],
    )


def decode_chart(results: ConversionResults) -> Chart | None:
    """Decoded tokens per second over the context; a bar is the range of the measurements. One line a design."""
    designs = {model.design_key: model for model in reversed(results.models)}
    shown = [model for model in results.models if designs[model.design_key] is model]
    contexts = sorted({row[0] for model in shown for row in speeds_of(results, model, "decode")})
    if len(contexts) < 2 or len(shown) > MAX_LINES:
        return None

    def values(model: ModelResult) -> list[Value]:
        return [
            Value(context, speed, low, high, f"{model.name} at {format_context(context)}: {format_number(speed)} tok/s")
            for context, speed, low, high in speeds_of(results, model, "decode")
        ]

    x_scale = Scale(contexts[0] / 1.3, contexts[-1] * 1.3, math.log)
    ticks = [(x_scale.percent(context), format_context(context)) for context in contexts]
    return _model_chart(results, values, x_scale, ticks, ("context, tokens", "decoded tokens per second"), shown, 0.0)


def _model_chart(
    results: ConversionResults,
    values: Callable[[ModelResult], list[Value]],
    x_scale: Scale,
    x_ticks: list[tuple[float, str]],
    titles: tuple[str, str],
    models: Sequence[ModelResult] | None = None,
    lowest: float | None = None,
) -> Chart:
    """A chart with a line for each model. lowest: where the axis begins; None: a little below the values."""
    styles = model_styles(results)
    series = [
        Series(model.name, styles[model.name], values(model), filled=model.stage != CONVERTED)
        for model in models or results.models
    ]
    low, high = value_range(series)
    y_scale = Scale(low if lowest is None else lowest, high)
    y_text = None if lowest is None else format_number
    return line_chart(series, x_scale, x_ticks, titles, y_scale=y_scale, y_text=y_text)
