"""The summary of a conversion's page: a row for each model, and the style that all figures show it in."""

from collections.abc import Sequence
from dataclasses import dataclass

from heddle.analysis.comparison.formatting import (
    NO_VALUE,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
)
from heddle.analysis.comparison.lookup import value_at
from heddle.analysis.conversion.costs import decode_context, speeds_of, state_per_token
from heddle.analysis.conversion.differences import (
    Difference,
    added_loss,
    added_share,
    copying_gain,
    describe_change,
    healed_share,
    needle_accuracy,
)
from heddle.analysis.conversion.results import HEALED, ORIGINAL, ConversionResults, ModelResult
from heddle.analysis.conversion.verdict import format_signed_percent
from heddle.analysis.pages.design_styles import COLOR_COUNT, DASHES, MARKERS, DesignStyle
from heddle.analysis.pages.summary import INTERVAL_MARGIN, Bar, DifferenceCell, Interval
from heddle.training.evaluation.scores import finite_ratio


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
    styles = {results.original.name: DesignStyle("series-0", DASHES[0], MARKERS[0])}
    for model in results.converted_models:
        index = methods.index(model.method)
        dash = "solid" if model.stage == HEALED else "dash"
        styles[model.name] = DesignStyle(f"series-{1 + index % COLOR_COUNT}", dash, MARKERS[(index + 1) % len(MARKERS)])
    return styles


def summary_rows(results: ConversionResults) -> list[ModelRow]:
    """The original, then the others: of several conversions the larger states first, and of each the lower loss."""

    def order(model: ModelResult) -> tuple[float, float]:
        loss = finite_ratio(model.windows)
        return -(state_per_token(results, model) or 0.0), float("inf") if loss is None else loss

    converted = results.converted_models
    if len({(model.method, model.design_key) for model in converted}) > 1:
        converted = sorted(converted, key=order)
    changes = [added_loss(results, model) for model in converted]
    ends = [abs(row[key]) for row in changes for key in ("mean", "low", "high") if row[key] is not None]
    scale = max(ends, default=0.0) * INTERVAL_MARGIN or 1.0
    return [_summary_row(results, model, scale) for model in (results.original, *converted)]


def _summary_row(results: ConversionResults, model: ModelResult, scale: float) -> ModelRow:
    is_original = model.stage == ORIGINAL
    share = healed_share(results, model)
    healed = f", {format_percent(share)} of the loss removed" if share is not None and share > 0 else ""
    return ModelRow(
        name=model.name,
        style=model_styles(results)[model.name],
        size=f"{format_number(model.parameters)} parameters",
        stage=f"{model.stage}{healed}",
        loss=format_bits(finite_ratio(model.windows)),
        difference=None if is_original else _difference_cell(added_loss(results, model), scale),
        percent="" if is_original else format_signed_percent(added_share(results, model)),
        costs=[*_recall_bars(results, model), *_cost_bars(results, model)],
    )


def _difference_cell(change: Difference, scale: float) -> DifferenceCell:
    word = describe_change(change)
    interval = None
    if change["mean"] is not None:
        mean, low, high = (None if change[k] is None else 50 + 50 * change[k] / scale for k in ("mean", "low", "high"))
        interval = Interval(mean or 50.0, low, high, word in ("better", "worse"))
    look = word if word in ("better", "worse") else "unresolved"
    return DifferenceCell(format_difference(change), word, look, "", interval)


def _recall_bars(results: ConversionResults, model: ModelResult) -> list[Bar]:
    if not model.needles:
        return []
    gain, accuracy = copying_gain(model)["mean"], needle_accuracy(model)
    largest = max((-(copying_gain(each)["mean"] or 0.0) for each in results.models), default=0.0)
    percent = None if gain is None or largest <= 0 else max(0.0, -100 * gain / largest)
    copied = NO_VALUE if gain is None else f"{format_bits(-gain)}".replace("-", "−")
    return [
        Bar("Copying gain", copied, percent, "more is better"),
        Bar("Needles", format_percent(accuracy), None if accuracy is None else 100 * accuracy, "more is better"),
    ]


def _cost_bars(results: ConversionResults, model: ModelResult) -> list[Bar]:
    states = [state_per_token(results, each) or 0.0 for each in results.models]
    state, context = state_per_token(results, model), decode_context(results)
    bars = [Bar("State a token", format_bytes(state), _percent(state, states), "less is better")]
    if context is not None:
        speeds = [value_at(speeds_of(results, each, "decode"), context) or 0.0 for each in results.models]
        speed = value_at(speeds_of(results, model, "decode"), context)
        title = f"Decode at {format_context(context)}"
        bars.append(Bar(title, format_rate(speed), _percent(speed, speeds), "more is better"))
    return bars


def _percent(value: float | None, values: Sequence[float]) -> float | None:
    return None if value is None or not max(values) else 100 * value / max(values)
