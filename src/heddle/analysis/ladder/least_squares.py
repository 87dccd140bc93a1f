"""Nonlinear least squares by Levenberg and Marquardt's damping, for many problems of the same points at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MAX_STEPS = 60
STEP_TOLERANCE = 1e-9  # of the coefficients: smaller steps end the search
FIRST_DAMPING, MIN_DAMPING, MAX_DAMPING = 1e-6, 1e-12, 1e9


@dataclass(frozen=True)
class CurveFits:
    """The best curve of a design for each shape.

    coefficients: [shapes, k]. squares: [shapes], the weighted sum of squared residuals of log L. curvatures:
    [shapes, k, k], JᵀWJ; its inverse times a point's variance is the covariance of the coefficients.
    """

    coefficients: Array
    squares: Array
    curvatures: Array


@dataclass(frozen=True)
class NormalEquations:
    """Of residuals r with weights W, at some coefficients: rᵀWr [shapes], JᵀWr [shapes, k] and JᵀWJ [shapes, k, k]."""

    squares: Array
    gradient: Array
    matrix: Array


def damped_least_squares(equations: Callable[[Array], NormalEquations], start: Array) -> CurveFits:
    """The coefficients [shapes, k] that minimize each sum of squares. No step raises one."""
    coefficients, now = start, equations(start)
    damping = np.full(len(start), FIRST_DAMPING)
    for _ in range(MAX_STEPS):
        diagonal = np.einsum("gpp->gp", now.matrix) * damping[:, None] + 1e-300
        matrix = now.matrix + diagonal[..., None] * np.eye(start.shape[1])
        step = np.linalg.solve(matrix, now.gradient[..., None])[..., 0]
        new = equations(coefficients + step)
        better = new.squares <= now.squares
        coefficients = np.where(better[:, None], coefficients + step, coefficients)
        now = NormalEquations(
            np.where(better, new.squares, now.squares),
            np.where(better[:, None], new.gradient, now.gradient),
            np.where(better[:, None, None], new.matrix, now.matrix),
        )
        damping = np.clip(np.where(better, damping / 10, damping * 10), MIN_DAMPING, MAX_DAMPING)
        if np.abs(step).max() < STEP_TOLERANCE:
            break
    return CurveFits(coefficients, now.squares, now.matrix)
