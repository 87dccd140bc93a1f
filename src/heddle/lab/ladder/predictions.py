"""What the curves of a ladder predict: the loss at a target, the cost of equal loss, where curves cross, a self-test.

Every result is a share or a quantile of draws of curves. The 95 % interval of a curve covers the curve; the interval of
a measurement also covers the distance of a new point, with as many seeds as the others, from it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from heddle.errors import DataError
from heddle.lab.compare.statistics import CONFIDENCE
from heddle.lab.ladder.fit import MAX_EXTRAPOLATION, MIN_SIZES, Array, LadderFit, SizeLosses, fit_ladder
from heddle.lab.ladder.results import BestSize, Crossing, EqualLoss, FormPrediction, HeldOut, Prediction

GRID_POINTS = 121  # sizes or costs, evenly in log
SMALL_SHARE = (1 - CONFIDENCE) / 2  # of the draws: anything rarer is ruled out


@dataclass(frozen=True)
class LadderPoints:
    """The measurements of the designs, and the costs of their training.

    losses: by design. costs: by design, (sizes, training FLOPs) of the trained sizes and up to 30 × the largest.
    seed_deviation, correlation: of a point's log loss, and between two points of one size, as in `fit_ladder`.
    tokens_per_parameter: for L(N, D), the ratio at which designs are compared, and which `costs` assume.
    """

    losses: Mapping[str, SizeLosses]
    costs: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    seed_deviation: float
    correlation: float = 0.0
    tokens_per_parameter: float = 0.0

    def fit(self, share_irreducible: bool = True) -> LadderFit:
        """The result of `fit_ladder` on these points."""
        return fit_ladder(self.losses, self.seed_deviation, share_irreducible, self.correlation)

    def tokens(self, sizes: Any) -> Any:
        """The training tokens of some sizes at the ratio at which designs are compared."""
        return self.tokens_per_parameter * sizes

    def cost(self, name: str, sizes: Array | float) -> Array:
        """The training FLOPs of a design at some sizes, by power-law interpolation between counted ones."""
        return _interpolate(sizes, *self.costs[name])

    def size_of_cost(self, name: str, costs: Array | float) -> Array:
        """The size at which a design's training has this cost."""
        return _interpolate(costs, *reversed(self.costs[name]))

    def limit(self, name: str) -> float:
        """The largest size of a design for which anything is predicted, at the compared tokens per parameter."""
        points = self.losses[name]
        limits = [max(points.sizes)]
        if points.tokens:
            limits.append(max(points.tokens) / self.tokens_per_parameter)
        return MAX_EXTRAPOLATION * min(limits)


def _interpolate(values: Array | float, known: Sequence[float], results: Sequence[float]) -> Array:
    """Power-law interpolation, also just beyond the last known points, where rounding may put a limit."""
    x, known_x, known_y = (np.log(each) for each in (values, known, results))
    last = len(known_x) - 2
    index = np.clip(np.searchsorted(known_x, x) - 1, 0, last)
    slope = (known_y[index + 1] - known_y[index]) / (known_x[index + 1] - known_x[index])
    return np.asarray(np.exp(known_y[index] + slope * (x - known_x[index])))


def interval(values: Array) -> tuple[float, float, float]:
    """The median and the ends of the 95 % interval of draws; an end may be infinite."""
    low, middle, high = np.quantile(values, [SMALL_SHARE, 0.5, 1 - SMALL_SHARE], method="nearest")
    return float(middle), float(low), float(high)


def predict_loss(
    fit: LadderFit, points: LadderPoints, name: str, size: float, tokens: float | None = None
) -> Prediction:
    """The loss of a design at a size.

    tokens: for L(N, D); None: as in `points`. Beyond 30 times the largest size, or the most tokens, there is no
    number, and `reason` says so.
    """
    tokens = points.tokens(size) if tokens is None else tokens
    reason = _too_far(points.losses[name], name, size, tokens)
    if reason is not None:
        return Prediction(design=name, size=size, reason=reason)
    losses = fit.losses(name, size, tokens)
    loss, *curve = interval(losses)
    _, *measurement = interval(losses * np.exp(fit.noise[name]))
    forms = [
        FormPrediction(
            form=form.form, loss=float(fit.loss_of(np.array(form.coefficients[name]), size, tokens)), weight=form.weight
        )
        for form in fit.forms
        if name in form.coefficients
    ]
    return Prediction(
        design=name,
        size=size,
        loss=loss,
        curve=(curve[0], curve[1]),
        measurement=(measurement[0], measurement[1]),
        forms=forms,
    )


def _too_far(losses: SizeLosses, name: str, size: float, tokens: float) -> str | None:
    """Why nothing is predicted at a size and number of tokens, or None."""
    limit = MAX_EXTRAPOLATION * (1 + 1e-9)
    if (factor := size / max(losses.sizes)) > limit:
        what, remedy = f"the largest finished size of {name}", "train larger sizes"
    elif losses.tokens and (factor := tokens / max(losses.tokens)) > limit:
        what, remedy = f"the most tokens of {name}", "train on more tokens per parameter"
    else:
        return None
    return f"is {factor:.0f} times {what}; beyond {MAX_EXTRAPOLATION} times nothing is predicted, so {remedy}"


def cost_for_equal_loss(
    fit: LadderFit, points: LadderPoints, name: str, baseline: str, size: float
) -> EqualLoss | None:
    """The FLOPs that a design needs for the baseline's loss at `size`, relative to the baseline's.

    None if the baseline has no prediction there.
    """
    if size > points.limit(baseline) * (1 + 1e-9):
        return None
    sizes = np.geomspace(min(points.losses[name].sizes), points.limit(name), GRID_POINTS)
    # draws may rise or level off beyond the trained sizes, so the first size that is good enough counts
    table = np.stack([fit.losses(name, each, points.tokens(each)) for each in sizes], axis=1)
    goals = fit.losses(baseline, size, points.tokens(size))
    ratios = points.cost(name, _first_reached(sizes, table, goals)) / points.cost(baseline, size)
    ratios[table[:, 0] <= goals] = 0.0
    ratios[table.min(axis=1) > goals] = math.inf
    middle, low, high = interval(ratios)
    ends = points.cost(name, sizes[[0, -1]]) / points.cost(baseline, size)
    return EqualLoss(
        design=name,
        baseline=baseline,
        size=size,
        ratio=middle if 0 < middle < math.inf else None,
        low=low if low > 0 else None,
        high=high if high < math.inf else None,
        least=float(ends[0]),
        most=float(ends[1]),
        is_less=middle == 0,
    )


def _first_reached(sizes: Array, table: Array, goals: Array) -> Array:
    """For each draw the first size with a loss of at most its goal, by log-linear interpolation [draws]."""
    below = table <= goals[:, None]
    index = np.clip(below.argmax(axis=1), 1, len(sizes) - 1)
    rows = np.arange(len(goals))
    before, after = table[rows, index - 1], table[rows, index]
    share = np.clip((before - goals) / np.maximum(before - after, 1e-300), 0, 1)
    return np.asarray(np.exp((1 - share) * np.log(sizes[index - 1]) + share * np.log(sizes[index])))


def crossing(fit: LadderFit, points: LadderPoints, name: str, baseline: str) -> Crossing:
    """At which training FLOPs the curves of two designs cross, if they do."""
    first = max(float(points.cost(each, min(points.losses[each].sizes))) for each in (name, baseline))
    last = min(float(points.cost(each, points.limit(each))) for each in (name, baseline))
    result = Crossing(design=name, baseline=baseline, costs=(first, last))
    if first >= last:
        return result
    costs = np.geomspace(first, last, GRID_POINTS)

    def losses_at(design: str, cost: float) -> Array:
        size = float(points.size_of_cost(design, cost))
        return fit.losses(design, size, points.tokens(size))

    differences = np.stack([losses_at(name, cost) - losses_at(baseline, cost) for cost in costs], axis=1)
    crosses, crossed = _first_zero(costs, differences)
    is_bounded = float((~crosses).mean()) <= SMALL_SHARE
    middle, low, high = interval(crossed) if len(crossed) else (None, None, None)
    return replace(
        result,
        better=float((~crosses & (differences[:, 0] < 0)).mean()),
        worse=float((~crosses & (differences[:, 0] >= 0)).mean()),
        crosses=float(crosses.mean()),
        cost=middle,
        low=low if is_bounded else None,
        high=high if is_bounded else None,
    )


def _first_zero(costs: Array, differences: Array) -> tuple[npt.NDArray[np.bool_], Array]:
    """In which draws [draws] the differences [draws, costs] change sign, and the first cost at which they do."""
    changes = np.signbit(differences[:, 1:]) != np.signbit(differences[:, :-1])
    crosses = changes.any(axis=1)
    rows, index = np.flatnonzero(crosses), changes.argmax(axis=1)[crosses]
    before, after = differences[rows, index], differences[rows, index + 1]
    share = before / np.where(before == after, 1.0, before - after)
    return crosses, np.asarray(np.exp((1 - share) * np.log(costs[index]) + share * np.log(costs[index + 1])))


def hold_out(points: LadderPoints, share_irreducible: bool = True) -> list[HeldOut]:
    """The self-test: each design's largest size predicted from all others, beside the measurement there.

    For L(N, D), it is predicted at its most tokens, without the points of the most tokens of any size. within: whether
    the measurement lies in its 95 % interval. Empty where too few points are left to fit.
    """
    without = {name: _without_largest(each) for name, each in points.losses.items()}
    if min(len(each.sizes) for each in without.values()) < MIN_SIZES:
        return []
    rest = replace(points, losses=without)
    try:
        fit = rest.fit(share_irreducible)
    except DataError:
        return []
    tests = []
    for name, each in points.losses.items():
        index = _largest(each)
        tokens = each.tokens[index] if each.tokens else None
        predicted = predict_loss(fit, rest, name, each.sizes[index], tokens)
        if predicted.measurement is not None:
            low, high = predicted.measurement
            measured = each.losses[index]
            tests.append(HeldOut(**vars(predicted), measured=measured, within=low <= measured <= high))
    return tests


def _largest(losses: SizeLosses) -> int:
    """The index of the point of the largest size, at its most tokens."""
    tokens = losses.tokens or losses.sizes
    return max(range(len(losses.sizes)), key=lambda index: (losses.sizes[index], tokens[index]))


def _without_largest(losses: SizeLosses) -> SizeLosses:
    """All points except the largest size's, and except the most tokens of each size."""
    most: dict[float, float] = {}
    for size, tokens in zip(losses.sizes, losses.tokens, strict=False):
        most[size] = max(tokens, most.get(size, 0.0))
    rest = [
        index
        for index, size in enumerate(losses.sizes)
        if size < max(losses.sizes) and not (losses.tokens and losses.tokens[index] == most[size])
    ]
    return SizeLosses(
        [losses.sizes[index] for index in rest],
        [losses.losses[index] for index in rest],
        [losses.seeds[index] for index in rest],
        [losses.tokens[index] for index in rest if losses.tokens],
    )


# The best size for a training budget C = 6·N·D, which minimizes a surface L(N, D) = E + A·N^−α + B·D^−β.
#
# Kaplan et al. (2020) count 6 FLOPs per parameter and token. At a fixed budget the minimum has a closed form, so every
# draw of the surface has its own best size (Hoffmann et al. 2022, approach 3).


FLOPS_FACTOR = 6  # per parameter and token


def best_size(fit: LadderFit, points: LadderPoints, name: str, flops: float) -> BestSize:
    """The size of a design with the lowest loss for a budget, up to 30 times the largest size and the most tokens."""
    losses, product = points.losses[name], flops / FLOPS_FACTOR
    ratios = [tokens / size for size, tokens in zip(losses.sizes, losses.tokens, strict=True)]
    least = max(math.sqrt(product / max(ratios)), product / (MAX_EXTRAPOLATION * max(losses.tokens)))
    most = min(math.sqrt(product / min(ratios)), MAX_EXTRAPOLATION * max(losses.sizes))
    result = BestSize(design=name, flops=flops, least=least, most=most)
    if least >= most:
        reason = f"needs more than {MAX_EXTRAPOLATION} times the largest size or the most tokens of {name}"
        return replace(result, reason=f"{reason}, where nothing is predicted; train larger sizes")
    sizes = best_sizes(fit, name, flops)
    middle, low, high = interval(np.where(sizes < least, 0.0, np.where(sizes > most, math.inf, sizes)))
    result = replace(result, low=low if low > 0 else None, high=high if high < math.inf else None)
    if not 0 < middle < math.inf:
        return replace(result, is_less=middle == 0)
    loss, *curve = interval(fit.losses(name, middle, product / middle))
    return replace(result, size=middle, tokens=product / middle, loss=loss, curve=(curve[0], curve[1]))


def best_sizes(fit: LadderFit, name: str, flops: float) -> Array:
    """The size with the lowest loss for a budget in each draw [draws], also beyond the limits of predictions."""
    assert fit.token_center is not None, "L(N) has no best size for a budget"
    _, a, b, p, q, g = fit.draws[name].T
    budget = math.log(flops / FLOPS_FACTOR / fit.center / fit.token_center)  # x + y
    # both terms change by the same share of the sum: |b|·exp((a + b·x) / g) = |q|·exp((p + q·y) / g)
    x = (g * np.log(q / b) + p - a + q * budget) / (b + q)
    return np.asarray(fit.center * np.exp(np.clip(x, -500, 500)))
