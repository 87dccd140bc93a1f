"""The data of the report's sections on what designs can do and where their loss lies, without HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.analysis.comparison.abilities import left_out_sentences
from heddle.analysis.comparison.formatting import (
    NO_VALUE,
    format_bits,
    format_difference,
    format_percent,
    format_signed,
    half_width,
    judgment,
)
from heddle.analysis.comparison.lookup import Report
from heddle.analysis.comparison.tables import TextTable
from heddle.analysis.pages.figures.profile import profile_chart
from heddle.analysis.pages.figures.svg import Chart
from heddle.analysis.pages.sections import HeatCell, HeatMap

PROFILE_HEAT = 55  # the strongest background of a cell, in percent


@dataclass(frozen=True)
class AbilityTables:
    """What is shown of recall beside the table of tasks. left_out: sentences on tasks that are not in that table."""

    left_out: list[str]
    text_table: TextTable | None
    text: Mapping[str, Any] | None


@dataclass(frozen=True)
class ProfileCard:
    """A figure of where the loss lies, and its numbers."""

    title: str
    note: str
    chart: Chart | None
    map: HeatMap
    groups: TextTable | None = None


def ability_tables(report: Report) -> AbilityTables:
    """The section on what the designs can do."""
    return AbilityTables(
        left_out=left_out_sentences(report),
        text_table=text_recall_table(report),
        text=report.get("text_recall"),
    )


def text_recall_table(report: Report) -> TextTable | None:
    """Right tokens of the needles with and without them, and bits per byte of repeated spans; None if not measured."""
    measured = [design for design in report["designs"] if design.get("text_recall")]
    if not measured:
        return None
    rows = []
    for design in measured:
        needle, span = design["text_recall"]["needle"], design["text_recall"]["span"]
        is_baseline = design["name"] == report["baseline"]
        change = span["difference"]
        words = "baseline" if is_baseline else f"{format_difference(change)}, {_more_or_less(change)}"
        rows.append(
            [
                design["name"],
                format_percent(needle["value"]),
                format_percent(needle["control"]),
                _percent_difference(needle["gain"]),
                format_bits(span["control"]),
                format_bits(span["value"]),
                format_difference(span["gain"]),
                words,
            ]
        )
    header = ["held-out text", "needle", "without it", "gain", "span, first", "again", "again − first"]
    return TextTable([*header, f"to {report['baseline']}"], rows, "Recall in held-out text")


def _percent_difference(difference: Mapping[str, Any]) -> str:
    """ "+12.0 ± 3.1 %", in percent of the tokens."""
    if difference["mean"] is None:
        return NO_VALUE
    half = half_width(difference)
    return f"{format_signed(100 * difference['mean'], 1)}{'' if half is None else f' ± {100 * half:.1f}'} %"


def _more_or_less(change: Mapping[str, Any]) -> str:
    """What the difference of two gains says: below 0 the second occurrence helps this design more."""
    word = judgment(change)
    return word.replace("better", "copies more").replace("worse", "copies less")


def profile_cards(report: Report) -> list[ProfileCard]:
    """Loss by position and by token frequency; empty where nothing was measured."""
    groups = report.get("loss_profile")
    if not groups or not any((design.get("loss_profile") or {}).get("positions") for design in report["designs"]):
        return []
    ranges = [f"{first}–{end - 1}" for first, end in groups["positions"]]
    frequencies = [str(index + 1) for index in range(len(groups["frequencies"]))]
    rows = [
        [
            number,
            format_percent(group["share"]),
            str(group["tokens"]),
            " ".join(group["examples"]),
        ]
        for number, group in zip(frequencies, groups["frequencies"], strict=True)
    ]
    return [
        ProfileCard(
            "Loss by position",
            "The position of a token in its document, within a window. A design that uses what it has read gains with "
            "the position.",
            profile_chart(report, "positions", ranges, "position in the document"),
            profile_map(report, "positions", ranges),
        ),
        ProfileCard(
            "Loss by frequency of the token",
            "Tokens are sorted by their count in the training text, the most frequent first, and cut into groups that "
            "each make up about a tenth of it.",
            profile_chart(report, "frequencies", frequencies, "group of tokens, from frequent to rare"),
            profile_map(report, "frequencies", frequencies),
            TextTable(["group", "share of the text", "tokens", "the most frequent"], rows, "Groups of tokens"),
        ),
    ]


def profile_map(report: Report, name: str, columns: Sequence[str]) -> HeatMap:
    """The baseline's loss in each group, and the others' differences to it; the stronger the color, the worse."""
    rows: list[tuple[str, list[HeatCell]]] = []
    measured = [design for design in report["designs"] if (design.get("loss_profile") or {}).get(name)]
    means = [
        abs(row["difference"]["mean"])
        for design in measured
        for row in design["loss_profile"][name]
        if row["difference"]["mean"] is not None
    ]
    largest = max(means, default=0.0)
    for design in sorted(measured, key=lambda design: design["name"] != report["baseline"]):
        cells = []
        for row in design["loss_profile"][name]:
            if design["name"] == report["baseline"]:
                cells.append(HeatCell(format_bits(row["bits_per_byte"]), 0))
                continue
            mean = row["difference"]["mean"] or 0.0
            heat = PROFILE_HEAT * max(0.0, mean) / largest if largest else 0.0
            cells.append(HeatCell(format_difference(row["difference"]), heat, (judgment(row["difference"]),)))
        rows.append((design["name"], cells))
    return HeatMap(["bits per byte"], list(columns), rows)
