"""The part of a conversion's page that says how a search chose: frontier, map of layers and alternatives, baselines."""

import math
from dataclasses import replace
from typing import Any

from heddle.lab.compare.tables import TextTable, format_percent
from heddle.lab.pages.figures import Figure, Series, Value, axis, line_figure, log_range
from heddle.lab.pages.render import DASHES, MARKERS, DesignStyle
from heddle.lab.pages.sections import HeatCell, HeatMap
from heddle.lab.search.results import SearchResults

HEAT = 55  # percent, of the largest score of the map
LEAST_KL = 1e-6  # of the map's colors, which follow the logarithm


def search_context(results: SearchResults) -> dict[str, Any]:
    """What the template shows of a search; the same results give the same values."""
    check = results.pair_check
    pairs = (
        f"Of {check.pairs} measured pairs, the prediction is {check.with_interactions:.0%} off (median), and "
        f"{check.without:.0%} without interactions."
    )
    unclear = [m.name for m in results.measured if not m.is_baseline and m.low <= 0 < m.difference]
    clear = f"Not clear from the chosen one: {', '.join(unclear)}." if unclear else ""
    return {
        "results": results,
        "cost": cost_name(results.axis),
        "map": score_map(results),
        "table": measured_table(results),
        "sentences": [pairs, *([clear] if clear else []), gap_sentence(results)],
    }


def cost_name(axis_name: str) -> str:
    """`state@32768` -> `state at 32,768 tokens`."""
    cost, _, length = axis_name.partition("@")
    return f"{cost} at {int(length):,} tokens" if length else cost


def gap_sentence(results: SearchResults) -> str:
    """How far the solver's choices could be from its optimum."""
    gap = max((point.gap for point in results.frontier), default=0.0)
    if gap < 1e-6:  # the solver's own tolerance
        return "Every choice of the frontier is proven optimal for the predicted KL."
    return f"The solver's time ended before the proof: its choices may be {gap:.1%} from the least predicted KL."


def score_map(results: SearchResults) -> HeatMap:
    """The KL of each replacement alone, by layer and target; what was chosen is named."""
    by_place = {(score.layer, score.target): score for score in results.scores}
    largest = math.log(max((score.kl for score in results.scores), default=1.0) / LEAST_KL + 1) or 1.0
    rows = []
    for layer, chosen in enumerate(results.chosen):
        cells = [HeatCell("–", 0.0, ("chosen",) if not chosen else ())]
        for target in results.targets:
            score = by_place.get((layer, target))
            if score is None:
                cells.append(HeatCell("", 0.0))
                continue
            notes = (f"± {score.high - score.kl:.2g}", *(("chosen",) if chosen == target else ()))
            heat = HEAT * math.log(max(score.kl, 0.0) / LEAST_KL + 1) / largest
            cells.append(HeatCell(f"{score.kl:.2g}", max(0.0, heat), notes))
        rows.append((f"layer {layer}", cells))
    return HeatMap(
        ["KL, nats per token"], ["as it is", *(target.replace(",", ", ") for target in results.targets)], rows
    )


def measured_table(results: SearchResults) -> TextTable:
    """Whole models on text that no score read, the search's first, then baselines; each against the chosen one."""
    rows = []
    for each in sorted(results.measured, key=lambda measured: (measured.is_baseline, measured.kl)):
        half = each.high - each.difference
        versus = "chosen" if each.choice == results.chosen else f"{each.difference:+.3g} ± {half:.2g}"
        share, added = format_percent(each.share), f"{each.added_bits:+.4f}"
        rows.append(
            [
                each.name.replace(",", ", ").replace(",  ", ", "),
                share,
                f"{each.kl:.4g}",
                versus,
                added,
                f"{each.predicted:.4g}",
            ]
        )
    header = ["choice", cost_name(results.axis), "KL", "against the chosen", "bits per byte added", "predicted KL"]
    return TextTable(header, rows, "Whole models, not healed")


def frontier_figure(results: SearchResults | None) -> Figure | None:
    """KL over the share of the cost: the predicted frontier, and whole models as they were measured."""
    if results is None:
        return None
    points = [Value(p.share, p.predicted, title=f"{p.share:.1%}: {p.predicted:.3g} nats") for p in results.frontier]
    series = [Series("frontier, predicted", DesignStyle("series-1", "dash", MARKERS[0]), points, filled=False)]
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
