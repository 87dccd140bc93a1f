"""The best size for a training budget C = 6·N·D, where a surface L(N, D) = E + A·N^−α + B·D^−β has its least loss.

Kaplan et al. (2020) count 6 FLOPs per parameter and token. Along a budget the least loss has a closed form, so every
draw of the surface has its own best size (Hoffmann et al. 2022, approach 3).
"""

import math
from typing import Any

import numpy as np

from heddle.analysis.ladder.fit import LadderFit
from heddle.analysis.ladder.forms import MAX_EXTRAPOLATION
from heddle.analysis.ladder.least_squares import Array
from heddle.analysis.ladder.predictions import LadderPoints, interval

FLOPS_FACTOR = 6  # per parameter and token


def best_size(fit: LadderFit, points: LadderPoints, name: str, flops: float) -> dict[str, Any]:
    """The size of a design with the least loss for a budget, its interval, and the loss there.

    Only sizes whose tokens per parameter were trained count, up to 30 times the largest size and the most tokens:
    `least` and `most` are their ends. low, high: None where the interval has no end between them. size: None where the
    best one lies outside, and then `is_less` says on which side; where there are no such sizes, `reason` says so.
    """
    losses, product = points.losses[name], flops / FLOPS_FACTOR
    ratios = [tokens / size for size, tokens in zip(losses.sizes, losses.tokens, strict=True)]
    least = max(math.sqrt(product / max(ratios)), product / (MAX_EXTRAPOLATION * max(losses.tokens)))
    most = min(math.sqrt(product / min(ratios)), MAX_EXTRAPOLATION * max(losses.sizes))
    keys = ("size", "low", "high", "tokens", "loss", "curve", "is_less", "reason")
    result: dict[str, Any] = {"flops": flops, "least": least, "most": most} | dict.fromkeys(keys)
    if least >= most:
        reason = f"needs more than {MAX_EXTRAPOLATION} times the largest size or the most tokens of {name}"
        return result | {"reason": f"{reason}, where nothing is predicted; train larger sizes"}
    sizes = best_sizes(fit, name, flops)
    middle, low, high = interval(np.where(sizes < least, 0.0, np.where(sizes > most, math.inf, sizes)))
    result |= {"low": low if low > 0 else None, "high": high if high < math.inf else None}
    if not 0 < middle < math.inf:
        return result | {"is_less": middle == 0}
    loss, *curve = interval(fit.losses(name, middle, product / middle))
    return result | {"size": middle, "tokens": product / middle, "loss": loss, "curve": curve}


def best_sizes(fit: LadderFit, name: str, flops: float) -> Array:
    """The size with the least loss for a budget in each draw [draws], wherever it is."""
    assert fit.token_center is not None, "L(N) has no best size for a budget"
    _, a, b, p, q, g = fit.draws[name].T
    budget = math.log(flops / FLOPS_FACTOR / fit.center / fit.token_center)  # x + y
    # both terms change by the same share of the sum: |b|·exp((a + b·x) / g) = |q|·exp((p + q·y) / g)
    x = (g * np.log(q / b) + p - a + q * budget) / (b + q)
    return np.asarray(fit.center * np.exp(np.clip(x, -500, 500)))
