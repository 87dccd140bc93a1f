"""The data of the report's sections below the summary: formatted values for the templates, without HTML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.analysis.comparison.formatting import (
    NO_VALUE,
    Formatter,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
    join_names,
    judgment,
)
from heddle.analysis.comparison.lookup import (
    Design,
    Report,
    difference_to_baseline,
    mean_loss,
    missing_reason,
    range_at,
    ranked_designs,
    recall_accuracy,
    shared_context,
    value_at,
)
from heddle.analysis.comparison.statistics import finished_runs
from heddle.analysis.comparison.tables import TextTable, effect_table, equal_size_table, equal_size_words
from heddle.analysis.comparison.verdict import compare_with_baseline, describe_state_growth
from heddle.analysis.pages.figures.base import Figure
from heddle.analysis.pages.figures.overview import mean_curve

MAX_CURVE_COLUMNS = 8
# the strongest background of a heat map's cell, in percent; with more the text is hard to read
RECALL_HEAT, INTERACTION_HEAT = 55, 45


@dataclass(frozen=True)
class OverviewCard:
    """A figure of the overview and its numbers. is_measured: whether there is anything to draw."""

    name: str
    is_measured: bool
    tables: list[TextTable]


@dataclass(frozen=True)
class EffectCard:
    """A varied field. designs_per_value: how many designs each value's mean is over. methods: of its intervals."""

    name: str
    title: str
    baseline: str
    designs_per_value: int
    is_measured: bool
    table: TextTable
    methods: list[str]


@dataclass(frozen=True)
class HeatCell:
    """A cell of a heat map. heat: the strength of its color, in percent; notes: small lines below the text."""

    text: str
    heat: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """A table with colored cells; each row has a title and a cell for each column."""

    titles: list[str]
    columns: list[str]
    rows: list[tuple[str, list[HeatCell]]]


def overview_cards(report: Report, figures: Mapping[str, Figure | None]) -> list[OverviewCard]:
    """A card for each figure of the overview."""
    tables = {
        "loss": [_loss_table(report)],
        "tradeoff": [_tradeoff_table(report)],
        "state": [_series_table(report, "state_bytes", "state at context", format_bytes)],
        "speed": [
            _series_table(report, "decode", "decode at context", format_rate),
            _series_table(report, "prefill", "prefill at context", format_rate),
        ],
    }
    return [OverviewCard(name, figure is not None, tables[name]) for name, figure in figures.items()]


def _loss_table(report: Report) -> TextTable:
    curves = {design["name"]: mean_curve(design) for design in report["designs"]}
    longest: list[tuple[float, float]] = max(curves.values(), key=len)
    step = -(-len(longest) // MAX_CURVE_COLUMNS) or 1
    columns = [tokens for tokens, _ in longest[::-1][::step]][::-1]
    rows = [[name, *(format_bits(value_at(curve, tokens)) for tokens in columns)] for name, curve in curves.items()]
    return TextTable(["bits per byte after", *(f"{format_number(tokens)} tokens" for tokens in columns)], rows)


def _series_table(report: Report, key: str, title: str, format_value: Formatter) -> TextTable:
    contexts = sorted({row[0] for design in report["designs"] for row in design[key] or ()})
    rows = [
        [design["name"], *(_with_range(design[key], context, format_value) for context in contexts)]
        for design in report["designs"]
    ]
    return TextTable([title, *(format_context(context) for context in contexts)], rows)


def _with_range(series: Sequence[Sequence[Any]] | None, context: int, format_value: Formatter) -> str:
    """The value at a context, with the range of its measurements where it has one: "305 tok/s (290 to 311)"."""
    text, ends = format_value(value_at(series, context)), range_at(series, context)
    return text if ends is None else f"{text} ({format_number(ends[0])} to {format_number(ends[1])})"


def _tradeoff_table(report: Report) -> TextTable:
    context = shared_context(report["designs"], "state_bytes")
    rows = []
    for design in ranked_designs(report):
        difference = format_difference(difference_to_baseline(report, design["name"]))
        state = format_bytes(value_at(design["state_bytes"], context))
        rows.append([design["name"], format_bits(mean_loss(design)), difference, state])
    state_title = "state" if context is None else f"state at {format_context(context)}"
    return TextTable(["design", "bits per byte", f"difference to {report['baseline']}", state_title], rows)


def effect_cards(report: Report) -> list[EffectCard]:
    """A card for each varied field."""
    return [
        EffectCard(
            name=f"effect-{index}",
            title=field["title"],
            baseline=field["baseline"],
            designs_per_value=max(len(value["designs"]) for value in field["values"]),
            is_measured=any(value["mean"] is not None for value in field["values"]),
            table=effect_table(field),
            # the values share a method where they were measured alike
            methods=list(
                dict.fromkeys(value["difference"]["method"] for value in field["values"] if value["difference"])
            ),
        )
        for index, field in enumerate(report["effects"]["fields"])
    ]


def interaction_tables(report: Report) -> list[HeatMap]:
    """A heat map for each pair of varied fields: the lower the loss, the stronger the color."""
    return [_interaction_table(interaction) for interaction in report["effects"]["interactions"]]


def _interaction_table(interaction: Mapping[str, Any]) -> HeatMap:
    cells = {tuple(cell["values"]): cell for cell in interaction["cells"]}
    columns = list(dict.fromkeys(label for _, label in cells))
    means = [cell["mean"] for cell in cells.values() if cell["mean"] is not None]
    rows = [
        (label, [_interaction_cell(cells[label, column], means) for column in columns])
        for label in dict.fromkeys(label for label, _ in cells)
    ]
    return HeatMap(interaction["titles"], columns, rows)


def _interaction_cell(cell: Mapping[str, Any], means: Sequence[float]) -> HeatCell:
    depth = 0.0
    if cell["mean"] is not None and max(means) > min(means):
        depth = (max(means) - cell["mean"]) / (max(means) - min(means))
    notes: tuple[str, ...] = ()
    interaction = cell["interaction"]
    if interaction is not None:
        word = "resolved" if interaction["resolved"] else "not resolved"
        notes = (format_difference(interaction), word if interaction["mean"] is not None else "not measured")
    return HeatCell(format_bits(cell["mean"]), INTERACTION_HEAT * depth, notes)


def equal_size(report: Report) -> tuple[str, TextTable] | None:
    """(what was made equal, in words; what was changed), or None where nothing was."""
    return (equal_size_words(report), equal_size_table(report)) if report["equal_size"] else None


def length_rows(report: Report) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Of each design its name, and for each multiple of the trained length (text, note, method of the interval)."""
    rows = []
    for design in report["designs"]:
        rows.append((design["name"], [_length_cell(row) for row in design["extrapolation"]]))
    return rows


def _length_cell(row: Mapping[str, Any]) -> tuple[str, str, str]:
    change = row["change"]
    if row["bits_per_byte"] is None:
        return missing_reason(row), "", ""
    if change is None:
        return format_bits(row["bits_per_byte"]), "", ""
    missing = f", {row['not_finite']} not finite" if row["not_finite"] else ""
    return format_difference(change), f"{judgment(change)}{missing}", change["method"]


def refusals(report: Report) -> list[tuple[str, int, str]]:
    """(design, multiple, reason) of the first length that a design refuses."""
    first = []
    for design in report["designs"]:
        row = next((row for row in design["extrapolation"] if row["refusal"] is not None), None)
        if row is not None:
            first.append((design["name"], row["multiple"], row["refusal"]))
    return first


def recall_rows(report: Report) -> HeatMap:
    """Right answers by design and probe; the stronger the color, the further from guessing."""
    probes = report["recall"]
    rows = []
    for design in report["designs"]:
        cells = []
        for name, probe in probes.items():
            accuracy = recall_accuracy(design, name)
            above = 0.0 if accuracy is None else max(0.0, (accuracy - probe["chance"]) / (1 - probe["chance"]))
            cells.append(HeatCell(format_percent(accuracy), RECALL_HEAT * above))
        rows.append((design["name"], cells))
    return HeatMap(["right answers"], [probe["title"] for probe in probes.values()], rows)


def design_cards(report: Report) -> list[dict[str, Any]]:
    """Of each design: what it is, its state, how it compares with the baseline, its runs, and a sample."""
    return [
        {
            "design": design,
            "state_growth": describe_state_growth(design),
            "kernels": kernel_sentences(design),
            "relative_to_baseline": compare_with_baseline(report, design),
            "runs": TextTable(
                ["", "bits per byte", "tokens", "time"],
                [
                    [
                        f"seed {run['seed']}",
                        format_bits(run["bits_per_byte"]) if run["status"] == "done" else run["status"],
                        format_number(run["train_tokens"]),
                        NO_VALUE if run["seconds"] is None else f"{run['seconds']:.1f} s",
                    ]
                    for run in design["runs"]
                ],
            ),
            "skipped": [
                f"{run['skipped_steps']} in seed {run['seed']}" for run in design["runs"] if run["skipped_steps"]
            ],
            "sample": next((run["sample"] for run in finished_runs(design["runs"]) if run["sample"]), ""),
        }
        for design in report["designs"]
    ]


def kernel_sentences(design: Design) -> list[str]:
    """Of each phase the kernels of the mixers' operations: "Kernels in training: attention torch, delta chunked"."""
    phrases = []
    for phase, operations in design["kernels"].items():
        names = [f"{operation} {' and '.join(kernels)}" for operation, kernels in operations.items()]
        phrases += [f"Kernels in {phase}: {', '.join(names)}"] if names else []
    return phrases


def difference_methods(report: Report) -> list[tuple[str, str]]:
    """(designs, method) of each method by which differences were computed."""
    is_partial = not report["progress"]["is_complete"]
    differences = [row for row in report["differences"] if not is_partial or row["mean"] is not None]
    methods = dict.fromkeys(row["method"] for row in differences)
    return [
        (join_names([row["design"] for row in differences if row["method"] == method], 12), method)
        for method in methods
    ]
