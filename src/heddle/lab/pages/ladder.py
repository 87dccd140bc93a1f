"""Write a ladder's page, ladder.html: one file that needs no network and no script."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from heddle.lab.compare.tables import format_bits, format_number
from heddle.lab.ladder import report as tables
from heddle.lab.ladder.report import format_power, ratios_text
from heddle.lab.ladder.results import CurvePoint, LadderDesign, LadderReport, SizeResult
from heddle.lab.pages.figures.svg import Chart, Scale, Series, Value, linear_ticks, scaled_lines, value_range
from heddle.lab.pages.render import design_styles, render
from heddle.storage.file_io import write_file

# The figures of a ladder: loss over size and over training FLOPs, both axes logarithmic, with curves and intervals.


SIZE_MARGIN = 1.15  # of the axis of sizes, as a factor
MAX_TICKS = 6
MAX_CURVES = 8  # more bands than that hide each other


def size_chart(report: LadderReport) -> Chart:
    """Loss over parameters; of L(N, D), at the tokens per parameter at which designs are compared."""
    designs = [
        replace(design, rungs=[rung for rung in design.rungs if _is_near(rung, report.tokens_per_parameter)])
        for design in report.designs
    ]
    title = "parameters, all that act on a token"
    return _ladder_chart(replace(report, designs=designs), lambda point: point.parameters, title, _size_text)


def cost_chart(report: LadderReport) -> Chart:
    """Loss over training FLOPs."""
    return _ladder_chart(report, lambda point: point.training_flops, "training FLOPs", _power_of_ten)


Point = CurvePoint | SizeResult


def _ladder_chart(
    report: LadderReport, x_of: Callable[[Point], float], x_title: str, x_text: Callable[[float], str]
) -> Chart:
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
    x_scale = Scale(min(xs, default=1.0) / SIZE_MARGIN, max(xs, default=10.0) * SIZE_MARGIN, math.log10)
    y_scale = Scale(*_loss_range(series), math.log10)
    return Chart(
        label=f"Bits per byte over {x_title}",
        x_title=f"{x_title}, logarithmic",
        y_title="bits per byte, logarithmic",
        x_ticks=[(x_scale.percent(tick), x_text(tick)) for tick in _log_ticks(x_scale)],
        y_ticks=linear_ticks(y_scale),
        lines=scaled_lines(series, x_scale, y_scale),
        dotted=[],
    )


def _is_near(rung: SizeResult, ratio: float) -> bool:
    return math.isclose(rung.tokens_per_parameter, ratio, rel_tol=1e-6)


def _measured(design: LadderDesign, x_of: Callable[[Point], float]) -> list[Value]:
    values = []
    for rung in design.rungs:
        if rung.loss is not None:
            low, high = rung.interval or (None, None)
            title = f"{design.name}, {format_number(rung.parameters)} parameters: {format_bits(rung.loss)}"
            values.append(Value(x_of(rung), rung.loss, low, high, title))
    return values


def _loss_range(series: Sequence[Series]) -> tuple[float, float]:
    """All measured points and curves; the bands may leave the plot where they are wide."""
    bare = [Series(each.name, each.style, [Value(value.x, value.y) for value in each.values]) for each in series]
    low, high = value_range(bare)
    return max(low, 1e-3), high


def _log_ticks(scale: Scale) -> list[float]:
    """Numbers 1, 2 and 5 times powers of ten within the scale, or powers of ten alone where those are enough."""
    first, last = math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high))
    for steps in ((1, 2, 5), (1,)):
        ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = [tick for tick in ticks if scale.low <= tick <= scale.high]
        if len(ticks) <= MAX_TICKS:
            return ticks
    return ticks[:: -(-len(ticks) // MAX_TICKS)]


def _size_text(value: float) -> str:
    """Ticks are round numbers: "10 k", not "10.0 k"."""
    return format_number(value).replace(".00", "").replace(".0", "")


def _power_of_ten(value: float) -> str:
    mantissa, exponent = f"{value:.0e}".split("e")
    return ("" if mantissa == "1" else f"{mantissa}·") + format_power(int(exponent))


PAGE_FILE = "ladder.html"


def write_ladder_page(report: LadderReport, folder: Path) -> Path:
    """Write ladder.html into a folder, whole or not at all; return its path. Raises MachineError."""
    write_file(folder / PAGE_FILE, ladder_page(report))
    return folder / PAGE_FILE


def ladder_page(report: LadderReport) -> str:
    """The page as one HTML document; the same report gives the same bytes."""
    fit = report.fit
    return render(
        "ladder.html",
        report=report,
        title=f"heddle ladder: {', '.join(design.name for design in report.designs)}",
        styles=design_styles([design.name for design in report.designs], report.baseline),
        ratios=ratios_text(report),
        run_count=sum(rung.seeds for design in report.designs for rung in design.rungs),
        charts=[size_chart(report), cost_chart(report)] if any(_is_measured(each) for each in report.designs) else [],
        rungs=[(design.name, tables.rung_table(design)) for design in report.designs],
        predictions=tables.prediction_table(report) if report.predictions else None,
        best_sizes=tables.best_size_table(report) if report.best_sizes else None,
        costs=tables.cost_table(report) if report.equal_loss else None,
        held_out=tables.held_out_table(report) if report.held_out else None,
        parameters=None if fit is None else tables.fit_table(fit),
        forms=None if fit is None else tables.form_table(fit),
    )


def _is_measured(design: LadderDesign) -> bool:
    return any(rung.loss is not None for rung in design.rungs)
