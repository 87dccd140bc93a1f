"""The fit of a ladder: the least-squares oracle, known truths, coverage by simulation, and planted wrong formulas."""

import math

import numpy as np
import pytest
from scipy.optimize import least_squares

from heddle.errors import DataError
from heddle.lab.ladder.fit import (
    DRAWS,
    LOG_QUADRATIC,
    PLAIN_POWER_LAW,
    POWER_LAW,
    FormFits,
    SizeLosses,
    curve_loss,
    fit_curves,
    fit_ladder,
    point_arrays,
    shared_curvature,
)
from tests.analysis.comparison.plain import cost_for_equal_loss, predict_loss
from tests.analysis.ladder.ladders import LAWS, SIZES, Law, draw_points, training_cost
from tests.laws.planting import Plant, calls, condition

LADDERS = 100  # of a simulation
TARGET = 10 * max(SIZES)


def coverage(misfit: float = 0.004, ladders: int = LADDERS) -> tuple[float, float]:
    """How often the intervals at the target hold the true loss, and a new measurement."""
    generator = np.random.default_rng(5)
    curves, measurements = [], []
    for _ in range(ladders):
        points = draw_points(generator, misfit=misfit)
        fit = fit_ladder(points.losses, points.seed_deviation)
        for name, law in LAWS.items():
            predicted = predict_loss(fit, points, name, TARGET)
            truth = law.loss(TARGET)
            new = truth * math.exp(math.hypot(misfit, points.seed_deviation) * generator.standard_normal())
            curves.append(predicted["curve"][0] <= truth <= predicted["curve"][1])
            measurements.append(predicted["measurement"][0] <= new <= predicted["measurement"][1])
    return float(np.mean(curves)), float(np.mean(measurements))


@pytest.mark.parametrize("floor", [0.0, 0.7, 1.6])
def test_the_solution_for_a_given_floor_is_that_of_scipy(floor: float) -> None:
    points = draw_points(np.random.default_rng(3)).losses["a"]
    center = 4e5
    solved = fit_curves(points, center, np.array([[floor, 0.02]]))
    x, logs = np.log(np.array(points.sizes) / center), np.log(points.losses)
    oracle = least_squares(
        lambda ab: logs - np.log(floor + np.exp(ab[0] + ab[1] * x + 0.02 * x**2)), [0.0, -0.2], xtol=1e-15, gtol=1e-15
    )
    np.testing.assert_allclose(solved.coefficients[0], oracle.x, atol=1e-6)
    np.testing.assert_allclose(solved.squares[0], 2 * oracle.cost, rtol=1e-8)
    np.testing.assert_allclose(solved.curvatures[0], oracle.jac.T @ oracle.jac, rtol=1e-5, atol=1e-6)


def test_the_shared_curvature_is_that_of_one_regression() -> None:
    points = draw_points(np.random.default_rng(4)).losses
    rows = []
    for index, each in enumerate(points.values()):
        x = np.log(np.array(each.sizes) / 4e5)
        columns = np.zeros((len(x), 5))
        columns[:, 2 * index], columns[:, 2 * index + 1], columns[:, 4] = 1, x, x**2
        rows.append((columns, np.log(each.losses)))
    table, logs = (np.concatenate(values) for values in zip(*rows, strict=True))
    oracle, squares, _, _ = np.linalg.lstsq(table, logs, rcond=None)
    bend, residual, variance = shared_curvature(list(points.values()), 4e5)
    assert bend == pytest.approx(oracle[4], rel=1e-8)
    assert residual == pytest.approx(squares[0], rel=1e-6)
    assert variance == pytest.approx(np.linalg.inv(table.T @ table)[4, 4], rel=1e-8)


def test_points_on_a_curve_give_the_curve() -> None:
    laws = {"a": Law(1.2, 1.0, 0.3), "b": Law(1.2, 0.8, 0.35)}
    points = draw_points(np.random.default_rng(0), laws, deviation=0.0)
    fit = fit_ladder(points.losses)
    best = fit.forms[0]
    assert best.form == POWER_LAW
    assert best.weight > 0.99
    assert best.degrees_of_freedom == 5
    for name, law in laws.items():
        floor, a, b, bend = best.coefficients[name]
        assert floor == pytest.approx(law.floor, abs=1e-3)
        assert b == pytest.approx(-law.exponent, abs=1e-3)
        assert bend == 0
        assert floor + math.exp(a) == pytest.approx(law.loss(fit.center), abs=1e-4)
        assert predict_loss(fit, points, name, TARGET)["loss"] == pytest.approx(law.loss(TARGET), abs=1e-3)


def test_all_draws_share_the_floor_and_are_aligned() -> None:
    points = draw_points(np.random.default_rng(1))
    fit = fit_ladder(points.losses, points.seed_deviation)
    a, b = fit.draws["a"], fit.draws["b"]
    assert a.shape == b.shape == (DRAWS, 4)
    assert np.array_equal(a[:, [0, 3]], b[:, [0, 3]])
    assert np.array_equal(fit.deviations["a"], fit.deviations["b"])
    assert sum(form.weight for form in fit.forms) == pytest.approx(1)
    assert {form.form for form in fit.forms} == {POWER_LAW, PLAIN_POWER_LAW, LOG_QUADRATIC}
    alone = fit_ladder(points.losses, points.seed_deviation, share_irreducible=False)
    assert not np.array_equal(alone.draws["a"][:, 0], alone.draws["b"][:, 0])


def steepening_losses() -> dict[str, SizeLosses]:
    """log L = 1 − 0.17 x − 0.03 x² around 7e4, of sizes to 4e5."""
    sizes = [1.5e4, 3.5e4, 7e4, 1.6e5, 3.7e5]
    logs = [1 - 0.17 * x - 0.03 * x**2 for x in (math.log(size / 7e4) for size in sizes)]
    return {"a": SizeLosses(sizes, [math.exp(log) for log in logs], [2] * 5)}


def straight_share() -> float:
    """Log of the predicted ratio of losses at 10 times the largest size and there, over that of the tangent there."""
    fit = fit_ladder(steepening_losses(), 0.001)
    there, beyond = (float(np.median(fit.losses("a", size))) for size in (3.7e5, 3.7e6))
    slope = -0.17 - 2 * 0.03 * math.log(3.7e5 / 7e4)
    return math.log(beyond / there) / (slope * math.log(10))


def test_a_curve_that_bends_down_goes_on_straight_beyond_the_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert straight_share() == pytest.approx(1, abs=0.02)
    calls(curve_loss, "maximum", lambda np, x, y: 0 * x)(monkeypatch)
    assert straight_share() > 1.2  # the planted bug: it bends on


def test_a_fit_is_deterministic() -> None:
    points = draw_points(np.random.default_rng(1))
    first, second = (fit_ladder(points.losses, points.seed_deviation) for _ in range(2))
    assert all(np.array_equal(first.draws[name], second.draws[name]) for name in first.draws)


def test_more_seeds_weigh_more() -> None:
    sizes, losses = list(SIZES), [LAWS["a"].loss(size) for size in SIZES]
    losses[2] *= 1.05
    light, heavy = (
        fit_ladder({"a": SizeLosses(sizes, losses, [3, 3, seeds, 3, 3])}).losses("a", SIZES[2]) for seeds in (1, 3)
    )
    assert np.median(light) < np.median(heavy)


@pytest.mark.parametrize(
    ("misfit", "ladders", "least", "most"),
    [(0.004, LADDERS, 0.92, 1), *(pytest.param(m, 2000, 0.93, 0.97, marks=pytest.mark.soak) for m in (0.0, 0.004))],
)
def test_intervals_cover_the_truth(misfit: float, ladders: int, least: float, most: float) -> None:
    assert all(least <= share <= most for share in coverage(misfit, ladders))


def test_the_cost_ratio_covers_the_truth() -> None:
    generator = np.random.default_rng(6)
    goal = LAWS["a"].loss(TARGET) - LAWS["b"].floor
    size = 1e6 * (LAWS["b"].factor / goal) ** (1 / LAWS["b"].exponent)
    truth = training_cost(size) / training_cost(TARGET)
    covered, widths = [], []
    for _ in range(80):
        points = draw_points(generator)
        fit = fit_ladder(points.losses, points.seed_deviation)
        equal = cost_for_equal_loss(fit, points, "b", "a", TARGET)
        assert equal is not None
        low, high = equal["low"] or 0.0, equal["high"] or math.inf
        covered.append(low <= truth <= high)
        widths.append(high / max(low, 1e-9))
    assert np.mean(covered) >= 0.9
    assert np.median(widths) < 3  # it says something too


# as if the likeliest shape were the only one
ONE_SHAPE = calls(
    FormFits.draw,
    "choice",
    lambda generator, count, size, p: generator.choice(count, size=size, p=(p == p.max()) / np.sum(p == p.max())),
)


@pytest.mark.parametrize(
    "plant",
    [
        calls(point_arrays, "log", lambda np, sizes: sizes),
        calls(FormFits.draw, "chisquare", lambda generator, degrees, draws, *, self: np.full(draws, self.points)),
        ONE_SHAPE,
    ],
    ids=["size instead of its logarithm", "points instead of degrees of freedom", "one E, as if it were known"],
)
def test_planted_formulas_do_not_cover(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert min(coverage()) < 0.92


def test_a_planted_floor_of_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    condition(fit_ladder, "share_irreducible", False)(monkeypatch)
    with pytest.raises(AssertionError):
        test_all_draws_share_the_floor_and_are_aligned()


def test_what_cannot_be_fitted_is_refused() -> None:
    losses = [LAWS["a"].loss(size) for size in SIZES]
    with pytest.raises(DataError, match=r"^a:.*2 sizes.*3"):
        fit_ladder({"a": SizeLosses(SIZES[:2], losses[:2], [1, 1])})
    with pytest.raises(DataError, match="does not fall with size"):
        fit_ladder({"a": SizeLosses(SIZES, losses[::-1], [1] * 5)})
