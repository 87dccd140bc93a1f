"""Critical values of Student's t for one pair of designs, and for all pairs of several designs at once.

With k designs the largest |t| of all pairs is the studentized range of k means over √2 (Tukey 1953), distributed as

    P(range > q) = ∫ f_ν(s) · (1 − W(q s)) ds,    W(w) = k ∫ φ(z) (Φ(z) − Φ(z − w))^(k−1) dz

where f_ν is the density of the estimated standard deviation with ν degrees of freedom. scipy has it too; it takes
seconds at the small levels that repeated looks need.
"""

import math
from functools import cache

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_DEVIATION_NODES, _RANGE_NODES = 120, 49
MAX_NORMAL = 8.0  # standard deviations


def pair_critical_value(designs: int, degrees_of_freedom: float, alpha: float) -> float:
    """What the largest |t| of all pairs of equal designs exceeds with probability `alpha`.

    degrees_of_freedom: of the estimated variance, at least 1. Raises ValueError for arguments outside these bounds.
    """
    if designs < 2 or degrees_of_freedom < 1 or not 0 < alpha < 1:
        raise ValueError(
            "pair_critical_value needs designs ≥ 2, degrees_of_freedom ≥ 1 and 0 < alpha < 1, "
            f"not {designs}, {degrees_of_freedom} and {alpha}"
        )
    return _critical_value(designs, _rounded_down(degrees_of_freedom) if designs > 2 else degrees_of_freedom, alpha)


def _rounded_down(degrees: float) -> float:
    """To steps of about a hundredth: few different values are computed, each a little larger."""
    step = 0.1 if degrees < 10 else 0.5 if degrees < 50 else 5.0
    return math.floor(degrees / step + 1e-9) * step


@cache
def _critical_value(designs: int, degrees: float, alpha: float) -> float:
    from scipy.special import stdtrit

    if designs == 2:
        return float(stdtrit(degrees, 1 - alpha / 2))
    low, high = 0.0, math.log(float(stdtrit(degrees, 1 - alpha / designs**2)) + 1)
    for _ in range(30):  # bisection of log(1 + value)
        middle = (low + high) / 2
        too_small = range_tail(math.sqrt(2) * math.expm1(middle), designs, degrees) > alpha
        low, high = (middle, high) if too_small else (low, middle)
    return math.expm1(high)


def range_tail(value: float, designs: int, degrees_of_freedom: float) -> float:
    """The probability that the studentized range of `designs` equal means exceeds `value`."""
    from scipy.special import ndtr

    log_deviations, density = _deviation_density(degrees_of_freedom)
    normals = np.linspace(-MAX_NORMAL, MAX_NORMAL, _RANGE_NODES)
    weights = np.exp(-(normals**2) / 2) / math.sqrt(2 * math.pi) * (normals[1] - normals[0])
    widths = value * np.exp(log_deviations)
    inside = ndtr(normals) - ndtr(normals - widths[:, None])
    within = designs * (inside ** (designs - 1)) @ weights
    return float(np.clip(1 - within, 0, 1) @ density)


@cache
def _deviation_density(degrees: float) -> tuple[FloatArray, FloatArray]:
    """(log of the estimated over the true standard deviation, its probability) at nodes that cover all of it."""
    low = -28 / degrees - 6 / math.sqrt(2 * degrees)
    high = min(2.2, 8 / math.sqrt(2 * degrees))
    nodes = np.linspace(low, high, _DEVIATION_NODES)
    log_density = degrees * (nodes - np.expm1(2 * nodes) / 2)
    density = np.exp(log_density)
    return nodes, density / density.sum()
