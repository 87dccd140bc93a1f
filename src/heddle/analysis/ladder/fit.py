"""Fit loss against size, L(N) = E + C·N^−γ, or against size and tokens, L(N, D), as draws of whole curves.

Hoffmann et al. (2022) fit L by Huber's loss on log L from many starts; Besiroglu et al. (2024) show how far off it is
where the search stops early, and how much too narrow its intervals were. So the search here is exhaustive: for each of
many E the rest is a least-squares problem in log L with two parameters a design. The posterior of E under a flat prior,
given these solutions, and Student's t around each of them give draws of curves. With few points, each a mean over
seeds, squares serve better than Huber's loss, which would hide that one of them lies off the curve.

Three forms are fitted: the power law with an irreducible loss E; without it (Kaplan et al. 2020); and log L quadratic
in log N. Designs share E, and the curvature of the third form, unless each is fitted alone. Draws of the forms are
mixed by exp(−BIC / 2) (Raftery 1995). A curve that rises with size, up to the largest size for which anything is
predicted, is no candidate.

Where sizes were trained on several numbers of tokens, the forms are those of `heddle.analysis.ladder.surfaces`: E +
A·N^−α + B·D^−β; the same without E; and a power of such a sum, which designs share. The rest is as for curves.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from heddle.analysis.ladder.curves import SizeLosses, curve_loss
from heddle.analysis.ladder.forms import DRAWS, FormFamily, FormFit, curve_family, surface_family
from heddle.analysis.ladder.least_squares import Array
from heddle.analysis.ladder.surfaces import MIN_COUNT, sizes_with_tokens, surface_loss
from heddle.errors import DataError

FIT_SEED = 20_220_329
MIN_SIZES = 3  # of a design
MIN_ACCEPTED = 0.002  # of the draws of a form: with fewer candidates it is left out


@dataclass(frozen=True)
class LadderFit:
    """Draws of the curves that the points allow; draw i of one design belongs to draw i of every other.

    center: the size at which x = log(N / center) is 0. draws: by design [draws, 4 or 6], coefficients as in `FormFit`.
    deviations: by design [draws], of a point's log loss around its curve. forms: the best curves of each form.
    token_center: of L(N, D), the tokens at which y is 0; None for L(N).
    """

    center: float
    draws: dict[str, Array]
    deviations: dict[str, Array]
    forms: tuple[FormFit, ...]
    token_center: float | None = None

    def losses(self, name: str, sizes: float | Array, tokens: float | Array | None = None) -> Array:
        """The loss of a design in each draw, at one size or at one for each draw [draws]; of L(N, D) at tokens too."""
        return self.loss_of(self.draws[name], sizes, tokens)

    def loss_of(self, coefficients: Array, sizes: float | Array, tokens: float | Array | None = None) -> Array:
        """The loss of a curve or surface with coefficients as in `FormFit`."""
        x = np.log(np.asarray(sizes, dtype=np.float64) / self.center)
        if self.token_center is None:
            return curve_loss(coefficients, x)
        assert tokens is not None, "L(N, D) needs tokens"
        return surface_loss(coefficients, x, np.log(np.asarray(tokens, dtype=np.float64) / self.token_center))

    @cached_property
    def noise(self) -> dict[str, Array]:
        """By design, for each draw, what a new point's log loss has besides its curve's [draws]."""
        generator = np.random.default_rng(FIT_SEED + 1)
        return {name: each * generator.standard_normal(len(each)) for name, each in self.deviations.items()}


def fit_ladder(
    points: Mapping[str, SizeLosses],
    seed_deviation: float = 0.0,
    share_irreducible: bool = True,
    correlation: float = 0.0,
) -> LadderFit:
    """Fit the points of all designs: L(N, D) where they have tokens, else L(N).

    seed_deviation: the standard deviation of a point's log loss that the luck of training alone gives: no curve is
    believed to come nearer. share_irreducible: whether all designs have one E; else each is fitted alone. correlation:
    of L(N, D), between what two points of one size have besides their curve, since their runs share a trunk. Raises
    DataError where a design has too few sizes or numbers of tokens, or its loss does not fall with them.
    """
    for name, each in points.items():
        if len(each.sizes) < MIN_SIZES:
            raise DataError(f"{name}: has a loss at {len(each.sizes)} sizes; a fit needs {MIN_SIZES} at least")
        if each.tokens and sizes_with_tokens(each) < MIN_COUNT:
            raise DataError(f"{name}: L(N, D) needs losses at 3 numbers of tokens of 3 sizes at least; it has fewer")
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
            f"{', '.join(points)}: the loss does not fall with size, so there is nothing to fit; train for more "
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
    """DRAWS in proportion to the weights; what rounding leaves goes to the largest."""
    counts = [int(weight * DRAWS) for weight in weights]
    counts[int(np.argmax(weights))] += DRAWS - sum(counts)
    return counts
