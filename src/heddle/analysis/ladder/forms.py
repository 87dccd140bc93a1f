"""The forms that are fitted to a ladder's points, the solutions of each for all of its shapes, and draws of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heddle.analysis.ladder.curves import SizeLosses, fit_curves, shared_curvature
from heddle.analysis.ladder.least_squares import Array, CurveFits
from heddle.analysis.ladder.surfaces import fit_surfaces

POWER_LAW, PLAIN_POWER_LAW, LOG_QUADRATIC = "power law with E", "power law without E", "log-quadratic"
SUM_OF_POWER_LAWS, PLAIN_SUM, POWER_OF_SUM = "sum of power laws with E", "sum of power laws without E", "power of a sum"
MAX_EXTRAPOLATION = 30  # times the largest size: nothing is predicted beyond
DRAWS = 4000
SHAPES = 200  # values of E that are tried, evenly from 0 to almost the lowest loss; and of c
SURFACE_SHAPES = 60  # of E, and of the power of a sum
MAX_POWER = 8  # of a sum; its inverse is the least
CURVATURE_RANGE = 12  # standard errors of c to each side: t has heavy tails
MIN_DENSITY = 1e-6  # of the most likely E: rarer ones are left out of the second look
_Accepts = Callable[[Array], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class FormFit:
    """The best curves of one form.

    coefficients: by design (E, a, b, c) of L = E + exp(a + b·x + c·x²), with x = log(N / center), or (E, a, b, p, q, g)
    of `surface_loss`. weight: the share of the draws. deviation: the standard deviation of a point's log loss around
    its curve. degrees_of_freedom: points minus parameters.
    """

    form: str
    coefficients: dict[str, tuple[float, ...]]
    weight: float
    deviation: float
    degrees_of_freedom: int


@dataclass(frozen=True)
class FormFits:
    """A form's solutions for each shape [shapes, 2] that its designs share. points: of all these designs."""

    form: str
    shapes: Array
    designs: dict[str, CurveFits]
    points: int
    seed_deviation: float

    @property
    def residual_degrees(self) -> int:
        """Degrees of freedom of the residuals for a given shape."""
        return self.points - sum(int(each.coefficients.shape[1]) for each in self.designs.values())

    @property
    def degrees_of_freedom(self) -> int:
        return self.residual_degrees - (len(self.shapes) > 1)

    @cached_property
    def squares(self) -> Array:
        """The sum of squares of all designs for each shape."""
        return np.maximum(sum(each.squares for each in self.designs.values()), 1e-30)

    @cached_property
    def density(self) -> Array:
        """The posterior density of each shape, relative to the highest: Π |JᵀWJ|^−½ · S^−ν/2 [shapes]."""
        log_determinants = sum(np.linalg.slogdet(each.curvatures)[1] for each in self.designs.values())
        logarithm = -0.5 * self.residual_degrees * np.log(self.squares) - 0.5 * log_determinants
        return np.asarray(np.exp(logarithm - logarithm.max()))

    @property
    def bic(self) -> float:
        """Schwarz's criterion, up to a constant of all forms: n·log(S / n) + p·log n.

        S is not below what the luck of training leaves on average: to come nearer to the points earns nothing.
        """
        parameters = self.points - self.degrees_of_freedom
        squares = max(float(self.squares.min()), self.degrees_of_freedom * self.seed_deviation**2)
        return self.points * math.log(squares / self.points) + parameters * math.log(self.points)

    def best(self, weight: float) -> FormFit:
        index = int(self.squares.argmin())
        floor, last = map(float, self.shapes[index])
        curves = {name: map(float, each.coefficients[index]) for name, each in self.designs.items()}
        return FormFit(
            form=self.form,
            coefficients={name: (floor, *values, last) for name, values in curves.items()},
            weight=weight,
            deviation=float(np.sqrt(self.squares[index] / self.degrees_of_freedom)),
            degrees_of_freedom=self.degrees_of_freedom,
        )

    def draw(self, is_accepted: _Accepts, generator: np.random.Generator) -> tuple[dict[str, Array], Array]:
        """About DRAWS draws, less those that do not fall: coefficients [draws, k + 2], deviations.

        A shape is drawn by its density, σ² = S / χ²(ν) given the shape, and the coefficients normally given both.
        """
        density = self.density
        index = generator.choice(len(self.shapes), size=DRAWS, p=density / density.sum())
        deviations = np.sqrt(self.squares[index] / generator.chisquare(self.residual_degrees, DRAWS))
        deviations = np.maximum(deviations, self.seed_deviation)
        draws, accepted = {}, np.ones(DRAWS, dtype=bool)
        for name, each in self.designs.items():
            roots = np.linalg.cholesky(np.linalg.inv(each.curvatures))[index]
            normal = generator.standard_normal((DRAWS, each.coefficients.shape[1], 1))
            curves = each.coefficients[index] + deviations[:, None] * (roots @ normal)[..., 0]
            table = np.column_stack([self.shapes[index, 0], curves, self.shapes[index, 1]])
            accepted &= is_accepted(table)
            draws[name] = table
        return {name: table[accepted] for name, table in draws.items()}, deviations[accepted]


@dataclass(frozen=True)
class FormFamily:
    """Forms that are weighed against each other.

    fits: of each form that the points can tell. is_accepted: which coefficients [draws, k] are of a curve whose loss
    falls with size, and with tokens.
    """

    fits: list[FormFits]
    is_accepted: _Accepts


def curve_family(points: Mapping[str, SizeLosses], center: float, seed_deviation: float) -> FormFamily:
    """The forms of L(N). A curve must fall from the smallest size to the largest for which anything is predicted."""
    count = sum(len(each.sizes) for each in points.values())
    sizes = [size for each in points.values() for size in each.sizes]
    span = (math.log(min(sizes) / center), math.log(MAX_EXTRAPOLATION * max(sizes) / center))

    def solve(form: str, shapes: Array) -> FormFits:
        designs = {name: fit_curves(each, center, shapes) for name, each in points.items()}
        return FormFits(form, shapes, designs, count, seed_deviation)

    bend, squares, variance = shared_curvature(list(points.values()), center)
    degrees = max(1, count - 2 * len(points) - 1)
    half = CURVATURE_RANGE * math.sqrt(variance * max(squares / degrees, seed_deviation**2, 1e-16))
    bends = np.linspace(bend - half, bend + half, SHAPES)
    return FormFamily(
        [
            _solve_floors(lambda floors: solve(POWER_LAW, _shapes(floors, 0.0)), points, SHAPES),
            solve(PLAIN_POWER_LAW, np.zeros((1, 2))),
            solve(LOG_QUADRATIC, _shapes(0.0, bends)),
        ],
        lambda table: np.all([table[:, 2] + 2 * table[:, 3] * end < 0 for end in span], axis=0),
    )


def surface_family(
    points: Mapping[str, SizeLosses], center: float, token_center: float, seed_deviation: float, correlation: float
) -> FormFamily:
    """The forms of L(N, D): both exponents must be below 0."""
    count = sum(len(each.sizes) for each in points.values())

    def solve(form: str, shapes: Array) -> FormFits:
        designs = {name: fit_surfaces(each, center, token_center, shapes, correlation) for name, each in points.items()}
        return FormFits(form, shapes, designs, count, seed_deviation)

    powers = np.geomspace(1 / MAX_POWER, MAX_POWER, SURFACE_SHAPES)
    return FormFamily(
        [
            _solve_floors(lambda floors: solve(SUM_OF_POWER_LAWS, _shapes(floors, 1.0)), points, SURFACE_SHAPES),
            solve(PLAIN_SUM, np.array([[0.0, 1.0]])),
            solve(POWER_OF_SUM, _shapes(0.0, powers)),
        ],
        lambda table: np.all(table[:, [2, 4]] < 0, axis=1),
    )


def _shapes(first: Array | float, second: Array | float) -> Array:
    return np.column_stack(np.broadcast_arrays(first, second))


def _solve_floors(solve: Callable[[Array], FormFits], points: Mapping[str, SizeLosses], count: int) -> FormFits:
    """The solutions for E over all of its range, and again where the first look has its mass."""
    lowest = min(min(each.losses) for each in points.values())
    floors = np.arange(count) / count * lowest
    likely = np.flatnonzero(solve(floors).density > MIN_DENSITY)
    low, high = floors[max(likely[0] - 1, 0)], floors[likely[-1]] + lowest / count
    return solve(np.linspace(low, high, count, endpoint=False))
