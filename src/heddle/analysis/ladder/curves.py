"""Least squares of one design's curve L(N) = E + exp(a + b·x + c·x²) in log L, for many pairs (E, c) at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heddle.analysis.ladder.least_squares import Array, CurveFits, NormalEquations, damped_least_squares

LEAST_SHARE = 0.02  # of the loss: what E leaves of it at least, where the search begins


@dataclass(frozen=True)
class SizeLosses:
    """The points of one design: parameters, mean loss over the seeds, and the number of seeds, each [points].

    tokens: of the training, [points]; empty where every size has its own number of tokens, and L is a curve of N.
    """

    sizes: Sequence[float]
    losses: Sequence[float]
    seeds: Sequence[int]
    tokens: Sequence[float] = ()


def curve_loss(coefficients: Array, x: Array | float) -> Array:
    """L = E + exp(a + b·x + c·x²) for coefficients (E, a, b, c) [..., 4]."""
    floor, a, b, c = np.moveaxis(coefficients, -1, 0)
    return np.asarray(floor + np.exp(np.clip(a + b * x + c * x**2, -500, 50)))


def fit_curves(points: SizeLosses, center: float, shapes: Array) -> CurveFits:
    """The a and b that minimize Σ w·(log L − log(E + exp(a + b·x + c·x²)))² for each (E, c) of `shapes` [shapes, 2].

    x = log(N / center); w: seeds of the point, relative to those of a point with the most. Nobody chooses where to
    start.
    """
    x, losses, weights = point_arrays(points, center)
    floors, bends = shapes[:, :1], shapes[:, 1:] * x**2  # [shapes, 1], [shapes, points]
    powers = np.stack([np.ones_like(x), x], axis=1)  # [points, 2]

    def equations(coefficients: Array) -> NormalEquations:
        above = np.exp(np.clip(coefficients @ powers.T + bends, -500, 50))
        errors, slopes = np.log(losses) - np.log(floors + above), above / (floors + above)
        return NormalEquations(
            squares=(weights * errors**2).sum(1),
            gradient=(weights * slopes * errors) @ powers,
            matrix=np.asarray((powers.T * (weights * slopes**2)[:, None, :]) @ powers),
        )

    start = np.log(np.maximum(losses - floors, LEAST_SHARE * losses)) - bends
    return damped_least_squares(equations, (start * weights) @ powers @ np.linalg.inv(powers.T * weights @ powers))


def point_arrays(points: SizeLosses, center: float) -> tuple[Array, Array, Array]:
    """x = log(N / center), the losses, and the weights of a design's points, each [points]."""
    x = np.log(np.asarray(points.sizes, dtype=np.float64) / center)
    weights = np.asarray(points.seeds, dtype=np.float64) / max(points.seeds)
    return x, np.asarray(points.losses, dtype=np.float64), weights


def shared_curvature(points: Sequence[SizeLosses], center: float) -> tuple[float, float, float]:
    """The c of log L = a + b·x + c·x² with own a and b for each design: its estimate, sum of squares, and 1 / Σ x².

    The last is that of x², cleared of what a and b explain; times a point's variance it is the variance of c.
    """
    total, cross, squares = 0.0, 0.0, 0.0
    for each in points:
        x, losses, weights = point_arrays(each, center)
        powers = np.stack([np.ones_like(x), x], axis=1)
        projection = powers @ np.linalg.inv(powers.T * weights @ powers) @ (powers.T * weights)
        bend, rest = (values - projection @ values for values in (x**2, np.log(losses)))
        total += float(weights @ bend**2)
        cross += float(weights @ (bend * rest))
        squares += float(weights @ rest**2)
    return cross / total, squares - cross**2 / total, 1 / total
