"""The part of a conversion's page on its search: frontier, goals, where each choice loses, baselines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from heddle.lab.compare.tables import TextTable, format_context, format_percent, format_rate, format_signed
from heddle.lab.pages.figures import Figure, Series, Value, axis, line_figure, log_range
from heddle.lab.pages.render import DASHES, MARKERS, DesignStyle
from heddle.lab.pages.sections import HeatCell, HeatMap, frequency_columns, heat_of
from heddle.lab.search.results import FrontierPoint, Interval, SearchResults, WholeModel

LEAST_KL = 1e-6  # of the map's colors, which follow the logarithm
COSTS = {"reads": "bytes read per token", "flops": "FLOPs"}  # others are named as they are
Row = Sequence[Interval | None]


def search_context(results: SearchResults) -> dict[str, Any]:
    """What the template shows of a search; the same results give the same values."""
    check = results.pair_check
    pairs = (
        f"Of {check.pairs} measured pairs, the prediction is {check.with_interactions:.0%} off (median), and "
        f"{check.without:.0%} without interactions."
    )
    unclear = [m.name for m in results.measured if not m.is_baseline and m.low <= 0 < m.difference]
    clear = f"Not clearly different from the chosen one: {', '.join(unclear)}." if unclear else ""
    return {
        "results": results,
        "cost": cost_name(results.axis),
        "map": score_map(results),
        "frontier": frontier_table(results),
        "tried": tried_table(results),
        "lost": lost_maps(results),
        "table": measured_table(results),
        "sentences": [pairs, *([clear] if clear else []), gap_sentence(results), *second_sentences(results)],
    }


def cost_name(axis_name: str) -> str:
    """`state@32768` -> `state at 32,768 tokens`."""
    cost, _, length = axis_name.partition("@")
    cost = COSTS.get(cost, cost)
    return f"{cost} at {int(length):,} tokens" if length else cost


def gap_sentence(results: SearchResults) -> str:
    """How far the solver's choices could be from its optimum."""
    gap = max((point.gap for point in results.frontier), default=0.0)
    if gap < 1e-6:  # the solver's own tolerance
        return "Every choice of the frontier is proven optimal for the predicted KL."
    return f"The solver's time ended before the proof: its choices may be {gap:.1%} from the least predicted KL."


def second_sentences(results: SearchResults) -> list[str]:
    """How much the choice depends on the text, if there is a second one."""
    second = results.second
    if second is None:
        return []
    layers = f"{second.same_layers} of {len(second.choice)} layers"
    return [
        f"By scores on {second.tokens:,} tokens of {second.name}, the second text, the best choice agrees in {layers} "
        f"with the first one's, and the ranks of the scores correlate by {second.correlation:.2f}."
    ]


def score_map(results: SearchResults) -> HeatMap:
    """The KL of each replacement alone, by layer and target; chosen replacements are marked."""
    by_place = {(score.layer, score.target): score for score in results.scores}
    largest = math.log(max((score.kl for score in results.scores), default=1.0) / LEAST_KL + 1) or 1.0
    rows = []
    for layer, chosen in enumerate(results.chosen):
        cells = [HeatCell("–", notes=("chosen",) if not chosen else ())]
        for target in results.targets:
            score = by_place.get((layer, target))
            if score is None:
                cells.append(HeatCell(""))
                continue
            notes = (f"± {score.high - score.kl:.2g}", *(("chosen",) if chosen == target else ()))
            heat = heat_of(math.log(max(score.kl, 0.0) / LEAST_KL + 1), largest)
            cells.append(HeatCell(f"{score.kl:.2g}", heat, notes))
        rows.append((f"layer {layer}", cells))
    return HeatMap(
        ["KL, nats per token"], ["not replaced", *(target.replace(",", ", ") for target in results.targets)], rows
    )


def spaced(name: str) -> str:
    """A name with a space after each comma, so that it can wrap."""
    return name.replace(",", ", ").replace(",  ", ", ")


def _measured_columns(results: SearchResults) -> dict[str, Callable[[WholeModel], str]]:
    """The columns of measured goals, with the text of a model's cell."""
    columns: dict[str, Callable[[WholeModel], str]] = {}
    probe, context, speed = results.recall, results.decode_context, results.decode_speed
    if probe is not None:
        columns["recall"] = lambda each: format_percent(sum(each.recall) / sum(probe.accuracy))
    if context is not None and speed is not None:
        columns[f"decode at {format_context(context)}"] = lambda each: (
            "not timed" if each.decode is None else f"{each.decode:.2f} ×, {format_rate(each.decode * speed)}"
        )
    return columns


def distinct_points(results: SearchResults) -> list[FrontierPoint]:
    """The points of the frontier, each choice at the least budget for which it is best."""
    following = [*results.frontier[1:], None]
    return [a for a, b in zip(results.frontier, following, strict=True) if b is None or a.choice != b.choice]


def frontier_table(results: SearchResults) -> TextTable:
    """The best choice within each budget, measured on text that no score used, and all costs as shares of MODEL's."""
    names = [name for name in results.frontier[0].shares if name == results.axis or not name.startswith("reads")]
    columns = _measured_columns(results)
    rows = [
        [
            format_percent(point.budget),
            str(sum(map(bool, point.choice))),
            *(format_percent(point.shares[name]) for name in names),
            format_signed(point.added_bits, 4),
            f"{point.kl:.4g}",
            f"{point.predicted:.4g}",
            *(cell(point) for cell in columns.values()),
        ]
        for point in distinct_points(results)
    ]
    header = ["budget", "changed layers", *map(cost_name, names), "bits per byte added", "KL", "predicted KL", *columns]
    return TextTable(header, rows, "The frontier")


def tried_table(results: SearchResults) -> TextTable | None:
    """The whole models that were measured to meet the goals; None without such goals."""
    goals = list(dict.fromkeys(goal for tried in results.tried for goal in tried.measured))
    rows = [
        [
            format_percent(tried.budget),
            str(sum(map(bool, tried.choice))),
            *(tried.measured.get(goal, "not measured") for goal in goals),
            f"misses {tried.missed}" if tried.missed else "meets all",
        ]
        for tried in results.tried
    ]
    header = ["budget", "changed layers", *goals, "result"]
    return TextTable(header, rows, "Choices that were tried for the goals") if rows else None


def lost_maps(results: SearchResults) -> list[HeatMap]:
    """The losses of the frontier and of other choices by position and by token frequency, and their recall by depth."""
    frontier = {f"frontier, budget {format_percent(point.budget)}": point for point in distinct_points(results)}
    named: dict[str, WholeModel] = {**frontier, **{spaced(each.name): each for each in results.measured}}
    models: dict[str, WholeModel] = {}
    for name, model in named.items():
        if any(model.choice) and all(model.choice != other.choice for other in models.values()):
            models[f"chosen: {name}" if model.choice == results.chosen else name] = model
    parts: list[tuple[str, list[str], dict[str, Row]]] = [
        (
            "bits per byte added at position",
            [f"{first} to {end - 1}" for first, end in results.positions],
            {name: model.positions for name, model in models.items()},
        ),
        (
            "bits per byte added, tokens by frequency",
            frequency_columns(len(results.frontier[0].frequencies)),
            {name: model.frequencies for name, model in models.items()},
        ),
    ]
    maps = [_lost_map(*part) for part in parts]
    if results.recall is not None:
        columns = [f"depth {depth:.0%}" for depth in results.recall.depths]
        accuracies = {"MODEL": results.recall.accuracy, **{name: model.recall for name, model in models.items()}}
        rows = [
            (name, [HeatCell(format_percent(each), heat_of(each, 1.0)) for each in row])
            for name, row in accuracies.items()
        ]
        maps.append(HeatMap([f"correct tokens of needles in {results.recall.length:,}"], columns, rows))
    return maps


def _lost_map(title: str, columns: list[str], values: dict[str, Row]) -> HeatMap:
    largest = max((each[0] for row in values.values() for each in row if each is not None), default=0.0)

    def cell(each: Interval | None) -> HeatCell:
        if each is None:
            return HeatCell("")
        return HeatCell(format_signed(each[0]), heat_of(each[0], largest), (f"±\u00a0{each[1]:.3f}",))

    return HeatMap([title], columns, [(name, list(map(cell, row))) for name, row in values.items()])


def measured_table(results: SearchResults) -> TextTable:
    """Whole models on text that no score used, the search's first, then baselines; each against the chosen one."""
    rows, columns = [], _measured_columns(results)
    for each in sorted(results.measured, key=lambda measured: (measured.is_baseline, measured.kl)):
        half = each.high - each.difference
        versus = "chosen" if each.choice == results.chosen else f"{each.difference:+.3g} ± {half:.2g}".replace("-", "−")
        share, added = format_percent(each.share), format_signed(each.added_bits, 4)
        cells = [spaced(each.name), share, f"{each.kl:.4g}", versus, added, f"{each.predicted:.4g}"]
        rows.append([*cells, *(cell(each) for cell in columns.values())])
    header = ["choice", cost_name(results.axis), "KL", "against the chosen", "bits per byte added", "predicted KL"]
    return TextTable([*header, *columns], rows, "Whole models, not healed")


def frontier_figure(results: SearchResults | None) -> Figure | None:
    """KL over the share of the cost: the frontier as predicted and as measured, and other whole models."""
    if results is None:
        return None
    points = [Value(p.budget, p.predicted, title=f"{p.budget:.1%}: {p.predicted:.3g} nats") for p in results.frontier]
    series = [Series("frontier, predicted", DesignStyle("series-1", "dash", MARKERS[0]), points, filled=False)]
    measured = [Value(p.budget, p.kl, title=f"{p.budget:.1%}, measured: {p.kl:.3g} nats") for p in results.frontier]
    series.append(Series("frontier, measured", DesignStyle("series-1", DASHES[0], MARKERS[0]), measured))
    for name, style, is_baseline in (
        ("search, measured", DesignStyle("series-1", DASHES[0], MARKERS[1]), False),
        ("baselines, measured", DesignStyle("series-2", DASHES[0], MARKERS[2]), True),
    ):
        own = [each for each in results.measured if each.is_baseline == is_baseline]
        values = [Value(each.share, each.kl, title=f"{each.name}: {each.kl:.3g} nats") for each in own]
        series.append(Series(name, style, values, has_line=False))
    series = [replace(each, values=[value for value in each.values if min(value.x, value.y) > 0]) for each in series]
    ends = [(value.x, value.y) for each in series for value in each.values] or [(1.0, 1.0)]
    ranges = [log_range(min(values) / 1.3, max(values) * 1.3) for values in zip(*ends, strict=True)]
    x_axis = axis(f"share of the {cost_name(results.axis)}") | {"type": "log", "tickformat": ".2~%", "dtick": "D2"}
    y_axis = axis("KL from the original, nats per token") | {"type": "log", "tickformat": "~g", "dtick": "D2"}
    return line_figure(series, x_axis | {"range": ranges[0]}, y_axis | {"range": ranges[1]})
