"""Effects of varied fields on bits per byte: means over the other fields, paired differences, and interactions.

The effect of a value is the difference between its designs and those with the baseline's value. Each design is paired
with the one that is equal in every other field, on the same seed. For each seed the pairs are averaged, so the interval
covers the luck of training and the choice of text, but no other choice of the other fields. The interaction of two
fields is what both changes together do beyond the sum of each alone:

    (y[a, b] − y[a₀, b]) − (y[a, b₀] − y[a₀, b₀])       where a₀, b₀ are the baseline's values

Of one varied field the differences are those of the designs. Of several, the rows of all fields and interactions hold
at once: Student's t at the level 1 − 0.95^(1/rows) (Šidák 1967), with a spread estimated as in `simultaneous`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from heddle.analysis.comparison.lookup import Design, mean_loss
from heddle.analysis.comparison.pairs import Judging, pair_report
from heddle.analysis.comparison.simultaneous import (
    ALPHA,
    PairStatistics,
    moderated_degrees,
    pair_statistics,
    pooling_weight,
)
from heddle.analysis.comparison.statistics import Run, finished_runs, paired_difference, t_quantile
from heddle.analysis.comparison.variation import short_titles

FieldLabels = dict[str, str]  # the value of each varied field, as its label


@dataclass(frozen=True)
class _Rows:
    """All rows of a report, judged at once. statistics: of the designs; differences: of one field, by design."""

    designs: Sequence[Design]
    base: FieldLabels
    judging: Judging
    statistics: PairStatistics
    count: int
    differences: dict[str, Any] | None

    def half_width(self, contrast: PairStatistics, parts: float) -> float | None:
        """Half of the interval of a contrast between sums of designs; None where there is none.

        contrast: of its two sides as if they were designs; parts: the sum of its squared weights.
        """
        seeds = int(contrast.seeds[0, 1])
        text = contrast.text_error[0, 1] * self._critical(ALPHA, contrast.text_degrees)
        if seeds < 2:
            return None if math.isnan(text) else float(text)
        weight = float(pooling_weight(seeds))
        own, designs = float(contrast.variance[0, 1]), len(self.statistics.names)
        variance = weight * own + (1 - weight) * parts * self.statistics.run_variance
        degrees = float(moderated_degrees(designs, seeds, self.statistics.pooled_degrees))
        seed = self._critical(self.judging.level(seeds), degrees) * math.sqrt(variance / seeds)
        return math.hypot(seed, 0.0 if math.isnan(text) else text)

    def _critical(self, alpha: float, degrees: float) -> float:
        return math.nan if math.isnan(degrees) else t_quantile((1 - alpha) ** (1 / self.count), degrees)


def field_effects(designs: Sequence[Design], baseline: str, judging: Judging | None = None) -> dict[str, Any]:
    """{"fields": [...], "interactions": [...]} from the designs' `varied_fields` and `runs`, as plain data.

    A field has its path, title, the baseline's value and its values. A value has its label, its number (or None), the
    names of its designs, their mean bits per byte, and the paired difference to the baseline's value (None for that
    one). An interaction has two fields and a cell for each pair of values, with its mean and the interaction (None
    where one of the values is the baseline's). Both lists are empty where nothing was varied.
    """
    paths = list(dict.fromkeys(path for design in designs for path in design["varied_fields"]))
    title_of = short_titles(paths)
    base = next(design["varied_fields"] for design in designs if design["name"] == baseline)
    labels_of = {path: list(dict.fromkeys(design["varied_fields"][path] for design in designs)) for path in paths}
    varied = [path for path in paths if len(labels_of[path]) > 1]
    if not varied:
        return {"fields": [], "interactions": []}
    rows = _all_rows(designs, baseline, {path: labels_of[path] for path in varied}, judging or Judging())
    fields = [
        {
            "path": path,
            "title": title_of[path],
            "baseline": base[path],
            "values": [_value_effect(rows, path, label) for label in labels_of[path]],
        }
        for path in varied
    ]
    interactions = [
        {
            "paths": list(pair),
            "titles": [title_of[path] for path in pair],
            "cells": [
                _interaction_cell(rows, dict(zip(pair, labels, strict=True)))
                for labels in product(*(labels_of[path] for path in pair))
            ],
        }
        for pair in combinations(varied, 2)
    ]
    return {"fields": fields, "interactions": interactions}


def _all_rows(designs: Sequence[Design], baseline: str, labels_of: dict[str, list[str]], judging: Judging) -> _Rows:
    changes = [len(labels) - 1 for labels in labels_of.values()]
    count = sum(changes) + sum(first * second for first, second in combinations(changes, 2))
    runs = {design["name"]: design["runs"] for design in designs}
    differences = None
    if len(changes) == 1:
        rows = pair_report(runs, baseline, judging)["differences"]
        differences = {
            row["design"]: {key: row[key] for key in row if key not in ("design", "baseline")} for row in rows
        }
    base = next(design["varied_fields"] for design in designs if design["name"] == baseline)
    return _Rows(designs, base, judging, pair_statistics(runs), count, differences)


def parse_number(label: str) -> float | None:
    """The finite number that a label spells, or None."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value_effect(rows: _Rows, path: str, label: str) -> dict[str, Any]:
    with_value = _with_labels(rows.designs, {path: label})
    reference = _with_labels(rows.designs, {path: rows.base[path]})
    difference = None
    if label != rows.base[path]:
        if rows.differences is not None and len(with_value) == 1:
            difference = rows.differences[with_value[0]["name"]]
        else:
            difference = _contrast(rows, [with_value], [reference])
    return {
        "label": label,
        "number": parse_number(label),
        "designs": [design["name"] for design in with_value],
        "mean": _mean(with_value),
        "difference": difference,
    }


def _interaction_cell(rows: _Rows, labels: FieldLabels) -> dict[str, Any]:
    (first, first_label), (second, second_label) = labels.items()
    designs, base = rows.designs, rows.base
    both = _with_labels(designs, labels)
    interaction = None
    if first_label != base[first] and second_label != base[second]:
        neither = _with_labels(designs, {first: base[first], second: base[second]})
        first_alone = _with_labels(designs, {first: first_label, second: base[second]})
        second_alone = _with_labels(designs, {first: base[first], second: second_label})
        interaction = _contrast(rows, [both, neither], [first_alone, second_alone])
    return {"values": [first_label, second_label], "mean": _mean(both), "interaction": interaction}


def _with_labels(designs: Sequence[Design], labels: FieldLabels) -> list[Design]:
    """The designs with these values; the other fields come in the same order for every choice of values."""
    return [design for design in designs if labels.items() <= design["varied_fields"].items()]


def _mean(designs: Sequence[Design]) -> float | None:
    means = [mean for mean in map(mean_loss, designs) if mean is not None]
    return float(np.mean(means)) if means else None


def _contrast(rows: _Rows, plus: Sequence[Sequence[Design]], minus: Sequence[Sequence[Design]]) -> dict[str, Any]:
    """The paired difference between two sums of groups of designs, averaged over the other fields.

    The designs at one index of all groups are equal in the other fields; without one of their runs the seed is left
    out for that index.
    """
    groups = [
        [{run["seed"]: run for run in finished_runs(design["runs"])} for design in group] for group in (*plus, *minus)
    ]
    seeds = sorted({run["seed"] for group in (*plus, *minus) for design in group for run in design["runs"]})
    plus_runs: list[Run] = []
    minus_runs: list[Run] = []
    count, missing = len(groups[0]), 0
    for seed in seeds:
        complete = [index for index, runs in enumerate(zip(*groups, strict=True)) if all(seed in run for run in runs)]
        missing += count - len(complete)
        if complete:
            averages = [_average([group[index][seed] for index in complete]) for group in groups]
            plus_runs.append(_sum_as_run(seed, averages[: len(plus)]))
            minus_runs.append(_sum_as_run(seed, averages[len(plus) :]))
    difference = paired_difference(plus_runs, minus_runs)
    method = difference["method"]
    if rows.count > 1:
        method += f" It holds for all {rows.count} rows of the varied fields at once."
    if difference["mean"] is not None:
        half = rows.half_width(
            pair_statistics({"plus": plus_runs, "minus": minus_runs}), (len(plus) + len(minus)) / count
        )
        mean = difference["mean"]
        difference |= {
            "low": None if half is None else mean - half,
            "high": None if half is None else mean + half,
            "resolved": half is not None and half < abs(mean) and rows.judging.is_final,
        }
    difference |= {"final": rows.judging.is_final}
    if count > 1:
        method += f" Averaged over {count} choices of the other fields."
    if missing:
        method += f" Left out, because a design did not finish: {missing} of {count * len(seeds)} pairs."
    return difference | {"method": method}


def _average(runs: Sequence[Run]) -> tuple[float, Any]:
    """Bits per byte and the table of validation windows, averaged over runs of one seed; None without tables."""
    tables = [run["windows"] for run in runs]
    table = np.mean(np.asarray(tables, dtype=np.float64), axis=0) if all(tables) else None
    return float(np.mean([run["bits_per_byte"] for run in runs])), table


def _sum_as_run(seed: int, averages: Sequence[tuple[float, Any]]) -> Run:
    """The sum of averages in the form of a run; each window keeps its bytes."""
    tables = [table for _, table in averages]
    windows: list[Any] = []
    if all(table is not None for table in tables):
        windows = np.stack([sum(table[:, 0] for table in tables), tables[0][:, 1]], axis=1).tolist()
    return {"seed": seed, "status": "done", "bits_per_byte": sum(bits for bits, _ in averages), "windows": windows}
