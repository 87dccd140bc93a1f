"""Ladders with a known truth: losses drawn around E + C·N^−γ, and costs of 6·N·D with 20 tokens per parameter."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from heddle.analysis.ladder.curves import SizeLosses
from heddle.analysis.ladder.predictions import LadderPoints

SIZES = (1e5, 2e5, 4e5, 8e5, 1.6e6)
SEEDS = 3


class Law(NamedTuple):
    """L(N) = floor + factor · (N / 10⁶)^−exponent."""

    floor: float
    factor: float
    exponent: float

    def loss(self, size: float) -> float:
        return float(self.floor + self.factor * (size / 1e6) ** -self.exponent)


LAWS = {"a": Law(1.2, 1.0, 0.3), "b": Law(1.2, 0.92, 0.31)}


def draw_points(
    generator: np.random.Generator,
    laws: Mapping[str, Law] = LAWS,
    *,
    deviation: float = 0.004,
    misfit: float = 0.0,
    sizes: Sequence[float] = SIZES,
) -> LadderPoints:
    """Points of each law. deviation: of a run's log loss over seeds; misfit: of a size's, which more seeds keep."""
    seed_deviation = deviation / math.sqrt(SEEDS)
    noise = math.hypot(seed_deviation, misfit)
    losses = {
        name: SizeLosses(
            list(sizes),
            [law.loss(size) * math.exp(noise * generator.standard_normal()) for size in sizes],
            [SEEDS] * len(sizes),
        )
        for name, law in laws.items()
    }
    counted = [float(size) for size in np.geomspace(min(sizes), 30 * max(sizes), 12)]
    costs = {name: (counted, [training_cost(size) for size in counted]) for name in laws}
    return LadderPoints(losses, costs, seed_deviation)


def training_cost(size: float) -> float:
    return 6 * 20 * size**2
