"""Write the page of `heddle runs`: the curves of all runs and their table, in one file that needs no network."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.lab.pages.figures import Figure, Series, Value, axis, line_figure, plotly_text, value_range
from heddle.lab.pages.render import DesignStyle, design_styles, render_figures
from heddle.lab.pages.sections import expert_cards
from heddle.lab.runs import RunSummary, WatchedRun, reading_note, smoothed
from heddle.progress import format_duration
from heddle.storage.file_io import write_file

SEED = re.compile(r"-seed\d+$")
MAX_LINES = 24  # in a chart; the table has all runs


def write_runs_page(runs: Sequence[RunSummary], differences: Sequence[str], file: Path) -> None:
    """Write the page atomically. differences: a sentence for each run.

    Raises MachineError, and ConfigError for a file that is not named .html.
    """
    if file.suffix.lower() != ".html":
        raise ConfigError(f"--plot {file}: the plot is an HTML page; name it .html (its figures can be saved as SVG)")
    write_file(file, runs_page(runs, differences), "choose another file, or free some space")


def runs_page(runs: Sequence[RunSummary], differences: Sequence[str]) -> str:
    """The page as one HTML document."""
    metrics = sorted({run.metric for run in runs if run.curve})
    figures = {
        f"curve-{index}": curve_figure([run for run in runs if run.metric == metric and run.curve])
        for index, metric in enumerate(metrics)
    }
    return render_figures(
        "runs.html",
        figures,
        title=f"heddle runs: {len(runs)}",
        max_lines=MAX_LINES,
        validation_note=reading_note(runs),
        rows=list(zip(runs, differences, strict=True)),
    )


def curve_figure(runs: Sequence[RunSummary]) -> Figure:
    """The metric of at most 24 runs over tokens: raw (pale) and smoothed. Seeds of a design share a style."""
    shown = runs[:MAX_LINES]
    names = [run.name for run in shown]
    styles, labels = styles_of(names), legend_labels(names)
    behind, front = [], []
    for run in shown:
        style = styles[run.name]
        behind.append(Series("", style, _values(run.name, run.curve), is_curve=True, is_behind=True))
        front.append(Series(labels[run.name], style, _values(run.name, smoothed(run.curve)), is_curve=True))
    return line_figure([*behind, *front], _token_axis(), axis(plotly_text(shown[0].metric.replace("_", " "))))


def _values(name: str, points: Sequence[tuple[int, float]]) -> list[Value]:
    return [Value(tokens, value, title=f"{name}: {value:.4g}") for tokens, value in points]


def design_of(name: str) -> str:
    """The design of a run of `heddle compare`, whose folder is named design-seed0; else the run's own name."""
    return SEED.sub("", name)


def styles_of(names: Sequence[str]) -> dict[str, DesignStyle]:
    """The style of each run by its name; seeds of one design share it."""
    designs = list(dict.fromkeys(map(design_of, names)))
    styles = design_styles(designs, designs[0]) if designs else {}
    return {name: styles[design_of(name)] for name in names}


def legend_labels(names: Sequence[str]) -> dict[str, str]:
    """One legend entry for each design: at its first run; "" for the others."""
    firsts: dict[str, str] = {}
    counts = Counter(map(design_of, names))
    for name in names:
        firsts.setdefault(design_of(name), name)
    return {
        name: "" if firsts[design_of(name)] != name else name if counts[design_of(name)] == 1 else design_of(name)
        for name in names
    }


def _token_axis() -> dict[str, Any]:
    return axis("tokens") | {"tickformat": "~s", "rangemode": "tozero"}


# The page of `heddle watch`: curves of any number of runs, their table, their experts and samples.


MAX_WATCHED_LINES = 12  # runs of a chart; the table has all
START, MIN_POINTS = 0.1, 20  # the y range is taken after this share of the run, if at least this many points follow
FROM_ZERO = ("tokens/s", "memory")
# title, curve of the thick line, curve behind it or "", format of a tick, note
CHARTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("learning rate", "rate", "", ".3~g", "The scheduled rate of each step."),
    (
        "gradient norm",
        "norm",
        "raw_norm",
        "",
        "Before clipping. Each step is pale; the line is smoothed as the loss is.",
    ),
    (
        "tokens/s",
        "speed",
        "",
        "~s",
        "The tokens of a step over the median seconds of the last 100 steps, without evaluations and checkpoints.",
    ),
    ("memory", "memory", "", ".3~s", "Peak so far: tensors on a GPU, the whole process on a CPU."),
)


def watch_page(runs: Sequence[WatchedRun], revision: int | None = None, scripts: bool = True) -> str:
    """The page as one HTML document.

    revision: of a live page, which follows its server. scripts: as in `render_figures`.
    """
    styles = styles_of([run.name for run in runs])
    readable = [run for run in runs if not run.error]
    shown = readable[:MAX_WATCHED_LINES]
    charts = [chart for metric in _metrics(shown) for chart in _loss_charts(shown, metric, styles)]
    for title, name, behind, tick_format, note in CHARTS:
        if any(run.curves.get(name) for run in shown):
            pairs = [(run, [(name, False)] + ([(behind, True)] if behind else [])) for run in shown]
            charts.append((title, note, _figure(pairs, title, styles, tick_format)))
    return render_figures(
        "watch.html",
        {f"watch-{index}": figure for index, (_, _, figure) in enumerate(charts)},
        scripts,
        title=f"heddle watch: {len(runs)} run{'' if len(runs) == 1 else 's'}",
        revision=revision,
        runs=runs,
        styles=styles,
        charts=[(title, note) for title, note, _ in charts],
        max_lines=MAX_WATCHED_LINES,
        hidden=len(readable) - len(shown),
        experts=expert_cards([(run.name, [run.experts]) for run in shown if run.experts is not None]),
        left={run.name: "" if run.seconds_left is None else format_duration(run.seconds_left) for run in readable},
    )


def _metrics(runs: Sequence[WatchedRun]) -> list[str]:
    return sorted({run.metric for run in runs if run.curves.get("raw") or run.curves.get("validation")})


def _loss_charts(
    runs: Sequence[WatchedRun], metric: str, styles: dict[str, DesignStyle]
) -> Iterator[tuple[str, str, Figure]]:
    """Title, note and figure of each chart of a metric: a task's accuracy and its loss on answers stand apart."""
    own = [run for run in runs if run.metric == metric]
    pale = "Each step is pale. The line is the mean of the steps so far, each weighing 0.9 times the next. "
    edge = "Higher values in the first tenth are drawn at the edge."
    training, held_out = [("smoothed", False), ("raw", True)], [("validation", False)]
    if metric == "accuracy":
        yield metric, "On held-out tasks.", _figure([(run, held_out) for run in own], metric, styles)
        loss = "loss on answers"
        yield loss, f"In training. {pale}{edge}", _figure([(run, training) for run in own], loss, styles)
    else:
        note = f"{pale}Markers are held-out text. {edge}"
        yield metric, note, _figure([(run, training + held_out) for run in own], metric, styles)


def _figure(
    runs: Sequence[tuple[WatchedRun, Sequence[tuple[str, bool]]]],
    title: str,
    styles: dict[str, DesignStyle],
    tick_format: str = "",
) -> Figure:
    """A figure of curves over tokens; each is (name, whether it is drawn behind the others)."""
    series, last = [], 1
    labels = legend_labels([run.name for run, _ in runs])
    for run, names in runs:
        for index, (name, is_behind) in enumerate(names):
            points = run.curves.get(name, [])
            last = max([last, *(tokens for tokens, _ in points)])
            values = _values(run.name, points)
            is_marked = name == "validation"
            label = "" if index else labels[run.name]
            style = styles[run.name]
            series.append(Series(label, style, values, not is_marked, False, not is_marked, is_behind))
    series.sort(key=lambda each: not each.is_behind)  # what is behind is drawn first
    low, high = value_range([each for each in map(partial(_after_the_start, last=last), series) if each.values])
    y_axis = axis(title.replace("_", " ")) | {"range": [0 if title in FROM_ZERO else low, high]}
    y_axis |= {"ticksuffix": "B"} if title == "memory" else {}
    return line_figure(series, _token_axis(), y_axis | ({"tickformat": tick_format} if tick_format else {}))


def _after_the_start(series: Series, last: int) -> Series:
    """The values after the first tenth, so that the steep start does not flatten the rest."""
    later = [value for value in series.values if value.x > START * last]
    return replace(series, values=later) if len(later) >= MIN_POINTS else series
