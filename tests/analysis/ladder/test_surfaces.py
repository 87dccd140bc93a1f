"""L(N, D): the least-squares oracle, known truths, coverage by simulation, the best size for a budget, a self-test."""

import math
from functools import cache

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize_scalar

from heddle.errors import DataError
from heddle.lab.ladder.fit import SUM_OF_POWER_LAWS, SizeLosses, fit_surfaces, point_precision, surface_loss
from heddle.lab.ladder.predictions import FLOPS_FACTOR, LadderPoints, _without_largest, best_sizes
from tests.analysis.comparison.plain import best_size, best_size_sentence, cost_for_equal_loss, hold_out, predict_loss
from tests.analysis.ladder.ladders import SIZES, draw_surface, surface_truth
from tests.analysis.ladder.test_fit import ONE_SHAPE
from tests.laws.planting import Plant, calls, condition

LADDERS = 24  # of a simulation
TARGET, RATIO = 10 * max(SIZES), 40.0
BUDGET = FLOPS_FACTOR * TARGET * 20 * TARGET


def coverage(ladders: int = LADDERS) -> tuple[float, float, float]:
    """How often the intervals hold the true loss at the target, a new measurement, and the best size of a budget."""
    generator = np.random.default_rng(5)
    truth, best = surface_truth(TARGET, RATIO * TARGET), best_truth(BUDGET)
    curves, measurements, sizes = [], [], []
    for _ in range(ladders):
        points = draw_surface(generator)
        fit = points.fit()
        predicted = predict_loss(fit, points, "a", TARGET)
        new = truth * math.exp(points.seed_deviation * generator.standard_normal())
        curves.append(predicted["curve"][0] <= truth <= predicted["curve"][1])
        measurements.append(predicted["measurement"][0] <= new <= predicted["measurement"][1])
        result = best_size(fit, points, "a", BUDGET)
        sizes.append((result["low"] or 0) <= best <= (result["high"] or math.inf))
    return float(np.mean(curves)), float(np.mean(measurements)), float(np.mean(sizes))


@cache
def best_truth(flops: float) -> float:
    """The true best size, by search."""
    product = flops / FLOPS_FACTOR
    search = minimize_scalar(lambda x: surface_truth(math.exp(x), product / math.exp(x)), bounds=(8, 24))
    return math.exp(search.x)


@pytest.mark.parametrize(("floor", "power"), [(0.0, 1.0), (1.0, 1.0), (0.0, 0.6), (0.0, 3.0)])
def test_the_solution_for_a_given_shape_is_that_of_scipy(floor: float, power: float) -> None:
    points = draw_surface(np.random.default_rng(3)).losses["a"]
    center, token_center = 4e5, 6e6
    solved = fit_surfaces(points, center, token_center, np.array([[floor, power]]), 0.5)
    x, y = np.log(np.array(points.sizes) / center), np.log(np.array(points.tokens) / token_center)
    root = np.linalg.cholesky(point_precision(points.sizes, np.ones(len(x)), 0.5)).T

    def whitened(coefficients: np.ndarray) -> np.ndarray:
        losses = surface_loss(np.array([floor, *coefficients, power]), x, y)
        return np.asarray(root @ (np.log(points.losses) - np.log(losses)))

    oracle = least_squares(whitened, [-1.0, -0.2, -1.0, -0.2], xtol=1e-15, gtol=1e-15, ftol=1e-15)
    assert solved.squares[0] == pytest.approx(2 * oracle.cost, rel=1e-6)
    np.testing.assert_allclose(solved.coefficients[0], oracle.x, atol=1e-3)
    np.testing.assert_allclose(solved.curvatures[0], oracle.jac.T @ oracle.jac, rtol=1e-2, atol=1e-2)


def test_runs_of_one_trunk_are_correlated() -> None:
    precision = point_precision([1.0, 1.0, 2.0], np.array([1.0, 0.5, 1.0]), 0.5)
    covariance = np.array([[1, 0.5 * math.sqrt(2), 0], [0.5 * math.sqrt(2), 2, 0], [0, 0, 1]])
    np.testing.assert_allclose(precision @ covariance, np.eye(3), atol=1e-12)


def test_points_on_a_surface_give_the_surface() -> None:
    points = draw_surface(np.random.default_rng(0), deviation=0.0)
    fit = points.fit()
    best = fit.forms[0]
    assert (best.form, best.degrees_of_freedom) == (SUM_OF_POWER_LAWS, len(points.losses["a"].sizes) - 5)
    assert best.weight > 0.99
    predicted = predict_loss(fit, points, "a", TARGET, 80 * TARGET)
    assert predicted["loss"] == pytest.approx(surface_truth(TARGET, 80 * TARGET), abs=2e-3)
    result = best_size(fit, points, "a", BUDGET)
    assert result["size"] == pytest.approx(best_truth(BUDGET), rel=0.02)
    assert result["loss"] == pytest.approx(surface_truth(result["size"], result["tokens"]), abs=2e-3)
    assert result["size"] * result["tokens"] * FLOPS_FACTOR == pytest.approx(BUDGET)


# of 24, at most 3 outside
@pytest.mark.parametrize(("ladders", "least"), [(LADDERS, 0.87), pytest.param(1000, 0.93, marks=pytest.mark.soak)])
def test_intervals_cover_the_truth(ladders: int, least: float) -> None:
    assert min(coverage(ladders)) >= least


@pytest.mark.parametrize(
    "plant",
    [calls(best_sizes, "log", lambda np, slopes: -np.log(slopes), nth=1), ONE_SHAPE],
    ids=["the slopes inverted", "one E, as if it were known"],
)
def test_planted_formulas_do_not_cover(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert min(coverage(8)) < 0.87


def test_the_best_size_of_each_draw_is_that_of_a_search() -> None:
    points = draw_surface(np.random.default_rng(2))
    fit = points.fit()
    product = BUDGET / FLOPS_FACTOR
    grid = np.geomspace(1e5, 1e9, 4001)
    for index in (0, len(fit.draws["a"]) - 1):
        losses = fit.loss_of(fit.draws["a"][index], grid, product / grid)
        assert best_sizes(fit, "a", BUDGET)[index] == pytest.approx(grid[losses.argmin()], rel=0.01)


def test_a_best_size_outside_of_what_was_trained_has_no_number() -> None:
    points = draw_surface(np.random.default_rng(2), ratios=(100.0, 200.0, 400.0))
    fit = points.fit()
    few = best_size(fit, points, "a", BUDGET)
    assert (few["size"], few["is_less"], few["high"]) == (None, False, None)
    few["low"] = few["least"]  # draws may leave both ends open
    assert "but the tokens per parameter there are outside the trained range" in best_size_sentence(
        {"design": "a", **few}
    )
    unknown = few | {"low": None, "high": None}
    assert " is not resolved: it may be below " in best_size_sentence({"design": "a", **unknown})
    far = best_size(fit, points, "a", FLOPS_FACTOR * (1e3 * max(SIZES)) ** 2)
    assert far["reason"].startswith("needs more than 30 times the largest size or the most tokens of a")
    assert best_size_sentence({"design": "a", **far}).endswith("train larger sizes.")
    assert "predicted, so train on more tokens" in predict_loss(fit, points, "a", TARGET, 1e13)["reason"]


def test_the_largest_size_and_most_tokens_are_predicted_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    points = draw_surface(np.random.default_rng(4))
    [test] = hold_out(points)
    assert (test["size"], test["measured"], test["within"]) == (max(SIZES), points.losses["a"].losses[-1], True)
    honest = test["loss"]
    is_held_out = [
        size == max(SIZES) or tokens > 30 * size
        for size, tokens in zip(points.losses["a"].sizes, points.losses["a"].tokens, strict=True)
    ]
    for index in map(int, np.flatnonzero(is_held_out)):
        points.losses["a"].losses[index] *= 1.1  # type: ignore[index]
    [test] = hold_out(points)
    assert (test["loss"], test["within"]) == (honest, False)
    condition(_without_largest, "most", False)(monkeypatch)
    assert hold_out(points)[0]["loss"] != honest


def test_designs_are_compared_at_their_tokens_per_parameter() -> None:
    points = draw_surface(np.random.default_rng(4), names=("a", "b"))
    equal = cost_for_equal_loss(points.fit(), points, "b", "a", TARGET)
    assert equal is not None
    assert equal["low"] < 1 < equal["high"]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(DataError, match=r"^a: L\(N, D\)"):
        draw_surface(np.random.default_rng(4), ratios=(5.0, 10.0)).fit()
    points = draw_surface(np.random.default_rng(4)).losses["a"]
    first = slice(8)  # two sizes
    few = SizeLosses(points.sizes[first], points.losses[first], points.seeds[first], points.tokens[first])
    with pytest.raises(DataError, match=r"^a: L\(N, D\)"):
        LadderPoints({"a": few}, {}, 0.0).fit()
