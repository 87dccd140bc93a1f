"""What curves predict: no number too far out, the cost of equal loss with open ends, crossings, and the self-test."""

import math

import numpy as np
import pytest

from heddle.lab.ladder.fit import MAX_EXTRAPOLATION, LadderFit, fit_ladder
from heddle.lab.ladder.predictions import LadderPoints
from tests.analysis.comparison.plain import (
    cost_for_equal_loss,
    crossing,
    crossing_sentence,
    equal_loss_sentence,
    hold_out,
    predict_loss,
)
from tests.analysis.ladder.ladders import SIZES, Law, draw_points, training_cost
from tests.laws.planting import assigned

TARGET = 10 * max(SIZES)


def fitted(deviation: float = 0.002, **laws: Law) -> tuple[LadderFit, LadderPoints]:
    points = draw_points(np.random.default_rng(8), laws, deviation=deviation)
    return fit_ladder(points.losses, points.seed_deviation), points


def test_beyond_thirty_times_the_largest_there_is_no_number() -> None:
    fit, points = fitted(a=Law(1.2, 1.0, 0.3))
    assert predict_loss(fit, points, "a", MAX_EXTRAPOLATION * max(SIZES))["loss"] is not None
    beyond = predict_loss(fit, points, "a", 31 * max(SIZES))
    assert (beyond["loss"], beyond["curve"], beyond["measurement"], beyond["forms"]) == (None, None, None, [])
    assert beyond["reason"] == (
        "is 31 times the largest finished size of a; beyond 30 times nothing is predicted, so train larger sizes"
    )
    assert cost_for_equal_loss(fit, points, "a", "a", 31 * max(SIZES)) is None


def test_a_measurement_is_less_certain_than_the_curve() -> None:
    fit, points = fitted(a=Law(1.2, 1.0, 0.3))
    for size in (max(SIZES), TARGET):
        predicted = predict_loss(fit, points, "a", size)
        (low, high), (measured_low, measured_high) = predicted["curve"], predicted["measurement"]
        assert measured_low < low < predicted["loss"] < high < measured_high
    near, far = (predict_loss(fit, points, "a", factor * max(SIZES))["curve"] for factor in (2, 20))
    assert far[1] - far[0] > 2 * (near[1] - near[0])


def test_equal_laws_cost_the_same_and_better_ones_less() -> None:
    fit, points = fitted(a=Law(1.2, 1.0, 0.3), b=Law(1.2, 1.0, 0.3), c=Law(1.2, 0.9, 0.3))
    equal = cost_for_equal_loss(fit, points, "b", "a", TARGET)
    assert equal is not None
    assert equal["low"] < 1 < equal["high"]
    assert "which of the two is cheaper is not resolved" in equal_loss_sentence(equal)
    less = cost_for_equal_loss(fit, points, "c", "a", TARGET)
    assert less is not None
    truth = training_cost(0.9 ** (1 / 0.3)) / training_cost(1.0)
    assert less["low"] < truth < less["high"] < 1
    assert equal_loss_sentence(less).startswith(
        f"For the loss of a at 16.0 M parameters c needs {less['ratio']:.2f} × the FLOPs ("
    )
    same = cost_for_equal_loss(fit, points, "a", "a", TARGET)
    assert same is not None
    assert same["ratio"] == pytest.approx(1, rel=1e-3)


def test_an_interval_without_an_end_says_so() -> None:
    fit, points = fitted(a=Law(1.2, 1.0, 0.3), worse=Law(1.2, 2.0, 0.2), best=Law(1.2, 0.2, 0.4))
    never = cost_for_equal_loss(fit, points, "worse", "a", TARGET)
    assert never is not None
    assert (never["ratio"], never["high"]) == (None, None)
    assert "may not reach the loss of a at 16.0 M parameters at all" in equal_loss_sentence(never)
    already = cost_for_equal_loss(fit, points, "best", "a", min(SIZES))
    assert already is not None
    assert (already["is_less"], already["low"]) == (True, None)
    assert "already at its smallest size" in equal_loss_sentence(already)


def test_a_crossing_is_where_the_curves_cross() -> None:
    laws = {"a": Law(1.2, 1.0, 0.25), "b": Law(1.2, 1.0, 0.35)}
    covered = []
    for seed in range(20):
        points = draw_points(np.random.default_rng(seed), laws, deviation=0.001)
        result = crossing(fit_ladder(points.losses, points.seed_deviation), points, "b", "a")
        assert result["crosses"] > 0.975
        assert result["low"] < result["cost"] < result["high"] < 1.3 * result["low"]
        covered.append(result["low"] < training_cost(1e6) < result["high"])
        assert crossing_sentence(result).startswith("The curves of b and a cross at ")
    assert sum(covered) >= 17


def test_parallel_curves_do_not_cross() -> None:
    fit, points = fitted(0.001, a=Law(1.2, 1.0, 0.3), b=Law(1.2, 0.8, 0.3))
    result = crossing(fit, points, "b", "a")
    assert (result["better"], result["crosses"]) == (1.0, 0.0)
    assert (result["cost"], result["low"], result["high"]) == (None, None, None)
    assert crossing_sentence(result).endswith("training FLOPs: no crossing.")
    assert crossing(fit, points, "a", "b")["worse"] == 1.0


def test_a_crossing_that_may_be_anywhere_has_no_ends() -> None:
    fit, points = fitted(0.006, a=Law(1.2, 1.0, 0.3), b=Law(1.2, 1.0, 0.3))
    result = crossing(fit, points, "b", "a")
    assert result["better"] + result["worse"] + result["crosses"] == pytest.approx(1)
    assert (result["low"], result["high"]) == (None, None)
    assert "is not resolved: of the possible curves" in crossing_sentence(result)


def test_the_largest_size_is_predicted_from_the_others() -> None:
    _, points = fitted(a=Law(1.2, 1.0, 0.3), b=Law(1.2, 0.9, 0.3))
    tests = hold_out(points)
    assert [(test["design"], test["size"], test["within"]) for test in tests] == [
        ("a", max(SIZES), True),
        ("b", max(SIZES), True),
    ]
    assert [test["measured"] for test in tests] == [points.losses[name].losses[-1] for name in "ab"]
    points.losses["a"].losses[-1] *= 1.1  # type: ignore[index]
    assert [test["within"] for test in hold_out(points)] == [False, True]


def test_a_self_test_that_sees_the_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, points = fitted(a=Law(1.2, 1.0, 0.3))
    honest = hold_out(points)[0]["loss"]
    points.losses["a"].losses[-1] *= 1.02  # type: ignore[index]
    assert hold_out(points)[0]["loss"] == honest
    assigned(hold_out, "rest", lambda rest, *, points: points)(monkeypatch)
    assert hold_out(points)[0]["loss"] != honest


def test_too_few_sizes_give_no_self_test() -> None:
    points = draw_points(np.random.default_rng(0), sizes=SIZES[:3])
    assert hold_out(points) == []


def test_costs_are_interpolated_both_ways() -> None:
    _, points = fitted(a=Law(1.2, 1.0, 0.3))
    for size in (1.3e5, 1e6, points.limit("a") * 1.01):
        assert float(points.cost("a", size)) == pytest.approx(training_cost(size))
        assert float(points.size_of_cost("a", training_cost(size))) == pytest.approx(size)
    assert math.isfinite(points.limit("a"))
