"""Fit loss against size: L(N) = E + C·N^−γ, and what else explains the same points, as draws of whole curves.

Hoffmann et al. (2022) fit L by Huber's loss on log L from many starts; Besiroglu et al. (2024) show how far off it is
where the search stops early, and how much too narrow its intervals were. So the search here is exhaustive: for each of
many E the rest is a least-squares problem in log L with two parameters a design. The posterior of E under a flat prior,
given these solutions, and Student's t around each of them give draws of curves. With few points, each a mean over
seeds, squares serve better than Huber's loss, which would hide that one of them lies off the curve.

Three forms are fitted: the power law with an irreducible loss E; without it (Kaplan et al. 2020); and log L quadratic
in log N. Designs share E, and the curvature of the third form, unless each is fitted alone. Draws of the forms are
mixed by exp(−BIC / 2) (Raftery 1995). A curve that rises with size, up to the largest size for which anything is
predicted, is no candidate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from heddle.analysis.ladder.curves import Array, CurveFits, SizeLosses, curve_loss, fit_curves, shared_curvature
from heddle.errors import DataError

POWER_LAW, PLAIN_POWER_LAW, LOG_QUADRATIC = "power law with E", "power law without E", "log-quadratic"
FORMS = (POWER_LAW, PLAIN_POWER_LAW, LOG_QUADRATIC)
MAX_EXTRAPOLATION = 30  # times the largest size: nothing is predicted beyond
DRAWS = 4000
FIT_SEED = 20_220_329
SHAPES = 200  # values of E that are tried, evenly from 0 to almost the lowest loss; and of c
CURVATURE_RANGE = 12  # standard errors of c to each side: t has heavy tails
MIN_DENSITY = 1e-6  # of the most likely E: rarer ones are left out of the second look
MIN_SIZES = 3  # of a design
MIN_ACCEPTED = 0.002  # of the draws of a form: with fewer candidates it is left out


@dataclass(frozen=True)
class FormFit:
    """The best curves of one form.

    coefficients: by design (E, a, b, c) of L = E + exp(a + b·x + c·x²), with x = log(N / center). weight: the share of
    the draws. deviation: the standard deviation of a point's log loss around its curve. degrees_of_freedom: points
    minus parameters.
    """

    form: str
    coefficients: dict[str, tuple[float, float, float, float]]
    weight: float
    deviation: float
    degrees_of_freedom: int


@dataclass(frozen=True)
class LadderFit:
    """Draws of the curves that the points allow; draw i of one design belongs to draw i of every other.

    center: the size at which x = log(N / center) is 0. draws: by design [draws, 4], (E, a, b, c) as in `FormFit`.
    deviations: by design [draws], of a point's log loss around its curve. forms: the best curves of each form.
    """

    center: float
    draws: dict[str, Array]
    deviations: dict[str, Array]
    forms: tuple[FormFit, ...]

    def losses(self, name: str, sizes: float | Array) -> Array:
        """The loss of a design in each draw, at one size or at one for each draw [draws]."""
        return curve_loss(self.draws[name], np.log(np.asarray(sizes, dtype=np.float64) / self.center))

    @cached_property
    def noise(self) -> dict[str, Array]:
        """By design, for each draw, what a new point's log loss has besides its curve's [draws]."""
        generator = np.random.default_rng(FIT_SEED + 1)
        return {name: each * generator.standard_normal(len(each)) for name, each in self.deviations.items()}


def fit_ladder(
    points: Mapping[str, SizeLosses], seed_deviation: float = 0.0, share_irreducible: bool = True
) -> LadderFit:
    """Fit the points of all designs.

    seed_deviation: the standard deviation of a point's log loss that the luck of training alone gives: no curve is
    believed to come nearer. share_irreducible: whether all designs have one E; else each is fitted alone.
    Raises DataError where a design has too few sizes, or its loss does not fall with size.
    """
    for name, each in points.items():
        if len(each.sizes) < MIN_SIZES:
            raise DataError(f"{name}: has a loss at {len(each.sizes)} sizes; a fit needs {MIN_SIZES} at least")
    center = math.exp(float(np.mean([np.mean(np.log(each.sizes)) for each in points.values()])))
    groups = [dict(points)] if share_irreducible else [{name: each} for name, each in points.items()]
    fits = [_fit_group(group, center, seed_deviation) for group in groups]
    return LadderFit(
        center=center,
        draws={name: draws for fit in fits for name, draws in fit.draws.items()},
        deviations={name: each for fit in fits for name, each in fit.deviations.items()},
        forms=tuple(form for fit in fits for form in fit.forms),
    )


@dataclass(frozen=True)
class _FormSolutions:
    """A form's solutions for each shape (E, c) [shapes, 2] that its designs share. points: of all these designs."""

    form: str
    shapes: Array
    designs: dict[str, CurveFits]
    points: int
    seed_deviation: float

    @property
    def conditional_degrees(self) -> int:
        """Degrees of freedom of the residuals for a given shape."""
        return self.points - 2 * len(self.designs)

    @property
    def degrees_of_freedom(self) -> int:
        return self.conditional_degrees - (self.form != PLAIN_POWER_LAW)

    @cached_property
    def squares(self) -> Array:
        """The sum of squares of all designs for each shape."""
        return np.maximum(sum(each.squares for each in self.designs.values()), 1e-30)

    @cached_property
    def density(self) -> Array:
        """The posterior density of each shape, relative to the highest: Π |JᵀWJ|^−½ · S^−ν/2 [shapes]."""
        log_determinants = sum(np.linalg.slogdet(each.curvatures)[1] for each in self.designs.values())
        logarithm = -0.5 * self.conditional_degrees * np.log(self.squares) - 0.5 * log_determinants
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
        floor, bend = map(float, self.shapes[index])
        curves = {name: map(float, each.coefficients[index]) for name, each in self.designs.items()}
        return FormFit(
            form=self.form,
            coefficients={name: (floor, a, b, bend) for name, (a, b) in curves.items()},
            weight=weight,
            deviation=float(np.sqrt(self.squares[index] / self.degrees_of_freedom)),
            degrees_of_freedom=self.degrees_of_freedom,
        )

    def draw(self, span: tuple[float, float], generator: np.random.Generator) -> tuple[dict[str, Array], Array]:
        """About DRAWS draws, less those that rise between the two ends of `span`: coefficients [draws, 4], deviations.

        A shape is drawn by its density, σ² = S / χ²(ν) given the shape, and a and b normally given both.
        """
        density = self.density
        index = generator.choice(len(self.shapes), size=DRAWS, p=density / density.sum())
        deviations = np.sqrt(self.squares[index] / generator.chisquare(self.conditional_degrees, DRAWS))
        deviations = np.maximum(deviations, self.seed_deviation)
        draws, accepted = {}, np.ones(DRAWS, dtype=bool)
        for name, each in self.designs.items():
            roots = np.linalg.cholesky(np.linalg.inv(each.curvatures))[index]
            normal = generator.standard_normal((DRAWS, 2, 1))
            curves = each.coefficients[index] + deviations[:, None] * (roots @ normal)[..., 0]
            table = np.column_stack([self.shapes[index, 0], curves, self.shapes[index, 1]])
            accepted &= np.all([table[:, 2] + 2 * table[:, 3] * end < 0 for end in span], axis=0)
            draws[name] = table
        return {name: table[accepted] for name, table in draws.items()}, deviations[accepted]


def _fit_group(points: Mapping[str, SizeLosses], center: float, seed_deviation: float) -> LadderFit:
    """Fit designs that share E."""
    sizes = [size for each in points.values() for size in each.sizes]
    span = (math.log(min(sizes) / center), math.log(MAX_EXTRAPOLATION * max(sizes) / center))
    generator = np.random.default_rng(FIT_SEED)
    candidates, drawn = [], []
    for form in FORMS:
        solutions = _solve(form, points, center, seed_deviation)
        if solutions.degrees_of_freedom < 1:
            continue
        draws, deviations = solutions.draw(span, generator)
        if len(deviations) >= MIN_ACCEPTED * DRAWS:
            candidates.append(solutions)
            drawn.append((draws, deviations))
    if not candidates:
        raise DataError(
            f"{', '.join(points)}: the loss does not fall with size, so there is nothing to fit; train for more "
            "tokens per parameter, at another learning rate or with more seeds"
        )
    scores = np.array([solutions.bic for solutions in candidates])
    weights = np.exp(-0.5 * (scores - scores.min()))
    weights /= weights.sum()
    picks = [
        generator.integers(len(deviations), size=count)
        for (_, deviations), count in zip(drawn, _shares(weights), strict=True)
    ]
    return LadderFit(
        center=center,
        draws={
            name: np.concatenate([draws[name][pick] for (draws, _), pick in zip(drawn, picks, strict=True)])
            for name in points
        },
        deviations=dict.fromkeys(
            points, np.concatenate([each[pick] for (_, each), pick in zip(drawn, picks, strict=True)])
        ),
        forms=tuple(each.best(float(weight)) for each, weight in zip(candidates, weights, strict=True)),
    )


def _solve(form: str, points: Mapping[str, SizeLosses], center: float, seed_deviation: float) -> _FormSolutions:
    """The solutions of a form. E is tried over all of its range, and again where the first look has its mass."""
    count = sum(len(each.sizes) for each in points.values())

    def solve(shapes: Array) -> _FormSolutions:
        designs = {name: fit_curves(each, center, shapes) for name, each in points.items()}
        return _FormSolutions(form, shapes, designs, count, seed_deviation)

    if form == PLAIN_POWER_LAW:
        return solve(np.zeros((1, 2)))
    if form == POWER_LAW:
        lowest = min(min(each.losses) for each in points.values())
        floors = np.arange(SHAPES) / SHAPES * lowest
        first = solve(np.column_stack([floors, np.zeros(SHAPES)]))
        likely = np.flatnonzero(first.density > MIN_DENSITY)
        low, high = floors[max(likely[0] - 1, 0)], floors[likely[-1]] + lowest / SHAPES
        return solve(np.column_stack([np.linspace(low, high, SHAPES, endpoint=False), np.zeros(SHAPES)]))
    bend, squares, variance = shared_curvature(list(points.values()), center)
    degrees = max(1, count - 2 * len(points) - 1)
    half = CURVATURE_RANGE * math.sqrt(variance * max(squares / degrees, seed_deviation**2, 1e-16))
    return solve(np.column_stack([np.zeros(SHAPES), np.linspace(bend - half, bend + half, SHAPES)]))


def _shares(weights: Sequence[float] | Array) -> list[int]:
    """DRAWS in proportion to the weights; what rounding leaves goes to the largest."""
    counts = [int(weight * DRAWS) for weight in weights]
    counts[int(np.argmax(weights))] += DRAWS - sum(counts)
    return counts
