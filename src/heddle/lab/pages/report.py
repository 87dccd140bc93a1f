"""Write a comparison's report: report.json with every number, and report.html, a page that needs no network."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heddle.errors import MachineError
from heddle.lab.compare.plan import format_value
from heddle.lab.compare.probes import left_out_sentences
from heddle.lab.compare.results import Design, Difference, Report, TuningReport, finite, plain
from heddle.lab.compare.tables import (
    CostColumn,
    TextTable,
    cost_columns,
    difference_to_baseline,
    first_probe,
    format_bits,
    format_difference,
    format_number,
    format_percent,
    half_width,
    join_names,
    judgment,
    mean_loss,
    ranked_designs,
    recall_accuracy,
    seeds_text,
)
from heddle.lab.compare.verdict import resolution_table
from heddle.lab.pages import sections
from heddle.lab.pages.render import DesignStyle, render_figures, report_styles
from heddle.lab.pages.report_figures import effect_figures, length_figure, overview_figures, profile, tuning_figures
from heddle.signals import delayed_stop_signals
from heddle.storage.file_io import write_file

# The data of the report's summary table: a row for each design, with its interval relative to the baseline.


INTERVAL_MARGIN = 1.08  # room around the largest interval


@dataclass(frozen=True)
class Bar:
    """A number in a cell with a bar below it. percent: the bar's length, None without a bar.

    ends: the range of a speed's measurements, as text. note: in the header.
    """

    title: str
    text: str
    percent: float | None
    note: str = ""
    ends: str = ""


@dataclass(frozen=True)
class Interval:
    """A point with an interval on a scale of percents, 50 of which is the baseline. filled: whether it is resolved."""

    mean: float
    low: float | None
    high: float | None
    filled: bool


@dataclass(frozen=True)
class DifferenceCell:
    """The difference to the baseline. look: its style: better, worse or unresolved."""

    text: str
    judgment: str
    look: str
    method: str
    interval: Interval | None


@dataclass(frozen=True)
class SummaryRow:
    """A design's row. difference: None for the baseline; baseline_point: its point at 0, if it has a mean."""

    name: str
    style: DesignStyle
    size: str
    loss: str
    loss_interval: str
    loss_basis: str
    difference: DifferenceCell | None
    baseline_point: Interval | None
    recall: Bar | None
    costs: list[Bar]


def summary_rows(report: Report) -> list[SummaryRow]:
    """The designs, lowest bits per byte first."""
    columns, scale = cost_columns(report), interval_scale(report.differences)
    return [_row(report, design, columns, scale) for design in ranked_designs(report)]


def interval_scale(differences: Sequence[Difference]) -> float:
    """The largest difference, with its interval, that the scale must show on both sides of 0."""
    ends = [abs(end) for difference in differences for end in difference.known]
    return max(ends, default=0.0) * INTERVAL_MARGIN or 1.0


def _row(report: Report, design: Design, columns: list[CostColumn], scale: float) -> SummaryRow:
    mean, half = mean_loss(design), half_width(design.bits_per_byte)
    is_baseline, difference = design.name == report.baseline, difference_to_baseline(report, design.name)
    return SummaryRow(
        name=design.name,
        style=report_styles(report)[design.name],
        size=parameters_text(design),
        loss=format_bits(mean),
        loss_interval="" if half is None else f"± {half:.3f}",
        loss_basis=design.bits_per_byte.basis if design.bits_per_byte else "",
        difference=None if is_baseline else difference_cell(difference, judgment(difference), scale),
        baseline_point=Interval(50.0, None, None, True) if is_baseline and mean is not None else None,
        recall=_recall(report, design),
        costs=[_cost(column, design.name) for column in columns],
    )


def parameters_text(design: Design) -> str:
    """ "1.31 M parameters", for a mixture of experts with the active ones: "9.00 M parameters, 1.31 M active"."""
    text = f"{format_number(design.parameters)} parameters"
    if design.active_parameters in (None, design.parameters):
        return text
    return f"{text}, {format_number(design.active_parameters)} active"


def difference_cell(row: Difference | None, word: str, scale: float, draws_zero: bool = False) -> DifferenceCell:
    """The cell of a difference. word: what its interval supports. draws_zero: an interval of width 0, too."""
    # one seed gives no certain judgment, so it is styled as unresolved
    look = word if word in ("better", "worse") else "unresolved"
    if row is None or row.mean is None:
        return DifferenceCell(format_difference(row), word, look, "" if row is None else row.method, None)
    ends = (row.low, row.high) if half_width(row) or draws_zero else (None, None)
    mean, low, high = (None if end is None else 50 + 50 * end / scale for end in (row.mean, *ends))
    return DifferenceCell(
        format_difference(row), word, look, row.method, Interval(mean or 0.0, low, high, look != "unresolved")
    )


def _recall(report: Report, design: Design) -> Bar | None:
    probe = first_probe(report)
    if probe is None:
        return None
    accuracy = recall_accuracy(design, probe[0])
    percent = None if accuracy is None else 100 * accuracy
    return Bar(f"Recall, {probe[1].title}", format_percent(accuracy), percent)


def _cost(column: CostColumn, name: str) -> Bar:
    value = column.values[name]
    largest = max((known for known in column.values.values() if known is not None), default=0.0)
    percent = 100 * value / largest if value is not None and largest else None
    note = "less is better" if column.less_is_better else "more is better"
    return Bar(column.title, column.format(value), percent, note, column.range_text(name))


# The data of the report's section on tuning: formatted values for the template, without HTML.


@dataclass(frozen=True)
class TuningSection:
    """(note, numbers) of each field's figure, the chosen values, and how many were tried on runs of which length."""

    cards: list[tuple[str, TextTable]]
    choices: TextTable
    grid: str


def tuning_section(report: Report) -> TuningSection | None:
    """The section; None if nothing was tuned."""
    tuning = report.tuning
    if not tuning:
        return None
    header = ["design", *(field.name for field in tuning.fields), "bits per byte of the trial"]
    rows = [
        [design.name, *map(format_value, design.best), format_bits(design.bits_per_byte)] for design in tuning.designs
    ]
    noun = "combinations" if len(tuning.fields) > 1 else "values"
    [tried] = tuning.rungs
    length = "whole runs" if tried.fraction > 0.999 else f"{tried.fraction:.0%} of a run"
    return TuningSection(
        cards=[(_note(tuning, index), _table(tuning, index)) for index in range(len(tuning.fields))],
        choices=TextTable(header, rows, "Values chosen for each design"),
        grid=f"{len(tried.candidates)} {noun} on {length}",
    )


def _note(tuning: TuningReport, index: int) -> str:
    """The note below the figure."""
    field = tuning.fields[index]
    note = "A ring is a design's choice."
    if field.is_number:
        note += " The dotted line is the best shared value."
    if len(tuning.fields) > 1:
        note += " Each point is the best over the other fields."
    return note


def _table(tuning: TuningReport, index: int) -> TextTable:
    """The losses of the trials by design and value."""
    field = tuning.fields[index]
    rows = []
    for design in tuning.designs:
        losses = profile(design.trials, index)
        statuses = {trial.values[index]: trial.status for trial in design.trials}
        cells = []
        for value in field.values:
            status = statuses.get(value, "done")
            cells.append(format_bits(losses.get(value)) if value in losses or status == "done" else status)
        rows.append([design.name, *cells])
    header = ["trials", *map(format_value, field.values)]
    return TextTable(header, rows, f"Bits per byte of the trials by {field.name}")


WRITE_REMEDY = "free some space or choose another folder"
ARTICLES = {"a", "an", "the"}
LONG_VERDICT = 160  # characters; a longer first sentence is set in smaller type


def write_report(report: Report, folder: Path) -> Path:
    """Write report.json and report.html into a folder, each atomically; return the page's path.

    The same report gives the same bytes. Non-finite numbers become null. Raises MachineError if the folder
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error
    with delayed_stop_signals():
        write_file(folder / "report.json", report_json(report), WRITE_REMEDY)
        write_file(folder / "report.html", report_page(report), WRITE_REMEDY)
    return folder / "report.html"


def report_json(report: Report) -> str:
    """The text of report.json."""
    return json.dumps(plain(finite(report)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def report_page(report: Report, revision: int | None = None, scripts: bool = True) -> str:
    """The report as one HTML document.

    revision: of a page that `LivePage` serves, which polls for newer ones; None for a file.
    scripts: as in `render_figures`.
    """
    return render_figures("report.html", scripts=scripts, revision=revision, **report_context(finite(report)))


def report_context(report: Report) -> dict[str, Any]:
    """Everything that the templates show, as plain data: formatted values without HTML."""
    verdict = [name_parts(report, sentence) for sentence in report.verdict or ["Nothing was compared."]]
    probe = first_probe(report)
    return {
        "report": report,
        "title": "heddle compare: " + join_names(design.name for design in report.designs),
        "styles": report_styles(report),
        "verdict": verdict,
        "is_long_verdict": sum(len(text) for text, _ in verdict[0]) > LONG_VERDICT,
        "seeds": seeds_text(report),
        "summary": summary_rows(report),
        "probe": None if probe is None else probe[1],
        "resolution": resolution_table(report),
        "overview": sections.overview_tables(report),
        "effects": sections.effect_cards(report),
        "interactions": sections.interaction_tables(report),
        "equal_size": sections.equal_size(report),
        "tuning": tuning_section(report),
        "lengths": sections.length_rows(report),
        "refusals": sections.refusals(report),
        "recall": sections.recall_rows(report),
        "left_out": left_out_sentences(report),
        "text_recall": sections.text_recall_table(report),
        "profile": sections.profile_cards(report),
        "experts": sections.expert_cards(sections.router_summaries(report)),
        "designs": sections.design_cards(report),
        "methods": sections.difference_methods(report),
        "figures": {
            **overview_figures(report),
            **effect_figures(report),
            **tuning_figures(report),
            "lengths": length_figure(report),
            **sections.profile_figures(report),
        },
    }


def name_parts(report: Report, sentence: str) -> list[tuple[str, bool]]:
    """A sentence cut into (text, whether it is a design's name). A design named like an article is not marked."""
    names = {design.name for design in report.designs} - ARTICLES
    if not names:
        return [(sentence, False)] if sentence else []
    longest_first = sorted(names, key=len, reverse=True)
    # a name inside a longer word or name does not count
    pattern = r"(?<![\w-])(" + "|".join(re.escape(name) for name in longest_first) + r")(?![\w-])"
    return [(text, index % 2 == 1) for index, text in enumerate(re.split(pattern, sentence)) if text]
