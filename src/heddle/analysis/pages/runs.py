"""Write the page of `heddle runs`: the curves of all runs and their table, in one file that needs no network."""

from collections.abc import Sequence
from pathlib import Path

from heddle.analysis.comparison.formatting import format_number
from heddle.analysis.pages.design_styles import design_styles
from heddle.analysis.pages.figures.svg import Chart, Scale, Series, Value, line_chart, linear_ticks
from heddle.analysis.pages.render import render
from heddle.analysis.runs import RunSummary
from heddle.errors import ConfigError
from heddle.storage.atomic import write_file

KEYS_IN_ROW = 3  # of the legend of a picture; templates/runs_svg.html has the same
MAX_LINES = 24  # of a chart; the table has all runs


def write_runs_page(runs: Sequence[RunSummary], differences: Sequence[str], file: Path) -> None:
    """Write the page, or only its charts where the file's name ends in .svg, whole or not at all.

    differences: a text for each run. Raises MachineError, and ConfigError for a picture of nothing.
    """
    is_picture = file.suffix.lower() == ".svg"
    content = runs_picture(runs) if is_picture else runs_page(runs, differences)
    write_file(file, content, "choose another file, or free space")


def runs_page(runs: Sequence[RunSummary], differences: Sequence[str]) -> str:
    """The page as one HTML document."""
    return render(
        "runs.html",
        title=f"heddle runs: {len(runs)}",
        charts=curve_charts(runs),
        max_lines=MAX_LINES,
        rows=list(zip(runs, differences, strict=True)),
    )


def runs_picture(runs: Sequence[RunSummary]) -> str:
    """The curves as one SVG file. Raises ConfigError where no run has a curve."""
    charts = curve_charts(runs)
    if not charts:
        raise ConfigError("runs: none has a step that could be drawn; let one train first")
    styles = {line.name: line.style for chart in charts for line in chart.lines}
    keys = -(-len(styles) // KEYS_IN_ROW) + 1  # rows of the legend, and the margin below
    return render("runs_svg.html", title=f"{len(runs)} runs", charts=charts, styles=styles, keys=keys).lstrip()


def curve_charts(runs: Sequence[RunSummary]) -> list[Chart]:
    """A chart for each metric of the runs."""
    metrics = sorted({run.metric for run in runs if run.curve})
    return [curve_chart([run for run in runs if run.metric == metric and run.curve]) for metric in metrics]


def curve_chart(runs: Sequence[RunSummary]) -> Chart:
    """The metric of at most 24 runs over tokens."""
    shown = runs[:MAX_LINES]
    styles = design_styles({"designs": [{"name": run.name} for run in shown], "baseline": shown[0].name})
    series = [
        Series(run.name, styles[run.name], [Value(tokens, value) for tokens, value in run.curve], is_curve=True)
        for run in shown
    ]
    x_scale = Scale(0, max(tokens for run in shown for tokens, _ in run.curve))
    x_ticks = [(100 - percent, text) for percent, text in linear_ticks(x_scale, format_number)]
    return line_chart(series, x_scale, x_ticks, ("tokens", shown[0].metric.replace("_", " ")))
