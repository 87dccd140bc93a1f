"""The data of the report's section on tuning: formatted values for the template, without HTML."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heddle.analysis.comparison.formatting import format_bits
from heddle.analysis.comparison.lookup import Report
from heddle.analysis.comparison.tables import TextTable
from heddle.analysis.comparison.tuning_fields import format_value
from heddle.analysis.pages.figures.tuning import profile, tuning_figures


@dataclass(frozen=True)
class TuningCard:
    """The figure of a tuned field and its numbers. is_measured: whether there is anything to draw."""

    name: str
    title: str
    note: str
    is_measured: bool
    table: TextTable


@dataclass(frozen=True)
class TuningSection:
    """A card for each field, sentences, the values that were chosen, and how many were tried on how long runs."""

    cards: list[TuningCard]
    sentences: list[str]
    choices: TextTable
    grid: str


def tuning_section(report: Report) -> TuningSection | None:
    """The section; None where nothing was tuned."""
    tuning = report.get("tuning")
    if not tuning:
        return None
    figures = tuning_figures(report)
    header = ["design", *(field["name"] for field in tuning["fields"]), "bits per byte of the trial"]
    rows = [
        [design["name"], *map(format_value, design["best"]), format_bits(design["bits_per_byte"])]
        for design in tuning["designs"]
    ]
    noun = "combinations" if len(tuning["fields"]) > 1 else "values"
    [tried] = tuning["rungs"]
    length = "whole runs" if tried["fraction"] > 0.999 else f"{tried['fraction']:.0%} of a run"
    return TuningSection(
        cards=[
            TuningCard(
                name=f"tuning-{index}",
                title=field["name"],
                note=_note(tuning, index),
                is_measured=figures[f"tuning-{index}"] is not None,
                table=_table(tuning, index),
            )
            for index, field in enumerate(tuning["fields"])
        ],
        sentences=tuning["sentences"],
        choices=TextTable(header, rows, "The values chosen for each design"),
        grid=f"{len(tried['candidates'])} {noun} on {length}",
    )


def _note(tuning: Mapping[str, Any], index: int) -> str:
    """What the figure shows."""
    field = tuning["fields"][index]
    note = "A ring is a design's choice."
    if field["is_number"]:
        note += " The dotted line is the best shared value."
    if len(tuning["fields"]) > 1:
        note += " Each point is the best over the other fields."
    return note


def _table(tuning: Mapping[str, Any], index: int) -> TextTable:
    """The losses of the trials by design and value."""
    field = tuning["fields"][index]
    rows = []
    for design in tuning["designs"]:
        losses = profile(design["trials"], index)
        statuses = {trial["values"][index]: trial["status"] for trial in design["trials"]}
        cells = []
        for value in field["values"]:
            status = statuses.get(value, "done")
            cells.append(format_bits(losses.get(value)) if value in losses or status == "done" else status)
        rows.append([design["name"], *cells])
    header = ["trials", *map(format_value, field["values"])]
    return TextTable(header, rows, f"Bits per byte of the trials by {field['name']}")
