"""Least squares of one design's surface L(N, D) = E + (exp((a + b·x) / g) + exp((p + q·y) / g))^g in log L.

x = log(N / center), y = log(D / token center). With g = 1 it is E + A·N^−α + B·D^−β of Hoffmann et al. (2022), with
b = −α and q = −β; with E = 0 and other g it is what Kaplan et al. (2020) fit. For many shapes (E, g) at once.

Runs of one size that share a trunk share its luck: their residuals are correlated, and the sum of squares takes that
into account as generalized least squares do.
"""

from collections.abc import Sequence

import numpy as np

from heddle.analysis.ladder.curves import LEAST_SHARE, SizeLosses, point_arrays
from heddle.analysis.ladder.least_squares import Array, CurveFits, NormalEquations, damped_least_squares

SIZE_SHARES = (0.25, 0.5, 0.75)  # of what is above E: that of N, where the searches begin
MIN_EXPONENT = 0.02  # there
MIN_COUNT = 3  # of numbers of tokens, at as many sizes: with fewer the exponents are guesses


def surface_loss(coefficients: Array, x: Array | float, y: Array | float) -> Array:
    """L for coefficients (E, a, b, p, q, g) [..., 6]."""
    floor, a, b, p, q, g = np.moveaxis(coefficients, -1, 0)
    return np.asarray(floor + np.exp(np.clip(g * np.logaddexp((a + b * x) / g, (p + q * y) / g), -500, 50)))


def fit_surfaces(
    points: SizeLosses, center: float, token_center: float, shapes: Array, correlation: float
) -> CurveFits:
    """The a, b, p and q with the least squares of log L for each (E, g) of `shapes` [shapes, 2].

    correlation: of the residuals of two points of one size. Points are weighted by their seeds. The search begins at
    several places, and the best end counts.
    """
    x, losses, weights = point_arrays(points, center)
    y = np.log(np.asarray(points.tokens, dtype=np.float64) / token_center)
    precision = point_precision(points.sizes, weights, correlation)
    columns = np.stack([np.ones_like(x), x, np.ones_like(y), y], axis=1)  # [points, 4]
    is_size = np.array([1.0, 1.0, 0.0, 0.0])
    floors, powers = (np.tile(column, len(SIZE_SHARES))[:, None] for column in shapes.T)

    def equations(coefficients: Array) -> NormalEquations:
        size_terms = (coefficients * is_size) @ columns.T
        token_terms = (coefficients * (1 - is_size)) @ columns.T
        above = powers * np.logaddexp(size_terms / powers, token_terms / powers)
        sizes = np.exp((size_terms - above) / powers)  # N's share of the sum under the power
        above = np.exp(np.clip(above, -500, 50))
        errors, slopes = np.log(losses) - np.log(floors + above), above / (floors + above)
        jacobian = np.where(is_size > 0, (slopes * sizes)[..., None], (slopes * (1 - sizes))[..., None]) * columns
        weighted = precision @ jacobian
        return NormalEquations(
            squares=np.einsum("gp,gp->g", errors @ precision, errors),
            gradient=np.einsum("gpk,gp->gk", weighted, errors),
            matrix=np.swapaxes(weighted, 1, 2) @ jacobian,
        )

    fits = damped_least_squares(equations, _starts(x, y, losses, shapes))
    best = fits.squares.reshape(len(SIZE_SHARES), -1).argmin(0) * len(shapes) + np.arange(len(shapes))
    return CurveFits(fits.coefficients[best], fits.squares[best], fits.curvatures[best])


def _starts(x: Array, y: Array, losses: Array, shapes: Array) -> Array:
    """Where searches begin [shares × shapes, 4]: a plane through log (L − E), of which each term has a share."""
    floors, powers = shapes[:, :1], shapes[:, 1]
    above = np.log(np.maximum(losses - floors, LEAST_SHARE * losses))
    plane = np.linalg.pinv(np.stack([np.ones_like(x), x, y], axis=1)) @ above.T  # [3, shapes]
    starts = []
    for share in SIZE_SHARES:
        b, q = (
            np.minimum(slope / part, -MIN_EXPONENT) for slope, part in zip(plane[1:], (share, 1 - share), strict=True)
        )
        a, p = (plane[0] + powers * np.log(part) for part in (share, 1 - share))
        starts.append(np.stack([a, b, p, q], axis=1))
    return np.concatenate(starts)


def point_precision(sizes: Sequence[float], weights: Array, correlation: float) -> Array:
    """The inverse of the points' covariance, relative to the variance of a point with the most seeds."""
    same = np.asarray(sizes)[:, None] == np.asarray(sizes)[None, :]
    covariance = np.where(np.eye(len(weights)) > 0, 1.0, correlation * same)
    roots = np.sqrt(weights)
    return np.asarray(roots[:, None] * np.linalg.inv(covariance) * roots)


def sizes_with_tokens(points: SizeLosses) -> int:
    """How many sizes have at least 3 numbers of tokens."""
    pairs = set(zip(points.sizes, points.tokens, strict=True))
    counts = [sum(pair[0] == size for pair in pairs) for size in set(points.sizes)]
    return sum(count >= MIN_COUNT for count in counts)
