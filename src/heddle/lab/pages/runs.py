"""Write the page of `heddle runs`: the curves of all runs and their table, in one file that needs no network."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from heddle.errors import ConfigError
from heddle.lab.compare.tables import format_bytes, format_number
from heddle.lab.pages.figures.svg import Chart, Scale, Series, Value, line_chart, linear_ticks, value_range
from heddle.lab.pages.render import DesignStyle, design_styles, render
from heddle.lab.pages.sections import ExpertLoads, expert_cards
from heddle.lab.runs import RunSummary, WatchedRun
from heddle.progress import format_duration
from heddle.storage.file_io import write_file

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
    styles = design_styles([run.name for run in shown], shown[0].name)
    series = [
        Series(run.name, styles[run.name], [Value(tokens, value) for tokens, value in run.curve], is_curve=True)
        for run in shown
    ]
    x_scale = Scale(0, max(tokens for run in shown for tokens, _ in run.curve))
    x_ticks = [(100 - percent, text) for percent, text in linear_ticks(x_scale, format_number)]
    return line_chart(series, x_scale, x_ticks, ("tokens", shown[0].metric.replace("_", " ")))


# The page of `heddle watch`: curves of any number of runs, their table, their experts and what they write.


MAX_WATCHED_LINES = 12  # runs of a chart; the table has all
START, MIN_POINTS = 0.1, 20  # the heights of a chart are those after this part, where so many points are later
FROM_ZERO = ("tokens/s", "memory")
# title, curve of the thick line, curve behind it or "", text of a tick, note
CHARTS: tuple[tuple[str, str, str, Callable[[float], str] | None, str], ...] = (
    ("learning rate", "rate", "", lambda rate: f"{rate:.3g}", "As the schedule gave it to each step."),
    (
        "gradient norm",
        "norm",
        "raw_norm",
        None,
        "Before clipping. Each step is pale; the line is smoothed as the loss is.",
    ),
    (
        "tokens/s",
        "speed",
        "",
        format_number,
        "The tokens of a step over the median seconds of the last 100 steps, without evaluations and checkpoints.",
    ),
    ("memory", "memory", "", format_bytes, "The most so far: of tensors on a GPU, of the whole process on a CPU."),
)


def watch_page(runs: Sequence[WatchedRun], revision: int | None = None) -> str:
    """The page as one HTML document. revision: of a live page, which then follows its server."""
    styles = run_styles(runs)
    readable = [run for run in runs if not run.error]
    shown = readable[:MAX_WATCHED_LINES]
    charts = [(_loss_note(metric), _loss_chart(shown, metric, styles)) for metric in _metrics(shown)]
    for title, name, behind, text, note in CHARTS:
        if any(run.curves.get(name) for run in shown):
            pairs = [(run, [(name, False)] + ([(behind, True)] if behind else [])) for run in shown]
            charts.append((note, _chart(pairs, title, styles, text)))
    return render(
        "watch.html",
        title=f"heddle watch: {len(runs)} run{'' if len(runs) == 1 else 's'}",
        revision=revision,
        runs=runs,
        styles=styles,
        charts=charts,
        max_lines=MAX_WATCHED_LINES,
        hidden=len(readable) - len(shown),
        experts=[card for run in shown for card in _experts(run)],
        left={run.name: "" if run.seconds_left is None else format_duration(run.seconds_left) for run in readable},
    )


def run_styles(runs: Sequence[WatchedRun]) -> dict[str, DesignStyle]:
    """The style of each run by its name."""
    names = [run.name for run in runs]
    return design_styles(names, names[0]) if names else {}


def _metrics(runs: Sequence[WatchedRun]) -> list[str]:
    return sorted({run.metric for run in runs if run.curves.get("raw") or run.curves.get("validation")})


def _loss_note(metric: str) -> str:
    task = "The training curve is the loss of answers. " if metric == "accuracy" else ""
    return (
        f"{task}Each step is pale. The line is the mean of the steps so far, each weighing 0.9 times the next. "
        "Markers are held-out text. What is higher in the first tenth is drawn at the edge."
    )


def _loss_chart(runs: Sequence[WatchedRun], metric: str, styles: dict[str, DesignStyle]) -> Chart:
    curves = [("smoothed", False), ("raw", True), ("validation", False)]
    pairs = [(run, curves) for run in runs if run.metric == metric]
    return _chart(pairs, "loss" if metric == "loss" else metric.replace("_", " "), styles, None)


def _chart(
    runs: Sequence[tuple[WatchedRun, Sequence[tuple[str, bool]]]],
    title: str,
    styles: dict[str, DesignStyle],
    text: Callable[[float], str] | None,
) -> Chart:
    """A chart of curves over tokens; each is (name, whether it is behind the others)."""
    series, last = [], 1
    for run, names in runs:
        for index, (name, is_behind) in enumerate(names):
            points = run.curves.get(name, [])
            last = max([last, *(tokens for tokens, _ in points)])
            values = [Value(tokens, value, title=f"{run.name}: {value:.4g}") for tokens, value in points]
            is_marked = name == "validation"
            label = "" if index else run.name
            style = styles[run.name]
            series.append(Series(label, style, values, not is_marked, False, not is_marked, is_behind))
    series.sort(key=lambda each: not each.is_behind)  # what is behind is drawn first
    ends = value_range([each for each in map(partial(_after_the_start, last=last), series) if each.values])
    y_scale = Scale(0 if title in FROM_ZERO else ends[0], ends[1])
    x_scale = Scale(0, last)
    x_ticks = [(100 - percent, tick) for percent, tick in linear_ticks(x_scale, format_number)]
    return line_chart(series, x_scale, x_ticks, ("tokens", title), y_scale=y_scale, y_text=text)


def _after_the_start(series: Series, last: int) -> Series:
    """The values after the first tenth, so that what a run begins with does not flatten all that follows."""
    later = [value for value in series.values if value.x > START * last]
    return replace(series, values=later) if len(later) >= MIN_POINTS else series


def _experts(run: WatchedRun) -> list[tuple[str, list[ExpertLoads]]]:
    return [] if run.experts is None else expert_cards([(run.name, [run.experts])])
