"""The tables of a conversion's page: formatted values for the templates, without HTML."""

from heddle.analysis.comparison.formatting import (
    NO_VALUE,
    format_bits,
    format_bytes,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
    format_share,
    half_width,
)
from heddle.analysis.comparison.lookup import range_at, value_at
from heddle.analysis.comparison.tables import TextTable
from heddle.analysis.conversion.costs import SpeedRows, speeds_of, state_per_token, state_share
from heddle.analysis.conversion.differences import (
    added_loss,
    added_share,
    chance_accuracy,
    copying_change,
    copying_gain,
    copying_share,
    describe_change,
    difference,
    healed_share,
    hidden_needles,
    needle_gain,
)
from heddle.analysis.conversion.results import CONVERTED, HEALED, ORIGINAL, ConversionResults, ModelResult
from heddle.analysis.conversion.verdict import format_signed_percent
from heddle.analysis.pages.sections import HeatCell, HeatMap
from heddle.training.evaluation.scores import finite_ratio

HEAT = 55  # the strongest background, in percent


def sweep_table(results: ConversionResults) -> TextTable:
    """A row for each conversion: its state, and what it adds to the loss before and after healing."""
    healed = {_conversion_of(model): model for model in results.models if model.stage == HEALED}
    rows = []
    for model in (model for model in results.models if model.stage == CONVERTED):
        share, size = state_share(results, model), state_per_token(results, model)
        part = NO_VALUE if share is None else format_share(share, 1.0)
        rows.append([model.name, format_bytes(size), part, *_added_cells(results, model)])
        if healed:
            after = healed.get(_conversion_of(model))
            removed = None if after is None else healed_share(results, after)
            rows[-1] += [*(_added_cells(results, after) if after else [NO_VALUE] * 2), format_percent(removed)]
    header = ["conversion", "state a token", "of the original", "adds", ""]
    header += ["healed, adds", "", "removed by healing"] if healed else []
    return TextTable(header, rows, "Added bits per byte by state")


def _conversion_of(model: ModelResult) -> tuple[str, str]:
    return model.method, model.design_key


def _added_cells(results: ConversionResults, model: ModelResult) -> list[str]:
    added = added_loss(results, model)
    percent = format_signed_percent(added_share(results, model))
    return [format_difference(added), f"{percent}, {describe_change(added)}"]


def position_table(results: ConversionResults) -> HeatMap:
    """The original's loss by position, and what each other model adds to it; the stronger the color, the more."""
    ranges = results.text.positions
    original = results.original
    changes = {
        model.name: [difference(*pair) for pair in zip(model.positions, original.positions, strict=True)]
        for model in results.converted_models
    }
    largest = max((abs(c["mean"]) for row in changes.values() for c in row if c["mean"] is not None), default=0.0)
    rows = [(original.name, [HeatCell(format_bits(finite_ratio(scores)), 0) for scores in original.positions])]
    for name, row in changes.items():
        cells = []
        for change in row:
            heat = max(0.0, change["mean"] or 0.0) / largest * HEAT if largest > 0 else 0.0
            cells.append(HeatCell(format_difference(change), heat, (describe_change(change),)))
        rows.append((name, cells))
    columns = [f"{first} to {end - 1}" for first, end in ranges]
    return HeatMap(["bits per byte at position"], columns, rows)


def layer_tables(results: ConversionResults) -> list[HeatMap]:
    """The relative errors of the mixers' outputs and of the stream by layer, for models whose layers correspond."""
    compared = [model for model in results.converted_models if model.layer_errors]
    tables = []
    for title in ("mixer", "stream"):
        errors = {model.name: [getattr(error, title) for error in model.layer_errors] for model in compared}
        largest = max((error for row in errors.values() for error in row if error is not None), default=0.0)
        rows = [
            (name, [HeatCell(format_percent(e), HEAT * (e or 0.0) / largest if largest else 0.0) for e in row])
            for name, row in errors.items()
        ]
        depth = max((len(row) for row in errors.values()), default=0)
        tables.append(HeatMap([title], [str(index) for index in range(depth)], rows))
    return tables if compared else []


def copying_table(results: ConversionResults) -> TextTable:
    """The loss on both occurrences of the repeated spans, and what is left of the original's gain."""
    rows = []
    for model in results.models:
        is_original = model.stage == ORIGINAL
        change = copying_change(results, model)
        rows.append(
            [
                model.name,
                format_bits(finite_ratio(model.first_spans)),
                format_bits(finite_ratio(model.repeated_spans)),
                format_difference(copying_gain(model)),
                "" if is_original else format_difference(change),
                "original" if is_original else describe_change(change),
                format_percent(copying_share(results, model)),
            ]
        )
    header = ["bits per byte of a span", "first", "again", "again − first", "change of it", "", "copying left"]
    return TextTable(header, rows, "Loss on repeated spans")


def needle_table(results: ConversionResults) -> HeatMap:
    """Right answers by depth; the stronger the color, the further above what is guessed without the needle."""
    rows = []
    depths = [needle.depth for needle in hidden_needles(results.original)]
    for model in results.models:
        chance = chance_accuracy(model) or 0.0
        cells = []
        for needle in hidden_needles(model):
            accuracy = finite_ratio(needle.correct)
            above = 0.0 if accuracy is None or chance >= 1 else max(0.0, (accuracy - chance) / (1 - chance))
            cells.append(
                HeatCell(format_percent(accuracy), HEAT * above, (f"{format_bits(finite_ratio(needle.losses))} bits",))
            )
        gain = needle_gain(model)
        half = half_width(gain)
        text = NO_VALUE if gain["mean"] is None else format_signed_percent(gain["mean"])
        note = "" if half is None else f"± {100 * half:.1f} %"
        cells += [HeatCell(format_percent(chance_accuracy(model)), 0), HeatCell(text, 0, (note,))]
        rows.append((model.name, cells))
    columns = [*(f"depth {depth:.0%}" for depth in depths if depth is not None), "without it", "gain"]
    return HeatMap(["right tokens"], columns, rows)


def cost_tables(results: ConversionResults) -> list[TextTable]:
    """Sizes, and states over the context."""
    sizes = TextTable(
        ["model", "parameters", "FLOPs a token", "state a token", "exports as"],
        [
            [
                model.name,
                format_number(model.parameters),
                format_number(model.flops_per_token),
                format_bytes(state_per_token(results, model)),
                model.architecture,
            ]
            for model in results.models
        ],
        "Sizes",
    )
    contexts = sorted({context for model in results.models for context, _ in model.state_bytes})
    states = TextTable(
        ["state at context", *map(format_context, contexts)],
        [[m.name, *(format_bytes(value_at(m.state_bytes, context)) for context in contexts)] for m in results.models],
        "State by context",
    )
    return [sizes, states]


def speed_tables(results: ConversionResults) -> list[TextTable]:
    """Decode and prefill speeds over the context, with their ranges; empty where nothing was measured."""
    tables = []
    for phase in ("decode", "prefill"):
        rows = {model.name: speeds_of(results, model, phase) for model in results.models}
        measured = sorted({row[0] for series in rows.values() for row in series})
        cells = [[name, *(_rate_with_range(series, context) for context in measured)] for name, series in rows.items()]
        if measured:
            tables.append(TextTable([f"{phase} at context", *map(format_context, measured)], cells, f"{phase} speed"))
    return tables


def _rate_with_range(series: SpeedRows, context: int) -> str:
    text, ends = format_rate(value_at(series, context)), range_at(series, context)
    return text if ends is None else f"{text} ({format_number(ends[0])} to {format_number(ends[1])})"
