"""Write a conversion's page, convert.html: one file that needs no network."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heddle.data.samples import RowProtocol
from heddle.lab.compare.tables import (
    NO_VALUE,
    TextTable,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
    format_share,
    half_width,
    value_at,
)
from heddle.lab.conversion.results import (
    CONVERTED,
    HEALED,
    ORIGINAL,
    TOLERANCE,
    ConversionResults,
    ModelResult,
    added_loss,
    added_share,
    chance_accuracy,
    conversion_verdict,
    copying_change,
    copying_gain,
    copying_share,
    decode_context,
    describe_change,
    difference,
    format_signed_percent,
    healed_share,
    hidden_needles,
    needle_accuracy,
    needle_gain,
    per_token,
    speeds_of,
    state_context,
    state_per_token,
    state_share,
)
from heddle.lab.pages.figures import (
    Figure,
    Series,
    Value,
    axis,
    byte_axis,
    context_axis,
    line_figure,
    log_range,
    named_axis,
    value_range,
)
from heddle.lab.pages.render import BASELINE_STYLE, COLOR_COUNT, MARKERS, DesignStyle, numbered_style, render_figures
from heddle.lab.pages.report import WRITE_REMEDY, Bar, DifferenceCell, difference_cell, interval_scale
from heddle.lab.pages.search import frontier_figure, search_context
from heddle.lab.pages.sections import (
    HeatCell,
    HeatMap,
    accuracy_heat,
    difference_rows,
    frequency_columns,
    heat_of,
    with_range,
)
from heddle.storage.file_io import write_file
from heddle.training.evaluation.scores import FiniteScores, finite_ratio

# The summary of a conversion's page: a row for each model, and its style in all figures.


@dataclass(frozen=True)
class ModelRow:
    """A row of the summary. difference: None for the original. size, stage: notes below the name."""

    name: str
    style: DesignStyle
    size: str
    stage: str
    loss: str
    difference: DifferenceCell | None
    percent: str
    costs: list[Bar]


def model_styles(results: ConversionResults) -> dict[str, DesignStyle]:
    """The style of each model by its name: a color and a marker for each method, dashed before healing."""
    methods = list(dict.fromkeys(model.method for model in results.converted_models))
    styles = {results.original.name: BASELINE_STYLE}
    for model in results.converted_models:
        dash = "solid" if model.stage == HEALED else "dash"
        styles[model.name] = numbered_style(methods.index(model.method), dash)
    return styles


def line_styles(results: ConversionResults, models: Iterable[ModelResult]) -> dict[str, DesignStyle]:
    """As `model_styles`, for lines of one figure: of those that would look the same, each has a color of its own."""
    styles, lines = model_styles(results), dict[str, DesignStyle]()
    for model in models:
        style = styles[model.name]
        others = (numbered_style(index, style.dash) for index in range(COLOR_COUNT * len(MARKERS)))
        lines[model.name] = next(look for look in (style, *others) if look not in lines.values())
    return lines


def summary_rows(results: ConversionResults) -> list[ModelRow]:
    """The original, then the others: larger states first, and for equal states lower losses first."""

    def order(model: ModelResult) -> tuple[float, float]:
        loss = finite_ratio(model.windows)
        return -(state_per_token(results, model) or 0.0), float("inf") if loss is None else loss

    converted = results.converted_models
    if len({(model.method, model.design_key) for model in converted}) > 1:
        converted = sorted(converted, key=order)
    scale = interval_scale([added_loss(results, model) for model in converted])
    return [_summary_row(results, model, scale) for model in (results.original, *converted)]


def _summary_row(results: ConversionResults, model: ModelResult, scale: float) -> ModelRow:
    is_original, change = model.stage == ORIGINAL, added_loss(results, model)
    share = healed_share(results, model)
    healed = f", {format_percent(share)} of the loss removed" if share is not None and share > 0 else ""
    return ModelRow(
        name=model.name,
        style=model_styles(results)[model.name],
        size=f"{format_number(model.parameters)} parameters",
        stage=f"{model.stage}{healed}",
        loss=format_bits(finite_ratio(model.windows)),
        difference=None if is_original else difference_cell(change, describe_change(change), scale, draws_zero=True),
        percent="" if is_original else format_signed_percent(added_share(results, model)),
        costs=[*_recall_bars(results, model), *_cost_bars(results, model)],
    )


def _recall_bars(results: ConversionResults, model: ModelResult) -> list[Bar]:
    if not model.needles:
        return []
    gain, accuracy = copying_gain(model).mean, needle_accuracy(model)
    largest = max((-(copying_gain(each).mean or 0.0) for each in results.models), default=0.0)
    percent = None if gain is None or largest <= 0 else max(0.0, -100 * gain / largest)
    copied = NO_VALUE if gain is None else f"{format_bits(-gain)}".replace("-", "−")
    return [
        Bar("Copying gain", copied, percent, "more is better"),
        Bar("Needles", format_percent(accuracy), None if accuracy is None else 100 * accuracy, "more is better"),
    ]


def _cost_bars(results: ConversionResults, model: ModelResult) -> list[Bar]:
    states = [state_per_token(results, each) or 0.0 for each in results.models]
    state, context = state_per_token(results, model), decode_context(results)
    bars = [Bar(f"State {per_token(results)}", format_bytes(state), _percent(state, states), "less is better")]
    if context is not None:
        speeds = [value_at(speeds_of(results, each, "decode"), context) or 0.0 for each in results.models]
        speed = value_at(speeds_of(results, model, "decode"), context)
        title = f"Decode at {format_context(context)}"
        bars.append(Bar(title, format_rate(speed), _percent(speed, speeds), "more is better"))
    return bars


def _percent(value: float | None, values: Sequence[float]) -> float | None:
    return None if value is None or not max(values) else 100 * value / max(values)


# The tables of a conversion's page: formatted values for the templates, without HTML.


def sweep_table(results: ConversionResults) -> TextTable:
    """A row for each conversion: its state, and the loss that it adds before and after healing."""
    healed = {_conversion_of(model): model for model in results.models if model.stage == HEALED}
    rows = []
    for model in (model for model in results.models if model.stage == CONVERTED):
        share, size = state_share(results, model), state_per_token(results, model)
        part = NO_VALUE if share is None else format_share(share, 1.0)
        rows.append([model.name, format_bytes(size), part, *_added_cells(results, model)])
        if healed:
            after = healed.get(_conversion_of(model))
            removed = None if after is None else healed_share(results, after)
            rows[-1] += [*(_added_cells(results, after) if after else [NO_VALUE] * 2), format_percent(removed)]
    header = ["conversion", f"state {per_token(results)}", "of the original", "adds", ""]
    header += ["healed, adds", "", "removed by healing"] if healed else []
    return TextTable(header, rows, "Added bits per byte by state")


def _conversion_of(model: ModelResult) -> tuple[str, str]:
    return model.method, model.design_key


def _added_cells(results: ConversionResults, model: ModelResult) -> list[str]:
    added = added_loss(results, model)
    percent = format_signed_percent(added_share(results, model))
    return [format_difference(added), f"{percent}, {describe_change(added)}"]


def position_table(results: ConversionResults) -> HeatMap:
    """Loss by position."""
    columns = [f"{first} to {end - 1}" for first, end in results.text.positions]
    return _profile_table(results, "bits per byte at position", columns, lambda model: model.positions)


def frequency_table(results: ConversionResults) -> HeatMap | None:
    """Loss by frequency of the token; None if it was not measured."""
    count = len(results.original.frequencies)
    title, columns = "bits per byte, tokens by frequency", frequency_columns(count)
    return _profile_table(results, title, columns, lambda model: model.frequencies) if count else None


def _profile_table(
    results: ConversionResults, title: str, columns: list[str], scores_of: Callable[[ModelResult], list[FiniteScores]]
) -> HeatMap:
    """The original's loss in groups, and each other model's added loss; the stronger the color, the more."""
    original = scores_of(results.original)
    changes = {
        model.name: [difference(*pair) for pair in zip(scores_of(model), original, strict=True)]
        for model in results.converted_models
    }
    losses = [HeatCell(format_bits(finite_ratio(scores))) for scores in original]
    return HeatMap([title], columns, [(results.original.name, losses), *difference_rows(changes, describe_change)])


def layer_tables(results: ConversionResults) -> list[HeatMap]:
    """The relative errors of the mixers' outputs and of the stream by layer, for models whose layers correspond."""
    compared = [model for model in results.converted_models if model.layer_errors]
    tables = []
    for title in ("mixer", "stream"):
        errors = {model.name: [getattr(error, title) for error in model.layer_errors] for model in compared}
        largest = max((error for row in errors.values() for error in row if error is not None), default=0.0)
        rows = [
            (name, [HeatCell(format_percent(error), heat_of(error, largest)) for error in row])
            for name, row in errors.items()
        ]
        depth = max((len(row) for row in errors.values()), default=0)
        tables.append(HeatMap([title], [str(index) for index in range(depth)], rows))
    return tables if compared else []


def copying_table(results: ConversionResults) -> TextTable:
    """The loss on both occurrences of the repeated spans, and the share of the original's gain that is left."""
    rows = []
    for model in results.models:
        is_original = model.stage == ORIGINAL
        change = copying_change(results, model)
        rows.append(
            [
                model.name,
                format_bits(finite_ratio(model.first_spans)),
                format_bits(finite_ratio(model.repeated_spans)),
                format_difference(copying_gain(model)),
                "" if is_original else format_difference(change),
                "original" if is_original else describe_change(change),
                format_percent(copying_share(results, model)),
            ]
        )
    header = ["bits per byte of a span", "first", "again", "again − first", "change in gain", "", "copying left"]
    return TextTable(header, rows, "Loss on repeated spans")


def needle_table(results: ConversionResults) -> HeatMap:
    """Accuracy by depth; the stronger the color, the further above guessing without the needle."""
    rows = []
    depths = [needle.depth for needle in hidden_needles(results.original)]
    for model in results.models:
        chance = chance_accuracy(model) or 0.0
        cells = []
        for needle in hidden_needles(model):
            accuracy, note = finite_ratio(needle.correct), f"{format_bits(finite_ratio(needle.losses))} bits"
            cells.append(HeatCell(format_percent(accuracy), accuracy_heat(accuracy, chance), (note,)))
        gain = needle_gain(model)
        half = half_width(gain)
        text = NO_VALUE if gain.mean is None else format_signed_percent(gain.mean)
        note = "" if half is None else f"± {100 * half:.1f} %"
        cells += [HeatCell(format_percent(chance_accuracy(model))), HeatCell(text, notes=(note,))]
        rows.append((model.name, cells))
    columns = [*(f"depth {depth:.0%}" for depth in depths if depth is not None), "without it", "gain"]
    return HeatMap(["correct tokens"], columns, rows)


def cost_tables(results: ConversionResults) -> list[TextTable]:
    """Sizes, states over the context, and the class that each model exports as."""
    sizes = TextTable(
        ["model", "parameters", f"FLOPs per token at {results.text.sequence_length:,}", f"state {per_token(results)}"],
        [
            [
                model.name,
                format_number(model.parameters),
                format_number(model.flops_per_token),
                format_bytes(state_per_token(results, model)),
            ]
            for model in results.models
        ],
        "Sizes",
    )
    contexts = sorted({context for model in results.models for context, _ in model.state_bytes})
    states = TextTable(
        ["state at context", *map(format_context, contexts)],
        [[m.name, *(format_bytes(value_at(m.state_bytes, context)) for context in contexts)] for m in results.models],
        "State by context",
    )
    classes = TextTable(["model", "exports as"], [[m.name, m.architecture] for m in results.models], "Classes")
    return [sizes, states, classes]


def speed_tables(results: ConversionResults) -> list[TextTable]:
    """Decode and prefill speeds over the context, with their ranges; empty if nothing was measured."""
    tables = []
    for phase in ("decode", "prefill"):
        rows = {model.name: speeds_of(results, model, phase) for model in results.models}
        measured = sorted({row[0] for series in rows.values() for row in series})
        cells = [
            [name, *(with_range(series, context, format_rate) for context in measured)] for name, series in rows.items()
        ]
        if measured:
            tables.append(TextTable([f"{phase} at context", *map(format_context, measured)], cells, f"{phase} speed"))
    return tables


# The charts of a conversion's page: added loss over the state, and loss, errors and speed of each model.


MAX_LINES = 7  # with more lines there is only the table
TICK_DISTANCE, TOP_ROOM = 0.09, 0.04  # of the axis
LINEAR_LIMIT = 8  # added losses above this many times the tolerance are drawn on a stretched scale


def sweep_figure(results: ConversionResults) -> Figure | None:
    """Added loss over state bytes per token, a line for each method and stage; None below two state sizes."""
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


def _sweep_axes(results: ConversionResults, series: Sequence[Series], tolerance: float) -> Figure:
    low, high = value_range(series, (0.0, 1.5 * tolerance))
    y_axis = axis("bits per byte added") | {"range": [low, high], "tickformat": "+~g"}
    dotted = [(0.0, "the original’s loss"), (tolerance, f"+{100 * TOLERANCE:g} %")]
    if high > LINEAR_LIMIT * tolerance:
        lowest = min(value.y if value.low is None else value.low for each in series for value in each.values)
        series, dotted = stretched(series, tolerance), [(stretch(y, tolerance), text) for y, text in dotted]
        y_axis = stretched_axis(1.5 * min(lowest, -0.3 * tolerance), high, tolerance)
    context = state_context(results)
    at_context = "" if context is None else f" (of {format_context(context)} tokens)"
    sizes = [value.x for each in series for value in each.values]
    return line_figure(series, byte_axis(f"state bytes per token{at_context}", sizes), y_axis, dotted)


def stretch(value: float, limit: float) -> float:
    """Linear up to about a limit, and logarithmic beyond it."""
    return math.asinh(value / limit)


def stretched(series: Sequence[Series], limit: float) -> list[Series]:
    """The lines on a `stretched_axis` of the same limit."""

    def moved(value: float | None) -> float | None:
        return None if value is None else stretch(value, limit)

    return [
        replace(
            each,
            values=[
                replace(value, y=stretch(value.y, limit), low=moved(value.low), high=moved(value.high))
                for value in each.values
            ],
        )
        for each in series
    ]


def stretched_axis(low: float, high: float, limit: float) -> dict[str, Any]:
    """An axis that is stretched around 0, with ticks at 0 and at 1, 2, 5 times powers of ten, none too close."""
    start, end = stretch(low, limit), stretch(high, limit)
    sizes = [factor * 10.0**power for power in range(-6, 4) for factor in (1, 2, 5)]
    ticks: dict[float, str] = {}
    for value in [0.0, *sorted([*sizes, *(-size for size in sizes)], key=lambda size: -abs(size))]:
        place = stretch(value, limit)
        if low <= value <= high and all(abs(place - other) >= TICK_DISTANCE * (end - start) for other in ticks):
            ticks[place] = f"{value:g}".replace("-", "−")
    numbers = {
        "range": [start, end + TOP_ROOM * (end - start)],
        "tickvals": list(ticks),
        "ticktext": list(ticks.values()),
    }
    return axis("bits per byte added, stretched around 0") | numbers


def _sweep_line(results: ConversionResults, name: str, models: Sequence[ModelResult], style: DesignStyle) -> Series:
    values = []
    for model in models:
        size, added = state_per_token(results, model), added_loss(results, model)
        if size and added.mean is not None:
            percent = format_signed_percent(added_share(results, model))
            change = "the original" if model.stage == ORIGINAL else f"{format_difference(added)} ({percent})"
            title = f"{model.name}: {change}, {format_bytes(size)} per token"
            values.append(Value(size, added.mean, added.low, added.high, title))
    values.sort(key=lambda value: value.x)
    return Series(name, style, values, has_line=len(values) > 1, filled=models[0].stage != CONVERTED)


def position_figure(results: ConversionResults) -> Figure | None:
    """Bits per byte over the position; a bar is the interval of the difference to the original."""
    ranges = results.text.positions
    if len(results.models) > MAX_LINES:
        return None

    def values(model: ModelResult) -> list[Value]:
        rows = []
        for index, (scores, reference) in enumerate(zip(model.positions, results.original.positions, strict=True)):
            loss, change = finite_ratio(scores), difference(scores, reference)
            if loss is not None:
                half = half_width(change) or 0.0
                title = f"{model.name}, positions {ranges[index][0]} to {ranges[index][1] - 1}: {format_bits(loss)}"
                if model.stage != ORIGINAL:
                    title += f" ({format_difference(change)}, {describe_change(change)})"
                rows.append(Value(index + 0.5, loss, loss - half, loss + half, title))
        return rows

    labels = [f"{first}–{end - 1}" for first, end in ranges]
    return _model_figure(results, values, named_axis("position of the token in its document", labels), "bits per byte")


def layer_figure(results: ConversionResults) -> Figure | None:
    """The relative error of each mixer's output, and fainter the error of the stream after each layer."""
    compared = [model for model in results.converted_models if model.layer_errors]
    if not compared or len(compared) > MAX_LINES:
        return None
    styles, series = line_styles(results, compared), []
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
    layers = list(range(0, depth, -(-depth // 8)))
    x_axis = axis("layer") | {"range": [-0.5, depth - 0.5], "tickvals": layers, "showgrid": False}
    y_axis = axis("relative error") | {"range": [0.0, value_range(series, (0.0,))[1]], "tickformat": ".1~%"}
    return line_figure(series, x_axis, y_axis)


def decode_figure(results: ConversionResults) -> Figure | None:
    """Decoded tokens per second over the context; a bar is the range of the measurements. One line per design."""
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

    x_axis = context_axis(contexts) | {"range": log_range(contexts[0] / 1.3, contexts[-1] * 1.3)}
    return _model_figure(results, values, x_axis, "decoded tokens per second", shown, 0.0)


def _model_figure(
    results: ConversionResults,
    values: Callable[[ModelResult], list[Value]],
    x_axis: dict[str, Any],
    y_title: str,
    models: Sequence[ModelResult] | None = None,
    lowest: float | None = None,
) -> Figure:
    """A figure with a line for each model. lowest: where the axis begins; None: a little below the values."""
    shown = models or results.models
    styles = line_styles(results, shown)
    series = [Series(model.name, styles[model.name], values(model), filled=model.stage != CONVERTED) for model in shown]
    low, high = value_range(series)
    y_axis = axis(y_title) | {"range": [low if lowest is None else lowest, high]}
    return line_figure(series, x_axis, y_axis | ({} if lowest is None else {"tickformat": "~s"}))


PAGE_FILE = "convert.html"


def write_conversion_page(results: ConversionResults, folder: Path) -> Path:
    """Write convert.html into a folder atomically; return its path. Raises MachineError."""
    write_file(folder / PAGE_FILE, conversion_page(results), WRITE_REMEDY)
    return folder / PAGE_FILE


def conversion_page(results: ConversionResults) -> str:
    """The page as one HTML document; the same results give the same bytes."""
    return render_figures("conversion.html", **page_context(results))


def page_context(results: ConversionResults) -> dict[str, Any]:
    """Everything that the template shows, as plain data: formatted values without HTML."""
    conversions = [model for model in results.models if model.stage == CONVERTED]
    has_recall = bool(results.original.needles)
    return {
        "figures": {
            "sweep": sweep_figure(results),
            "positions": position_figure(results),
            "layers": layer_figure(results),
            "decode": decode_figure(results),
            "frontier": frontier_figure(results.search),
        },
        "search": None if results.search is None else search_context(results.search),
        "results": results,
        "text": results.text,
        "title": f"heddle convert: {results.source or results.original.name}",
        "styles": model_styles(results),
        "verdict": conversion_verdict(results),
        "rows": str(RowProtocol(tuple(results.text.bos_ids))),
        "tolerance": f"{100 * TOLERANCE:g} %",
        "conversion_count": len(conversions),
        "summary": summary_rows(results),
        "sweep_table": sweep_table(results),
        "position_table": position_table(results),
        "frequency_table": frequency_table(results),
        "layer_tables": layer_tables(results),
        "copying": copying_table(results) if has_recall else None,
        "needles": needle_table(results) if has_recall else None,
        "costs": cost_tables(results),
        "speeds": speed_tables(results),
    }
