"""Least squares of one design's curve L(N) = E + exp(a + b·x + c·x²) in log L, for many pairs (E, c) at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_STEPS = 60
STEP_TOLERANCE = 1e-9  # of a and b: smaller steps end the search
LEAST_SHARE = 0.02  # of the loss: what E leaves of it at least, where the search begins
FIRST_DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-6, 1e-12, 1e9


@dataclass(frozen=True)
class SizeLosses:
    """The points of one design: parameters, mean loss over the seeds, and the number of seeds, each [sizes]."""

    sizes: Sequence[float]
    losses: Sequence[float]
    seeds: Sequence[int]


@dataclass(frozen=True)
class CurveFits:
    """The best curve of a design for each shape (E, c).

    coefficients: [shapes, 2], a and b. squares: [shapes], the weighted sum of squared residuals of log L.
    curvatures: [shapes, 2, 2], JᵀWJ; its inverse times a point's variance is the covariance of a and b.
    """

    coefficients: Array
    squares: Array
    curvatures: Array


def curve_loss(coefficients: Array, x: Array | float) -> Array:
    """L = E + exp(a + b·x + c·x²) for coefficients (E, a, b, c) [..., 4]."""
    floor, a, b, c = np.moveaxis(coefficients, -1, 0)
    return np.asarray(floor + np.exp(np.clip(a + b * x + c * x**2, -500, 50)))


def fit_curves(points: SizeLosses, center: float, shapes: Array) -> CurveFits:
    """The a and b that minimize Σ w·(log L − log(E + exp(a + b·x + c·x²)))² for each (E, c) of `shapes` [shapes, 2].

    x = log(N / center); w: seeds of the point, relative to those of a point with the most. Levenberg and Marquardt's
    damping: no step raises the sum of squares, and nobody chooses where to start.
    """
    x, losses, weights = point_arrays(points, center)
    floors, bends = shapes[:, :1], shapes[:, 1:] * x**2  # [shapes, 1], [shapes, points]
    powers = np.stack([np.ones_like(x), x], axis=1)  # [points, 2]

    def residuals(coefficients: Array) -> tuple[Array, Array]:
        """Of log L [shapes, points], and the derivative of log of the curve by its exponent."""
        above = np.exp(np.clip(coefficients @ powers.T + bends, -500, 50))
        return np.log(losses) - np.log(floors + above), above / (floors + above)

    def curvature(slopes: Array) -> Array:
        return np.asarray((powers.T * (weights * slopes**2)[:, None, :]) @ powers)

    start = np.log(np.maximum(losses - floors, LEAST_SHARE * losses)) - bends
    coefficients = (start * weights) @ powers @ np.linalg.inv(powers.T * weights @ powers)
    errors, slopes = residuals(coefficients)
    squares = (weights * errors**2).sum(1)
    damping = np.full(len(shapes), FIRST_DAMPING)
    for _ in range(MAX_STEPS):
        matrix = curvature(slopes)
        diagonal = np.einsum("gpp->gp", matrix) * damping[:, None] + 1e-300
        gradient = (weights * slopes * errors) @ powers
        step = np.linalg.solve(matrix + diagonal[..., None] * np.eye(2), gradient[..., None])[..., 0]
        new_errors, new_slopes = residuals(coefficients + step)
        new_squares = (weights * new_errors**2).sum(1)
        better = new_squares <= squares
        coefficients = np.where(better[:, None], coefficients + step, coefficients)
        errors = np.where(better[:, None], new_errors, errors)
        slopes = np.where(better[:, None], new_slopes, slopes)
        squares = np.where(better, new_squares, squares)
        damping = np.clip(np.where(better, damping / 10, damping * 10), MIN_DAMPING, MAX_DAMPING)
        if np.abs(step).max() < STEP_TOLERANCE:
            break
    return CurveFits(coefficients, squares, curvature(slopes))


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
