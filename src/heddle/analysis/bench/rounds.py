"""Measurements in rounds: each side takes one timed step at a time, so that noise of the machine affects all alike.

Before and after each round a product is timed. Where it was slow, something else used the machine, and the round is
taken again.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

SLOW = 1.15  # times the seconds of the calibration product
CALIBRATION_WIDTH = 1024


class Calibration:
    """A float32 product whose seconds say how fast the machine is. threads: of this process; None: as set."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.x = torch.ones(CALIBRATION_WIDTH, CALIBRATION_WIDTH)
        self.usual = statistics.median(self.seconds() for _ in range(7))

    def seconds(self) -> float:
        """The fastest of three products."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            torch.mm(self.x, self.x)
            times.append(time.perf_counter() - began)
        return min(times)

    def is_slow(self) -> bool:
        """Whether the product is now slower than usual. What is usual is the fastest that was seen."""
        seconds = self.seconds()
        self.usual = min(self.usual, seconds)
        return seconds > SLOW * self.usual


class RoundSeconds(NamedTuple):
    """What rounds gave: by name, the seconds of each; and how many were taken again."""

    seconds: dict[str, list[float]]
    repeated: int

    @property
    def is_noisy(self) -> bool:
        """Whether as many rounds were taken again as were asked for, so that slow ones counted."""
        return self.repeated >= max(map(len, self.seconds.values()), default=1)


def measure_in_rounds(steps: Mapping[str, Callable[[], float]], rounds: int, calibration: Calibration) -> RoundSeconds:
    """Take each step once a round. A round during which the machine was slow is taken again, `rounds` times at most.

    steps: by name, a call that returns its seconds.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    repeated = 0
    for number in range(2 * rounds):
        was_slow, times = calibration.is_slow(), {}
        for offset in range(len(names)):  # none is always the first
            name = names[(number + offset) % len(names)]
            times[name] = steps[name]()
        if (calibration.is_slow() or was_slow) and repeated < rounds:
            repeated += 1
            continue
        for name, time_of_step in times.items():
            seconds[name].append(time_of_step)
        if len(seconds[names[0]]) == rounds:
            break
    return RoundSeconds(seconds, repeated)


class Quartiles(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float


def quartiles_of(values: Sequence[float]) -> Quartiles:
    """The median and quartiles of some values, at least one."""
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median, median, median)
    return Quartiles(median, low, high)


def ratio_of(values: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """The quartiles_of of the ratios of two sides, round by round."""
    return quartiles_of([above / below for above, below in zip(values, reference, strict=True)])
