"""Fit loss against size, L(N) = E + C·N^−γ, or against size and tokens, L(N, D), as draws of whole curves.

Hoffmann et al. (2022) fit L by Huber's loss on log L from many starts; Besiroglu et al. (2024) show how far off the
result is if the search stops early, and how much too narrow its intervals were. So the search here is exhaustive: for
each of many E the rest is a least-squares problem in log L with two parameters per design. The posterior of E under a
flat prior, given these solutions, and Student's t around each of them give draws of curves. With few points, each a
mean over seeds, squares work better than Huber's loss, which would hide a point off the curve.

Three forms are fitted: the power law with an irreducible loss E; without it (Kaplan et al. 2020); and log L quadratic
in log N. Designs share E, and the curvature of the third form, unless each is fitted alone. Draws of the forms are
mixed by exp(−BIC / 2) (Raftery 1995). A curve that rises with size, up to the largest size for which anything is
predicted, is rejected.

If sizes were trained on several numbers of tokens, the forms are E + A·N^−α + B·D^−β; the same without E; and a power
of such a sum, with an exponent that designs share. The rest is as for curves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heddle.errors import DataError

# Nonlinear least squares with Levenberg-Marquardt damping, for many problems on the same points at once.


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
    """At some coefficients, for residuals r with weights W: rᵀWr [shapes], JᵀWr [shapes, k] and JᵀWJ [shapes, k, k]."""

    squares: Array
    gradient: Array
    matrix: Array


def damped_least_squares(equations: Callable[[Array], NormalEquations], start: Array) -> CurveFits:
    """The coefficients [shapes, k] that minimize each sum of squares. No step raises any of the sums."""
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


# Least squares of one design's curve L(N) = E + exp(a + b·x + c·x²) in log L, for many pairs (E, c) at once.


LEAST_SHARE = 0.02  # of the loss: the least that E leaves of it where the search begins


@dataclass(frozen=True)
class SizeLosses:
    """The points of one design: parameters, mean loss over the seeds, and the number of seeds, each [points].

    tokens: of the training, [points]; empty if every size has its own number of tokens, so that L is a curve of N.
    """

    sizes: Sequence[float]
    losses: Sequence[float]
    seeds: Sequence[int]
    tokens: Sequence[float] = ()


def curve_loss(coefficients: Array, x: Array | float, last: float = math.inf) -> Array:
    """L = E + exp(a + b·x + c·x²) for coefficients (E, a, b, c) [..., 4].

    With c < 0, log L falls faster and faster, as for very small models, but unlike a power law with E. So beyond `last`
    it continues along its tangent.
    """
    floor, a, b, c = np.moveaxis(coefficients, -1, 0)
    squares = c * x**2 - np.minimum(c, 0) * np.maximum(x - last, 0) ** 2
    return np.asarray(floor + np.exp(np.clip(a + b * x + squares, -500, 50)))


def fit_curves(points: SizeLosses, center: float, shapes: Array) -> CurveFits:
    """The a and b that minimize Σ w·(log L − log(E + exp(a + b·x + c·x²)))² for each (E, c) of `shapes` [shapes, 2].

    x = log(N / center); w: seeds of the point, relative to a point with the most. No starting point has to be chosen.
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

    The last is for x² after projecting out a and b; times a point's variance it is the variance of c.
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


# Least squares of one design's surface L(N, D) = E + (exp((a + b·x) / g) + exp((p + q·y) / g))^g in log L.
#
# x = log(N / center), y = log(D / token center). With g = 1 it is E + A·N^−α + B·D^−β (Hoffmann et al. 2022), with
# b = −α and q = −β; with E = 0 and other g it is what Kaplan et al. (2020) fit. For many shapes (E, g) at once.
#
# Runs of one size that share a trunk have correlated residuals. The sum of squares takes this into account, as in
# generalized least squares.


SIZE_SHARES = (0.25, 0.5, 0.75)  # of the loss above E: N's share where the searches begin
MIN_EXPONENT = 0.02  # where the searches begin
MIN_COUNT = 3  # numbers of tokens, at as many sizes: with fewer the exponents are guesses


def surface_loss(coefficients: Array, x: Array | float, y: Array | float) -> Array:
    """L for coefficients (E, a, b, p, q, g) [..., 6]."""
    floor, a, b, p, q, g = np.moveaxis(coefficients, -1, 0)
    return np.asarray(floor + np.exp(np.clip(g * np.logaddexp((a + b * x) / g, (p + q * y) / g), -500, 50)))


def fit_surfaces(
    points: SizeLosses, center: float, token_center: float, shapes: Array, correlation: float
) -> CurveFits:
    """The a, b, p and q with the least squares of log L for each (E, g) of `shapes` [shapes, 2].

    correlation: between the residuals of two points of one size. Points are weighted by their seeds. The search starts
    from several points, and the best result counts.
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
        sizes = np.exp((size_terms - above) / powers)  # N's part of the sum under the power
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
    """Starting points [shares × shapes, 4]: a plane through log (L − E), split between the two terms."""
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


# The forms that are fitted to a ladder's points, the solutions of each for all of its shapes, and draws of them.


POWER_LAW, PLAIN_POWER_LAW, LOG_QUADRATIC = "power law with E", "power law without E", "log-quadratic"
SUM_OF_POWER_LAWS, PLAIN_SUM, POWER_OF_SUM = "sum of power laws with E", "sum of power laws without E", "power of a sum"
MAX_EXTRAPOLATION = 30  # times the largest size: nothing is predicted beyond
DRAWS = 4000
SHAPES = 200  # tried values of E, evenly from 0 to almost the lowest loss; and of c
SURFACE_SHAPES = 60  # of E, and of the power of a sum
MAX_POWER = 8  # of a sum; its inverse is the smallest
CURVATURE_RANGE = 12  # standard errors of c to each side: t has heavy tails
MIN_DENSITY = 1e-6  # of the most likely E: less likely ones are left out of the second pass
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
    """A form's solutions for each shape [shapes, 2] that its designs share. points: of all designs together."""

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

        S has a floor, the average left by seed variance, so that a closer fit counts no better.
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
        """About DRAWS draws, without curves that do not fall: coefficients [draws, k + 2], deviations.

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
    """Forms that are weighted against each other.

    fits: for each form with enough points. is_accepted: for which coefficients [draws, k] the loss
    falls with size and with tokens.
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
    """The solutions for E over its whole range, and again on a finer grid where the first pass has its mass."""
    lowest = min(min(each.losses) for each in points.values())
    floors = np.arange(count) / count * lowest
    likely = np.flatnonzero(solve(floors).density > MIN_DENSITY)
    low, high = floors[max(likely[0] - 1, 0)], floors[likely[-1]] + lowest / count
    return solve(np.linspace(low, high, count, endpoint=False))


FIT_SEED = 20_220_329
MIN_SIZES = 3  # of a design
MIN_ACCEPTED = 0.002  # of the draws of a form: if fewer are accepted, it is left out


@dataclass(frozen=True)
class LadderFit:
    """Draws of the curves that the points allow; draw i of one design belongs to draw i of every other.

    center: the size at which x = log(N / center) is 0. draws: by design [draws, 4 or 6], coefficients as in `FormFit`.
    deviations: by design [draws], of a point's log loss around its curve. forms: the best curves of each form.
    largest: of the sizes; beyond it no curve of L(N) bends down. token_center: of L(N, D), the tokens at which y is 0;
    None for L(N).
    """

    center: float
    draws: dict[str, Array]
    deviations: dict[str, Array]
    forms: tuple[FormFit, ...]
    largest: float
    token_center: float | None = None

    def losses(self, name: str, sizes: float | Array, tokens: float | Array | None = None) -> Array:
        """The loss of a design in each draw, at one size or at one for each draw [draws]; of L(N, D) at tokens too."""
        return self.loss_of(self.draws[name], sizes, tokens)

    def loss_of(self, coefficients: Array, sizes: float | Array, tokens: float | Array | None = None) -> Array:
        """The loss of a curve or surface with coefficients as in `FormFit`."""
        x = np.log(np.asarray(sizes, dtype=np.float64) / self.center)
        if self.token_center is None:
            return curve_loss(coefficients, x, math.log(self.largest / self.center))
        assert tokens is not None, "L(N, D) needs tokens"
        return surface_loss(coefficients, x, np.log(np.asarray(tokens, dtype=np.float64) / self.token_center))

    @cached_property
    def noise(self) -> dict[str, Array]:
        """By design, the deviation of a new point's log loss from its curve in each draw [draws]."""
        generator = np.random.default_rng(FIT_SEED + 1)
        return {name: each * generator.standard_normal(len(each)) for name, each in self.deviations.items()}


def too_few_points(points: SizeLosses) -> str:
    """Why a design cannot be fitted; "" if it can."""
    if len(points.sizes) < MIN_SIZES:
        return f"has a loss at {len(points.sizes)} sizes; a fit needs at least {MIN_SIZES}"
    if points.tokens and sizes_with_tokens(points) < MIN_COUNT:
        return "L(N, D) needs at least 3 sizes with 3 numbers of tokens each; train more of them"
    return ""


def fit_ladder(
    points: Mapping[str, SizeLosses],
    seed_deviation: float = 0.0,
    share_irreducible: bool = True,
    correlation: float = 0.0,
) -> LadderFit:
    """Fit the points of all designs: L(N, D) where they have tokens, else L(N).

    seed_deviation: the standard deviation of a point's log loss from seed variance alone: a lower bound for the
    residuals of a curve. share_irreducible: whether all designs have one E; else each is fitted alone. correlation:
    for L(N, D), between the residuals of two points of one size, since their runs share a trunk. Raises
    DataError where a design has too few sizes or numbers of tokens, or its loss does not fall with them.
    """
    for name, each in points.items():
        if reason := too_few_points(each):
            raise DataError(f"{name}: {reason}")
    center = math.exp(float(np.mean([np.mean(np.log(each.sizes)) for each in points.values()])))
    log_tokens = [np.mean(np.log(each.tokens)) for each in points.values() if each.tokens]
    token_center = math.exp(float(np.mean(log_tokens))) if log_tokens else None
    groups = [dict(points)] if share_irreducible else [{name: each} for name, each in points.items()]
    fits = []
    for group in groups:
        if token_center is None:
            family = curve_family(group, center, seed_deviation)
        else:
            family = surface_family(group, center, token_center, seed_deviation, correlation)
        fits.append(_fit_group(group, family))
    return LadderFit(
        center=center,
        draws={name: each for draws, _, _ in fits for name, each in draws.items()},
        deviations={name: each for draws, each, _ in fits for name in draws},
        forms=tuple(form for _, _, forms in fits for form in forms),
        largest=max(size for each in points.values() for size in each.sizes),
        token_center=token_center,
    )


def _fit_group(points: Mapping[str, SizeLosses], family: FormFamily) -> tuple[dict[str, Array], Array, list[FormFit]]:
    """Draws by design, their deviations, and the forms, of designs that share E."""
    generator = np.random.default_rng(FIT_SEED)
    candidates, drawn = [], []
    for fits in family.fits:
        if fits.degrees_of_freedom < 1:
            continue
        draws, deviations = fits.draw(family.is_accepted, generator)
        if len(deviations) >= MIN_ACCEPTED * DRAWS:
            candidates.append(fits)
            drawn.append((draws, deviations))
    if not candidates:
        raise DataError(
            f"{', '.join(points)}: the loss does not fall with size, so no curve fits; train for more "
            "tokens per parameter, at another learning rate or with more seeds"
        )
    scores = np.array([fits.bic for fits in candidates])
    weights = np.exp(-0.5 * (scores - scores.min()))
    weights /= weights.sum()
    picks = [
        generator.integers(len(deviations), size=count)
        for (_, deviations), count in zip(drawn, _shares(weights), strict=True)
    ]
    return (
        {
            name: np.concatenate([draws[name][pick] for (draws, _), pick in zip(drawn, picks, strict=True)])
            for name in points
        },
        np.concatenate([each[pick] for (_, each), pick in zip(drawn, picks, strict=True)]),
        [each.best(float(weight)) for each, weight in zip(candidates, weights, strict=True)],
    )


def _shares(weights: Sequence[float] | Array) -> list[int]:
    """DRAWS in proportion to the weights; the rounding remainder goes to the largest."""
    counts = [int(weight * DRAWS) for weight in weights]
    counts[int(np.argmax(weights))] += DRAWS - sum(counts)
    return counts
