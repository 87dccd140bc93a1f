"""A ladder's page, ladder.html: one file that needs no network."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from heddle.lab.compare.tables import format_bits, format_number
from heddle.lab.ladder import report as tables
from heddle.lab.ladder.report import format_power, ratios_text
from heddle.lab.ladder.results import CurvePoint, LadderDesign, LadderReport, SizeResult
from heddle.lab.pages.figures import Figure, Series, Value, axis, line_figure, log_range, round_number, value_range
from heddle.lab.pages.render import design_styles, render_figures

# The figures of a ladder: loss over size and over training FLOPs, both axes logarithmic, with curves and intervals.


SIZE_MARGIN = 1.15  # of the axis of sizes, as a factor
MAX_TICKS = 6
MAX_CURVES = 8  # more bands hide each other


def size_figure(report: LadderReport) -> Figure:
    """Loss over parameters; for L(N, D), at the tokens per parameter at which designs are compared."""

    def is_compared(rung: SizeResult) -> bool:
        return math.isclose(rung.tokens_per_parameter, report.tokens_per_parameter, rel_tol=1e-6)

    designs = [replace(design, rungs=list(filter(is_compared, design.rungs))) for design in report.designs]
    title = "parameters that act on a token"
    return _ladder_figure(replace(report, designs=designs), lambda point: point.parameters, title, round_number)


def cost_figure(report: LadderReport) -> Figure:
    """Loss over training FLOPs."""
    return _ladder_figure(report, lambda point: point.training_flops, "training FLOPs", _power_of_ten)


Point = CurvePoint | SizeResult


def _ladder_figure(
    report: LadderReport, x_of: Callable[[Point], float], x_title: str, x_text: Callable[[float], str]
) -> Figure:
    """Curves with bands, and the measured points with their intervals."""
    styles = design_styles([design.name for design in report.designs], report.baseline)
    series = []
    for design in report.designs:
        name, style = design.name, styles[design.name]
        curve = [
            Value(x_of(row), row.loss, row.low, row.high)
            for row in report.curves.get(name, [])
            if len(report.designs) <= MAX_CURVES
        ]
        series.append(Series("", style, curve, is_curve=True))
        series.append(Series(name, style, _measured(design, x_of), has_line=not curve))
    series = [each for each in series if each.values]
    xs = [value.x for each in series for value in each.values]
    low, high = min(xs, default=1.0) / SIZE_MARGIN, max(xs, default=10.0) * SIZE_MARGIN
    ticks = _log_ticks(low, high)
    x_axis = axis(f"{x_title}, logarithmic") | {
        "type": "log", "range": log_range(low, high), "tickvals": ticks, "ticktext": list(map(x_text, ticks)),
    }  # fmt: skip
    y_axis = axis("bits per byte, logarithmic") | {"type": "log", "range": log_range(*_loss_range(series))}
    return line_figure(series, x_axis, y_axis | {"tickformat": ".3~g", "nticks": 6})


def _measured(design: LadderDesign, x_of: Callable[[Point], float]) -> list[Value]:
    values = []
    for rung in design.rungs:
        if rung.loss is not None:
            low, high = rung.interval or (None, None)
            title = f"{design.name}, {format_number(rung.parameters)} parameters: {format_bits(rung.loss)}"
            values.append(Value(x_of(rung), rung.loss, low, high, title))
    return values


def _loss_range(series: Sequence[Series]) -> tuple[float, float]:
    """The range of measured points and curves; wide bands may leave the plot."""
    bare = [Series(each.name, each.style, [Value(value.x, value.y) for value in each.values]) for each in series]
    low, high = value_range(bare)
    return max(low, 1e-3), high


def _log_ticks(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times powers of ten between two, or only powers of ten if those are enough."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 2, 5), (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MAX_TICKS:
            return ticks
    return ticks[:: -(-len(ticks) // MAX_TICKS)]


def _power_of_ten(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return ("" if mantissa == "1" else f"{mantissa}·") + format_power(int(exponent))


PAGE_FILE = "ladder.html"


def ladder_page(report: LadderReport) -> str:
    """The page as one HTML document; the same report gives the same bytes."""
    fit = report.fit
    is_measured = any(rung.loss is not None for design in report.designs for rung in design.rungs)
    return render_figures(
        "ladder.html",
        {"size": size_figure(report), "cost": cost_figure(report)} if is_measured else {},
        report=report,
        title=f"heddle ladder: {', '.join(design.name for design in report.designs)}",
        styles=design_styles([design.name for design in report.designs], report.baseline),
        ratios=ratios_text(report),
        run_count=sum(rung.seeds for design in report.designs for rung in design.rungs),
        rungs=[(design.name, tables.rung_table(design)) for design in report.designs],
        tables=tables.prediction_tables(report),
        parameters=None if fit is None else tables.fit_table(fit),
        forms=None if fit is None else tables.form_table(fit),
    )
