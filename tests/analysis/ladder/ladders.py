"""Ladders with a known truth: losses drawn around E + C·N^−γ, and costs of 6·N·D with 20 tokens per parameter."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from heddle.lab.ladder.fit import SizeLosses
from heddle.lab.ladder.predictions import LadderPoints

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


RATIOS = (5.0, 10.0, 20.0, 40.0)


def surface_truth(size: float, tokens: float) -> float:
    """L(N, D) of the simulated surfaces; its best sizes have about 20 tokens per parameter."""
    return 1.2 + 0.8 * (size / 1e6) ** -0.36 + 0.9 * (tokens / 2e7) ** -0.28


def draw_surface(
    generator: np.random.Generator,
    names: Sequence[str] = ("a",),
    *,
    deviation: float = 0.004,
    correlation: float = 0.5,
    ratios: Sequence[float] = RATIOS,
) -> LadderPoints:
    """Points of the surface. deviation: of a run's log loss; correlation: of two runs that share a trunk."""
    seed_deviation = deviation / math.sqrt(SEEDS)
    losses = {}
    for name in names:
        trunks, branches = (
            generator.standard_normal((len(SIZES), 1)),
            generator.standard_normal((len(SIZES), len(ratios))),
        )
        luck = math.sqrt(correlation) * trunks + math.sqrt(1 - correlation) * branches
        pairs = [(size, ratio * size) for size in SIZES for ratio in ratios]
        values = [
            surface_truth(*pair) * math.exp(seed_deviation * each) for pair, each in zip(pairs, luck.flat, strict=True)
        ]
        sizes, tokens = zip(*pairs, strict=True)
        losses[name] = SizeLosses(list(sizes), values, [SEEDS] * len(sizes), list(tokens))
    counted = [float(size) for size in np.geomspace(min(SIZES), 30 * max(SIZES), 12)]
    costs = {name: (counted, [6 * ratios[-1] * size**2 for size in counted]) for name in names}
    return LadderPoints(losses, costs, seed_deviation, correlation, ratios[-1])
