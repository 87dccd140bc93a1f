"""What a comparison can resolve, and what a narrower interval needs: seeds, time, or held-out text.

The smallest difference that is resolved with probability 0.8 follows from the noncentral t distribution. Seeds narrow
the part of an interval that is the luck of training, and only text narrows the part that is the choice of text: with m
times the text it is 1/√m as wide.
"""

import math
from typing import NamedTuple

from heddle.analysis.comparison.critical_values import pair_critical_value
from heddle.analysis.comparison.simultaneous import Level, PairStatistics, fixed_level, moderated_degrees

POWER = 0.8
MAX_SEEDS = 100


class Need(NamedTuple):
    """What an interval of ± half_width needs of a pair.

    seeds: of both designs in all, None where 100 are too few. text_factor: how many times the held-out text; 1 where
    its text is enough.
    """

    half_width: float
    seeds: int | None
    text_factor: float


def detectable_difference(error: float, degrees_of_freedom: float, critical: float, power: float = POWER) -> float:
    """The difference whose |t| exceeds a critical value with this probability, from its standard error.

    Raises ValueError for a power that is not above the test's own level or not below 1.
    """
    from scipy.special import nctdtr

    def exceeds(noncentrality: float) -> float:
        # t below −critical is as good as impossible where the power is not close to the level
        return float(1 - nctdtr(degrees_of_freedom, noncentrality, critical))

    low, high = 0.0, critical + 1.0
    if not exceeds(low) < power < 1:
        raise ValueError(f"detectable_difference needs a power from the test's level to 1, not {power}")
    while exceeds(high) < power:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) < power else (low, middle)
    return error * high


def smallest_resolvable(statistics: PairStatistics, row: int, column: int, level: Level = fixed_level) -> float | None:
    """The true difference of two designs that these seeds and this text resolve with probability 0.8.

    None where there is no interval. The luck of training and the choice of text add up as in Welch's t.
    """
    half = statistics.half_width(row, column, level)
    if math.isnan(half):
        return None
    parts = []
    if not math.isnan(statistics.seed_half_width(row, column)):
        parts.append((float(statistics.seed_error[row, column]), float(statistics.degrees[row, column])))
    if not math.isnan(statistics.text_half_width(row, column)):
        parts.append((float(statistics.text_error[row, column]), statistics.text_degrees))
    error = math.hypot(*(part for part, _ in parts))
    if error == 0:
        return 0.0
    degrees = error**4 / sum(part**4 / part_degrees for part, part_degrees in parts)
    return detectable_difference(error, degrees, half / error)


def need_for(
    statistics: PairStatistics, row: int, column: int, half_width: float, level: Level = fixed_level
) -> Need | None:
    """What an interval of ± half_width needs; None where fewer than two seeds tell nothing of the spread.

    Where the text makes up more than half of the wanted square, the need is split: more text, so that it is half.
    """
    if statistics.seeds[row, column] < 2:
        return None
    text = statistics.text_half_width(row, column)
    text = 0.0 if math.isnan(text) else text
    text_factor, seed_target = 1.0, math.sqrt(max(0.0, half_width**2 - text**2))
    if 2 * text**2 > half_width**2:
        text_factor, seed_target = 2 * text**2 / half_width**2, half_width / math.sqrt(2)
    return Need(half_width, seeds_for(statistics, row, column, seed_target, level), text_factor)


def seeds_for(
    statistics: PairStatistics, row: int, column: int, seed_half_width: float, level: Level = fixed_level
) -> int | None:
    """The fewest seeds (2 to 100) with which the luck of training adds no more than this half-width, or None.

    The spread is taken to stay as it is.
    """
    designs, variance = len(statistics.names), float(statistics.variance[row, column])

    def is_enough(seeds: int) -> bool:
        degrees = float(moderated_degrees(designs, seeds, (designs - 1) * (seeds - 1)))
        return pair_critical_value(designs, max(degrees, 1.0), level(seeds)) * math.sqrt(variance / seeds) <= (
            seed_half_width
        )

    low, high = 1, 2
    while not is_enough(high):
        if high == MAX_SEEDS:
            return None
        low, high = high, min(2 * high, MAX_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def round_widths_below(half_width: float, count: int = 2) -> list[float]:
    """The next numbers below a half-width in the series 1, 2, 5, 10: 0.015 gives 0.01 and 0.005."""
    if not half_width > 0 or not math.isfinite(half_width):
        return []
    power = math.floor(math.log10(half_width))
    series = [digit * 10.0**exponent for exponent in range(power, power - 3, -1) for digit in (5, 2, 1)]
    return [round(width, 12 - power) for width in series if width < half_width * (1 - 1e-9)][:count]
