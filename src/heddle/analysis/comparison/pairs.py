"""The pairs of designs in a report: differences with simultaneous intervals, and what the unresolved ones need."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heddle.analysis.comparison.power import need_for, round_widths_below, smallest_resolvable
from heddle.analysis.comparison.sequential import anytime_level
from heddle.analysis.comparison.simultaneous import Level, PairStatistics, fixed_level, pair_statistics
from heddle.analysis.comparison.statistics import (
    VALIDATION_WINDOWS,
    Run,
    describe_method,
    describe_unpaired,
    run_seconds,
)

NO_PAIR = "No seed was finished by both designs, so there is no difference to give."


@dataclass(frozen=True)
class Judging:
    """How a report judges its pairs.

    is_anytime: whether the number of seeds followed from results, so that intervals hold at every number of seeds.
    is_final: whether the planned runs are all there; before, a fixed comparison resolves nothing. half_width: what the
    user asked for. workers: runs that take place at the same time.
    """

    is_anytime: bool = False
    is_final: bool = True
    half_width: float | None = None
    workers: int = 1

    @property
    def level(self) -> Level:
        """The nominal level at a number of seeds."""
        return anytime_level if self.is_anytime else fixed_level


def pair_report(runs: Mapping[str, Sequence[Run]], baseline: str, judging: Judging | None = None) -> dict[str, Any]:
    """{"leader": name or None, "pairs": a row for each pair, "differences": those to the baseline}, from the runs.

    A row has mean, low, high (95 % for all pairs at once), resolved, pairs (seeds that both sides finished), method,
    and in `final` whether it may be judged. Where it is not resolved, also `tie_within`, the largest difference that
    its interval allows, `resolvable`, the smallest that had been resolved with probability 0.8, and `needs` of narrower
    intervals: half_width, seeds, seconds and text_factor. Pairs are in the order of the designs' losses.
    """
    judging = judging or Judging()
    statistics = pair_statistics(runs)
    effects = statistics.effects
    order = sorted(range(len(effects)), key=lambda design: (math.isnan(effects[design]), effects[design], design))
    names = statistics.names

    def row(design: int, reference: int) -> dict[str, Any]:
        return _pair_row(statistics, design, reference, runs, judging)

    reference = names.index(baseline)
    return {
        "leader": None if statistics.leader is None else names[statistics.leader],
        "pairs": [
            {"design": names[design], "reference": names[other], **row(design, other)}
            for position, design in enumerate(order)
            for other in order[position + 1 :]
        ],
        "differences": [
            {"design": name, "baseline": baseline, **row(design, reference)}
            for design, name in enumerate(names)
            if design != reference
        ],
    }


def _pair_row(
    statistics: PairStatistics, design: int, reference: int, runs: Mapping[str, Sequence[Run]], judging: Judging
) -> dict[str, Any]:
    seeds = int(statistics.seeds[design, reference])
    if not seeds:
        empty = {"mean": None, "low": None, "high": None, "resolved": False, "pairs": 0, "final": judging.is_final}
        return empty | {"method": NO_PAIR}
    mean = float(statistics.mean[design, reference])
    half = statistics.half_width(design, reference, judging.level)
    has_interval = not math.isnan(half)
    resolved = has_interval and half < abs(mean) and judging.is_final
    row = {
        "mean": mean,
        "low": mean - half if has_interval else None,
        "high": mean + half if has_interval else None,
        "resolved": resolved,
        "pairs": seeds,
        "final": judging.is_final,
        "method": _method(statistics, design, reference, runs, judging),
    }
    if resolved or not has_interval:
        return row
    seconds = [_mean_seconds(runs[statistics.names[index]]) for index in (design, reference)]
    return row | {
        "tie_within": abs(mean) + half,
        "resolvable": smallest_resolvable(statistics, design, reference, judging.level),
        "needs": _needs(statistics, design, reference, half, judging, sum(seconds) / judging.workers),
    }


def _needs(
    statistics: PairStatistics, design: int, reference: int, half: float, judging: Judging, seconds: float
) -> list[dict[str, Any]]:
    """The needs of narrower intervals, of a comparison that grows in place. seconds: of one run of both designs."""
    widths = round_widths_below(half)
    if judging.half_width is not None and judging.half_width < half:
        widths = sorted({*widths, judging.half_width}, reverse=True)
    rows = []
    for width in widths:
        need = need_for(statistics, design, reference, width, anytime_level)
        if need is not None:
            more = None if need.seeds is None else max(0, need.seeds - int(statistics.seeds[design, reference]))
            rows.append(need._asdict() | {"seconds": None if more is None else more * seconds})
    return rows


def _mean_seconds(runs: Sequence[Run]) -> float:
    """The mean time of a design's runs."""
    return sum(map(run_seconds, runs)) / len(runs) if runs else 0.0


def _method(
    statistics: PairStatistics, design: int, reference: int, runs: Mapping[str, Sequence[Run]], judging: Judging
) -> str:
    """How the interval was computed, as sentences."""
    names, seeds = statistics.names, int(statistics.seeds[design, reference])
    has_text = not math.isnan(statistics.text_error[design, reference])
    method = describe_method(seeds, has_text, VALIDATION_WINDOWS, len(names))
    if judging.is_anytime and seeds > 1:
        method += " It holds at whatever number of seeds the comparison stops."
    sides = [{run["seed"] for run in runs[names[index]]} for index in (design, reference)]
    finished = {
        run["seed"]
        for run in runs[names[design]]
        for other in runs[names[reference]]
        if run["seed"] == other["seed"] and _has_number(run) and _has_number(other)
    }
    # seeds that only one side was given are no failure
    return method + describe_unpaired(sorted((sides[0] & sides[1]) - finished))


def _has_number(run: Run) -> bool:
    return run["status"] == "done" and run["bits_per_byte"] is not None and math.isfinite(run["bits_per_byte"])
