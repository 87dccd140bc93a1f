"""What each varied field does to bits per byte: means over all else, paired differences, and what two do together.

A value's difference is its designs' minus those with the baseline's value, each beside the one that is equal in every
other field and on the same seed; per seed it is averaged over these pairs, so the interval is of the luck of training
and of the text, for just these other fields. Of two fields, what both together do beyond each alone is

    (y[a, b] − y[a₀, b]) − (y[a, b₀] − y[a₀, b₀])       with a₀, b₀ the baseline's values
"""

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from heddle.analysis.comparison import wording
from heddle.analysis.comparison.statistics import Run, finished, paired_difference
from heddle.analysis.comparison.variation import titles

Choice = dict[str, str]  # the value of each varied field


def effects(designs: Sequence[wording.Design], baseline: str) -> dict[str, Any]:
    """{"fields", "interactions"} of the designs' `varied` and `runs`, plain data; both empty where nothing varied.

    A field: path, title, the baseline's value, and of each value its label, the number it is or None, its designs,
    their mean bits per byte, and the paired difference (None for the baseline's). An interaction: two fields and a
    cell for every pair of values, with the mean and, away from the baseline's values, the difference `beyond`.
    """
    paths = list(dict.fromkeys(path for design in designs for path in design["varied"]))
    named = titles(paths)
    base = next(design["varied"] for design in designs if design["name"] == baseline)
    values = {path: list(dict.fromkeys(design["varied"][path] for design in designs)) for path in paths}
    fields = [
        {
            "path": path,
            "title": named[path],
            "baseline": base[path],
            "values": [_value(designs, path, label, base[path]) for label in values[path]],
        }
        for path in paths
        if len(values[path]) > 1
    ]
    interactions = [
        {
            "paths": list(pair),
            "titles": [named[path] for path in pair],
            "cells": [
                _cell(designs, dict(zip(pair, labels, strict=True)), base)
                for labels in product(*(values[path] for path in pair))
            ],
        }
        for pair in combinations([field["path"] for field in fields], 2)
    ]
    return {"fields": fields, "interactions": interactions}


def number(label: str) -> float | None:
    """The finite number that a label is, or None."""
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value(designs: Sequence[wording.Design], path: str, label: str, base: str) -> dict[str, Any]:
    mine = _those(designs, {path: label})
    told = {"label": label, "number": number(label), "designs": [design["name"] for design in mine]}
    return told | {"mean": _mean(mine), "difference": _contrast([mine], [_those(designs, {path: base})], label == base)}


def _cell(designs: Sequence[wording.Design], chosen: Choice, base: Choice) -> dict[str, Any]:
    (first, mine), (second, other) = chosen.items()
    both, neither = _those(designs, chosen), _those(designs, {first: base[first], second: base[second]})
    alone = [_those(designs, {first: mine, second: base[second]}), _those(designs, {first: base[first], second: other})]
    trivial = mine == base[first] or other == base[second]
    return {"values": [mine, other], "mean": _mean(both), "beyond": _contrast([both, neither], alone, trivial)}


def _those(designs: Sequence[wording.Design], chosen: Choice) -> list[wording.Design]:
    """The designs with these values, always in the same order of the other fields."""
    return [design for design in designs if chosen.items() <= design["varied"].items()]


def _mean(designs: Sequence[wording.Design]) -> float | None:
    means = [mean for mean in map(wording.mean_of, designs) if mean is not None]
    return float(np.mean(means)) if means else None


def _contrast(
    plus: Sequence[Sequence[wording.Design]], minus: Sequence[Sequence[wording.Design]], trivial: bool
) -> dict[str, Any] | None:
    """The paired difference of two sums of groups, averaged over the other fields; None where it is 0 by definition."""
    if trivial:
        return None
    groups = [[{run["seed"]: run for run in finished(one["runs"])} for one in group] for group in (*plus, *minus)]
    seeds = sorted({run["seed"] for group in (*plus, *minus) for one in group for run in one["runs"]})
    sides: tuple[list[Run], list[Run]] = ([], [])
    lost = 0
    for seed in seeds:
        known = [place for place, row in enumerate(zip(*groups, strict=True)) if all(seed in runs for runs in row)]
        lost += len(groups[0]) - len(known)
        if known:
            averages = [_average([group[place][seed] for place in known]) for group in groups]
            sides[0].append(_sum(seed, averages[: len(plus)]))
            sides[1].append(_sum(seed, averages[len(plus) :]))
    made = paired_difference(*sides)
    count = len(groups[0])
    over = f" Averaged over {count} choices of the other fields." if count > 1 else ""
    left = (
        f" Left out, because a design of theirs did not finish: {lost} of {count * len(seeds)} pairs." if lost else ""
    )
    return made | {"method": made["method"] + over + left}


def _average(runs: Sequence[Run]) -> tuple[float, Any]:
    """Bits per byte and the table of validation windows, averaged over runs of one seed; None without tables."""
    tables = [run["windows"] for run in runs]
    table = np.mean(np.asarray(tables, dtype=np.float64), axis=0) if all(tables) else None
    return float(np.mean([run["bits_per_byte"] for run in runs])), table


def _sum(seed: int, parts: Sequence[tuple[float, Any]]) -> Run:
    """Averages added up as if they were one run; the bytes of the windows are those of each."""
    tables = [table for _, table in parts]
    windows: list[Any] = []
    if all(table is not None for table in tables):
        windows = np.stack([sum(table[:, 0] for table in tables), tables[0][:, 1]], axis=1).tolist()
    return {"seed": seed, "status": "done", "bits_per_byte": sum(bits for bits, _ in parts), "windows": windows}
