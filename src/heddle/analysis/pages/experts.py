"""The data of the report's section on mixtures of experts: how often each expert was chosen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heddle.analysis.comparison.formatting import NO_VALUE, format_percent
from heddle.analysis.comparison.lookup import Report
from heddle.analysis.comparison.statistics import finished_runs
from heddle.training.router_metrics import average_router_summaries

BAR_WIDTH, BAR_SPACE, PICTURE_HEIGHT = 8.0, 10, 40  # in the picture's own units


@dataclass(frozen=True)
class ExpertLoads:
    """The experts of one layer. shares: of each expert's choices relative to an even share, which is 1."""

    layer: str
    shares: list[float]
    bars: list[tuple[float, float, float, float]]  # x, y, width, height
    picture_width: float
    even_share_y: float
    entropy: str
    dropped: str


def expert_cards(report: Report) -> list[tuple[str, list[ExpertLoads]]]:
    """(design, its layers) of every design with mixtures of experts, averaged over its finished seeds."""
    cards = []
    for design in report["designs"]:
        summaries = [run["experts"] for run in finished_runs(design["runs"]) if run.get("experts")]
        if summaries:
            average = average_router_summaries([_sorted_by_load(summary) for summary in summaries])
            shares = {path: [load * len(layer["load"]) for load in layer["load"]] for path, layer in average.items()}
            highest = max(2.0, *(share for of_layer in shares.values() for share in of_layer))
            cards.append(
                (design["name"], [_expert_loads(path, average[path], shares[path], highest) for path in average])
            )
    return cards


def _sorted_by_load(summary: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
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
