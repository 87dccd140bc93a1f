"""Length extrapolation of designs: changes are paired by seed, and missing numbers are counted."""

import math
from typing import Any

import pytest

from heddle.lab.compare.statistics import TEXT_SPANS, seed_half_width
from heddle.training.evaluation.length_extrapolation import ExtrapolationResult
from tests.analysis.comparison.plain import length_changes, length_result, paired_difference


def runs(values: dict[int, list[list[float]]], size: int = 1000) -> list[dict[str, Any]]:
    """Finished runs from bits per byte of each span, by multiple and seed."""
    finished = []
    for seed in range(len(values[1])):
        results = [
            length_result(ExtrapolationResult(multiple, [(value * size, size) for value in every[seed]], None))
            for multiple, every in values.items()
        ]
        finished.append({"seed": seed, "status": "done", "bits_per_byte": 2.0, "extrapolation": results})
    return finished


def test_changes_are_paired_by_seed() -> None:
    paired = runs({1: [[2.0] * 2, [3.0] * 2, [2.5] * 2], 2: [[2.1] * 2, [3.12] * 2, [2.61] * 2]})
    first, second = length_changes(paired, [1, 2])
    assert first == {"multiple": 1, "bits_per_byte": 2.5, "change": None, "not_finite": 0, "refusal": None}
    assert second["bits_per_byte"] == pytest.approx(2.61)
    half = seed_half_width([0.1, 0.12, 0.11])
    assert second["change"]["mean"] == pytest.approx(0.11)
    assert second["change"]["high"] == pytest.approx(0.11 + half)
    assert second["change"]["resolved"]
    assert "on this text only" in second["change"]["method"]
    # planted bug: seeds that are not paired hide the change
    shuffled = [
        {**run, "extrapolation": [run["extrapolation"][0], paired[(index + 1) % 3]["extrapolation"][1]]}
        for index, run in enumerate(paired)
    ]
    assert not length_changes(shuffled, [1, 2])[1]["change"]["resolved"]


def test_four_spans_give_a_text_part() -> None:
    spread = [[2.0 + 0.01 * (span + seed) for span in range(5)] for seed in range(2)]
    level = [[2.0] * 5, [2.0] * 5]
    change = length_changes(runs({1: level, 2: spread}), [1, 2])[1]["change"]
    seeds = seed_half_width([0.02, 0.03])
    assert change["high"] - change["mean"] > seeds * 1.001
    assert "a bootstrap over spans of text" in change["method"]
    one_seed = length_changes(runs({1: level[:1], 2: spread[:1]}), [1, 2])[1]["change"]
    assert one_seed["pairs"] == 1
    assert "not seed variance" in one_seed["method"]
    # of five apart values: t(4) · s / √5, which a bootstrap of single ones must come near to
    assert one_seed["high"] - one_seed["mean"] == pytest.approx(2.776 * 0.0158 / math.sqrt(5), rel=0.1)


def test_spans_are_not_treated_as_neighbors() -> None:
    left, right = runs({1: [[2.0, 2.4] * 3]})[0], runs({1: [[2.0] * 6]})[0]
    one_side, other_side = ([{**run["extrapolation"][0], "seed": 0}] for run in (left, right))
    spans = paired_difference(one_side, other_side, TEXT_SPANS)
    windows = paired_difference(one_side, other_side)
    assert spans["high"] - spans["mean"] > 2 * (windows["high"] - windows["mean"])


def test_what_is_missing_is_counted_and_left_out() -> None:
    nan = math.nan
    measured = runs({1: [[2.0], [2.2]], 2: [[2.1], [nan]], 4: [[math.inf], [nan]]})
    measured.append({"seed": 2, "status": "diverged", "bits_per_byte": None, "extrapolation": []})
    _, two, four = length_changes(measured, [1, 2, 4])
    assert (two["bits_per_byte"], two["not_finite"], two["change"]["pairs"]) == (2.1, 1, 1)
    assert two["change"]["mean"] == pytest.approx(0.1)
    assert "has no result: seed 1" in two["change"]["method"]
    assert (four["bits_per_byte"], four["not_finite"], four["change"]["mean"]) == (None, 2, None)
    refused = [
        {**run, "extrapolation": [*run["extrapolation"][:1], length_result(ExtrapolationResult(2, [], "why"))]}
        for run in measured[:2]
    ]
    row = length_changes(refused, [1, 2])[1]
    assert (row["bits_per_byte"], row["change"]["mean"], row["not_finite"], row["refusal"]) == (None, None, 0, "why")
