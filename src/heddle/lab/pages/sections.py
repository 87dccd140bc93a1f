"""The data of the report's sections below the summary: formatted values for the templates, without HTML."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.lab.compare.results import (
    Design,
    Difference,
    Interaction,
    InteractionCell,
    LengthChange,
    ProfileGroups,
    Report,
    VariedField,
)
from heddle.lab.compare.statistics import finished_runs
from heddle.lab.compare.tables import (
    NO_VALUE,
    Formatter,
    TextTable,
    difference_to_baseline,
    effect_table,
    equal_size_table,
    equal_size_words,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
    format_signed,
    half_width,
    join_names,
    mean_loss,
    missing_reason,
    range_at,
    ranked_designs,
    recall_accuracy,
    series_of,
    shared_context,
    value_at,
)
from heddle.lab.compare.verdict import compare_with_baseline, describe_state_growth
from heddle.lab.pages.figures import Figure
from heddle.lab.pages.report_figures import mean_curve, profile_figure
from heddle.training.step import average_router_summaries

MAX_CURVE_COLUMNS = 8
# the strongest color of a heat map's cell, in percent; with more the text is hard to read
HEAT, INTERACTION_HEAT = 55, 45


@dataclass(frozen=True)
class HeatCell:
    """A cell of a heat map. heat: the strength of its color, in percent; notes: small lines below the text."""

    text: str
    heat: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeatMap:
    """A table with colored cells; each row has a title and a cell for each column."""

    titles: list[str]
    columns: list[str]
    rows: list[tuple[str, list[HeatCell]]]


def heat_of(value: float | None, largest: float) -> float:
    """The heat of a cell in proportion to its value; the largest value has the strongest color, and none below 0."""
    return HEAT * max(0.0, value or 0.0) / largest if largest > 0 else 0.0


def accuracy_heat(accuracy: float | None, chance: float) -> float:
    """The heat of an accuracy: the further above guessing, the stronger."""
    return heat_of(None if accuracy is None else accuracy - chance, 1 - chance)


def difference_rows(
    differences: Mapping[str, Sequence[Difference]], note: Callable[[Difference], str] | None = None
) -> list[tuple[str, list[HeatCell]]]:
    """A row for each name; the stronger the color, the further above 0. note: below a difference."""
    largest = max((abs(each.mean or 0.0) for row in differences.values() for each in row), default=0.0)

    def cell(each: Difference) -> HeatCell:
        return HeatCell(format_difference(each), heat_of(each.mean, largest), (note(each),) if note else ())

    return [(name, list(map(cell, row))) for name, row in differences.items()]


def frequency_columns(count: int) -> list[str]:
    """The names of groups of tokens by frequency."""
    return ["most frequent", *map(str, range(2, count)), "rarest"][:count]


def overview_tables(report: Report) -> dict[str, list[TextTable]]:
    """The numbers of each figure of the overview, by its name."""
    return {
        "loss": [_loss_table(report)],
        "tradeoff": [_tradeoff_table(report)],
        "state": [_series_table(report, "state_bytes", "state at context", format_bytes)],
        "speed": [
            _series_table(report, "decode", "decode at context", format_rate),
            _series_table(report, "prefill", "prefill at context", format_rate),
        ],
    }


def _loss_table(report: Report) -> TextTable:
    curves = {design.name: mean_curve(design) for design in report.designs}
    longest: list[tuple[float, float]] = max(curves.values(), key=len)
    step = -(-len(longest) // MAX_CURVE_COLUMNS) or 1
    columns = [tokens for tokens, _ in longest[::-1][::step]][::-1]
    rows = [[name, *(format_bits(value_at(curve, tokens)) for tokens in columns)] for name, curve in curves.items()]
    return TextTable(["bits per byte after", *(f"{format_number(tokens)} tokens" for tokens in columns)], rows)


def _series_table(report: Report, key: str, title: str, format_value: Formatter) -> TextTable:
    contexts = sorted({row[0] for design in report.designs for row in series_of(design, key)})
    rows = [
        [design.name, *(with_range(series_of(design, key), context, format_value) for context in contexts)]
        for design in report.designs
    ]
    return TextTable([title, *(format_context(context) for context in contexts)], rows)


def with_range(series: Sequence[Sequence[Any]] | None, context: int, format_value: Formatter) -> str:
    """The value at a context, with the range of its measurements if it has one: "305 tok/s (290 to 311)"."""
    text, ends = format_value(value_at(series, context)), range_at(series, context)
    return text if ends is None else f"{text} ({format_number(ends[0])} to {format_number(ends[1])})"


def _tradeoff_table(report: Report) -> TextTable:
    context = shared_context(report.designs, "state_bytes")
    rows = []
    for design in ranked_designs(report):
        difference = format_difference(difference_to_baseline(report, design.name))
        state = format_bytes(value_at(design.state_bytes, context))
        rows.append([design.name, format_bits(mean_loss(design)), difference, state])
    state_title = "state" if context is None else f"state at {format_context(context)}"
    return TextTable(["design", "bits per byte", f"difference to {report.baseline}", state_title], rows)


def effect_cards(report: Report) -> list[tuple[VariedField, int, TextTable, list[str]]]:
    """Each varied field, how many designs a value's mean is over, the table, and the methods of its intervals."""
    return [
        (
            field,
            max(len(value.designs) for value in field.values),
            effect_table(field),
            # values that were measured alike share a method
            list(dict.fromkeys(value.difference.method for value in field.values if value.difference)),
        )
        for field in report.effects.fields
    ]


def interaction_tables(report: Report) -> list[HeatMap]:
    """A heat map for each pair of varied fields: the lower the loss, the stronger the color."""
    return [_interaction_table(interaction) for interaction in report.effects.interactions]


def _interaction_table(interaction: Interaction) -> HeatMap:
    cells = {tuple(cell.values): cell for cell in interaction.cells}
    columns = list(dict.fromkeys(label for _, label in cells))
    means = [cell.mean for cell in cells.values() if cell.mean is not None]
    rows = [
        (label, [_interaction_cell(cells[label, column], means) for column in columns])
        for label in dict.fromkeys(label for label, _ in cells)
    ]
    return HeatMap(list(interaction.titles), columns, rows)


def _interaction_cell(cell: InteractionCell, means: Sequence[float]) -> HeatCell:
    depth = 0.0
    if cell.mean is not None and max(means) > min(means):
        depth = (max(means) - cell.mean) / (max(means) - min(means))
    notes: tuple[str, ...] = ()
    interaction = cell.interaction
    if interaction is not None:
        word = "resolved" if interaction.resolved else "not resolved"
        notes = (format_difference(interaction), word if interaction.mean is not None else "not measured")
    return HeatCell(format_bits(cell.mean), INTERACTION_HEAT * depth, notes)


def equal_size(report: Report) -> tuple[str, TextTable] | None:
    """(the size that was made equal, in words; the changes), or None if nothing was."""
    return (equal_size_words(report), equal_size_table(report)) if report.equal_size else None


def length_rows(report: Report) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each design's name, and for each multiple of the trained length (text, note, method of the interval)."""
    return [(design.name, [_length_cell(row) for row in design.extrapolation]) for design in report.designs]


def _length_cell(row: LengthChange) -> tuple[str, str, str]:
    change = row.change
    if row.bits_per_byte is None:
        return missing_reason(row), "", ""
    if change is None:
        return format_bits(row.bits_per_byte), "", ""
    missing = f"{row.not_finite} not finite" if row.not_finite else ""
    return format_difference(change), missing, change.method


def refusals(report: Report) -> list[tuple[str, int, str]]:
    """(design, multiple, reason) of the first length that a design rejects."""
    refused = {
        design.name: [(row.multiple, row.refusal) for row in design.extrapolation if row.refusal is not None]
        for design in report.designs
    }
    return [(name, *rows[0]) for name, rows in refused.items() if rows]


def recall_rows(report: Report) -> HeatMap:
    """Accuracy by design and probe; the stronger the color, the further from guessing."""
    probes = report.recall
    rows = []
    for design in report.designs:
        accuracies = {name: recall_accuracy(design, name) for name in probes}
        cells = [
            HeatCell(format_percent(accuracy), accuracy_heat(accuracy, probes[name].chance))
            for name, accuracy in accuracies.items()
        ]
        rows.append((design.name, cells))
    return HeatMap(["correct answers"], [probe.title for probe in probes.values()], rows)


def design_cards(report: Report) -> list[dict[str, Any]]:
    """For each design: its summary, its state, how it compares with the baseline, its runs, and a sample."""
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
                        f"seed {run.seed}",
                        format_bits(run.bits_per_byte) if run.status == "done" else run.status,
                        format_number(run.train_tokens),
                        NO_VALUE if run.seconds is None else f"{run.seconds:.1f} s",
                    ]
                    for run in design.runs
                ],
            ),
            "skipped": [f"{run.skipped_steps} in seed {run.seed}" for run in design.runs if run.skipped_steps],
            "sample": next((run.sample for run in finished_runs(design.runs) if run.sample), ""),
        }
        for design in report.designs
    ]


def kernel_sentences(design: Design) -> list[str]:
    """For each phase the kernels of the mixers' operations: "Kernels in training: attention torch, delta chunked"."""
    phrases = []
    for phase, operations in design.kernels.items():
        names = [f"{operation} {' and '.join(kernels)}" for operation, kernels in operations.items()]
        phrases += [f"Kernels in {phase}: {', '.join(names)}"] if names else []
    return phrases


def difference_methods(report: Report) -> list[tuple[str, str]]:
    """(designs, method) for each method by which differences were computed."""
    is_partial = not report.progress.is_complete
    differences = [row for row in report.differences if not is_partial or row.mean is not None]
    methods = dict.fromkeys(row.method for row in differences)
    return [(join_names([row.design for row in differences if row.method == method], 12), method) for method in methods]


# The data of the report's sections on recall and on the loss by position and frequency, without HTML.


@dataclass(frozen=True)
class ProfileCard:
    """Loss by position or frequency. figure: its name."""

    title: str
    note: str
    figure: str
    map: HeatMap
    groups: TextTable | None = None


def text_recall_table(report: Report) -> TextTable | None:
    """Accuracy on needles with and without them, and bits per byte of repeated spans; None if not measured."""
    measured = [(design, design.text_recall) for design in report.designs if design.text_recall is not None]
    if not measured:
        return None
    rows = []
    for design, recall in measured:
        needle, span = recall.needle, recall.span
        answers = [format_percent(needle.value), format_percent(needle.control), _percent_difference(needle.gain)]
        losses = [format_bits(span.control), format_bits(span.value), format_difference(span.gain)]
        to_baseline = "baseline" if design.name == report.baseline else format_difference(span.difference)
        rows.append([design.name, *answers, *losses, to_baseline])
    header = ["held-out text", "needle", "without it", "gain", "span, first", "again", "again − first"]
    return TextTable([*header, f"to {report.baseline}"], rows, "Recall in held-out text")


def _percent_difference(difference: Difference) -> str:
    """ "+12.0 ± 3.1 %", in percent of the tokens."""
    if difference.mean is None:
        return NO_VALUE
    half = half_width(difference)
    return f"{format_signed(100 * difference.mean, 1)}{'' if half is None else f' ± {100 * half:.1f}'} %"


def profile_labels(groups: ProfileGroups) -> tuple[list[str], list[str]]:
    """The names of the groups by position and by frequency."""
    positions = [f"{first}–{end - 1}" for first, end in groups.positions]
    return positions, [str(index + 1) for index in range(len(groups.frequencies))]


def profile_figures(report: Report) -> dict[str, Figure | None]:
    """The figures of loss by position and by token frequency, by name."""
    if report.loss_profile is None:
        return {}
    positions, frequencies = profile_labels(report.loss_profile)
    ranks = "group of tokens, from frequent to rare"
    return {
        "profile-positions": profile_figure(report, "positions", positions, "position in the document"),
        "profile-frequencies": profile_figure(report, "frequencies", frequencies, ranks),
    }


def profile_cards(report: Report) -> list[ProfileCard]:
    """Loss by position and by token frequency; empty where nothing was measured."""
    groups = report.loss_profile
    if not groups or not any(design.profile("positions") for design in report.designs):
        return []
    ranges, frequencies = profile_labels(groups)
    rows = [
        [number, format_percent(group.share), str(group.tokens), " ".join(group.examples)]
        for number, group in zip(frequencies, groups.frequencies, strict=True)
    ]
    return [
        ProfileCard(
            "Loss by position",
            "The position of a token in its document, within a window. A design that uses its context gains with the "
            "position.",
            "profile-positions",
            profile_map(report, "positions", ranges),
        ),
        ProfileCard(
            "Loss by frequency of the token",
            "Tokens are sorted by their count in the training text, the most frequent first, and cut into groups that "
            "each make up about a tenth of it.",
            "profile-frequencies",
            profile_map(report, "frequencies", frequencies),
            TextTable(["group", "share of the text", "tokens", "the most frequent"], rows, "Groups of tokens"),
        ),
    ]


def profile_map(report: Report, name: str, columns: Sequence[str]) -> HeatMap:
    """The baseline's loss in each group, and the others' differences from it; the stronger the color, the worse."""
    profiles = {design.name: design.profile(name) for design in report.designs if design.profile(name)}
    losses = [HeatCell(format_bits(row.bits_per_byte)) for row in profiles.pop(report.baseline, ())]
    others = difference_rows({each: [row.difference for row in profile] for each, profile in profiles.items()})
    return HeatMap(["bits per byte"], list(columns), [(report.baseline, losses), *others] if losses else others)


# The data of the report's section on mixtures of experts: how often each expert was chosen.


BAR_WIDTH, BAR_SPACE, PICTURE_HEIGHT = 8.0, 10, 40  # in the picture's own units


@dataclass(frozen=True)
class ExpertLoads:
    """The experts of one layer. shares: the load of each expert, relative to an even load of 1."""

    layer: str
    shares: list[float]
    bars: list[tuple[float, float, float, float]]  # x, y, width, height
    picture_width: float
    even_share_y: float
    entropy: str
    dropped: str


RouterSummary = Mapping[str, Mapping[str, Any]]  # of each router, by path


def router_summaries(report: Report) -> list[tuple[str, list[RouterSummary]]]:
    """(design, the routers of its finished runs) of every design."""
    return [
        (design.name, [run.experts for run in finished_runs(design.runs) if run.experts]) for design in report.designs
    ]


def expert_cards(designs: Sequence[tuple[str, Sequence[RouterSummary]]]) -> list[tuple[str, list[ExpertLoads]]]:
    """(design, its layers) of every design with mixtures of experts, averaged over its summaries."""
    cards = []
    for name, summaries in designs:
        if summaries:
            average = average_router_summaries([_sorted_by_load(summary) for summary in summaries])
            shares = {path: [load * len(layer["load"]) for load in layer["load"]] for path, layer in average.items()}
            highest = max(2.0, *(share for of_layer in shares.values() for share in of_layer))
            cards.append((name, [_expert_loads(path, average[path], shares[path], highest) for path in average]))
    return cards


def _sorted_by_load(summary: RouterSummary) -> dict[str, dict[str, Any]]:
    """Loads in descending order: experts of different seeds correspond only by their rank."""
    return {path: {**layer, "load": sorted(layer["load"], reverse=True)} for path, layer in summary.items()}


def _expert_loads(path: str, layer: Mapping[str, Any], shares: list[float], highest: float) -> ExpertLoads:
    bars = []
    for index, share in enumerate(shares):
        height = PICTURE_HEIGHT * share / highest
        left = BAR_SPACE * index + (BAR_SPACE - BAR_WIDTH) / 2
        bars.append((left, PICTURE_HEIGHT - height, BAR_WIDTH, height))
    max_entropy = math.log(len(shares))
    return ExpertLoads(
        layer=path.removesuffix(".feedforward"),
        shares=shares,
        bars=bars,
        picture_width=BAR_SPACE * len(shares),
        even_share_y=PICTURE_HEIGHT - PICTURE_HEIGHT / highest,
        entropy=NO_VALUE if layer["entropy"] is None else f"{layer['entropy']:.2f} of {max_entropy:.2f}",
        dropped=format_percent(layer["dropped"]),
    )
