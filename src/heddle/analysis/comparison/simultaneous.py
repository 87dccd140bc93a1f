"""Intervals for all pairs of designs at once, so that with 95 % none of a report's intervals misses the truth.

Two designs are compared by Student's t over the n differences paired by seed. With k designs the spread of a pair is
estimated from its own differences and from those of all pairs, since few seeds tell little of one pair's own:

    variance = w · own + (1 − w) · mean over all pairs,    w = (n − 1) / (n − 1 + 4)

The 4 says how far spreads are expected to differ: by a factor of about 1.5 (a prior of 4 degrees of freedom, as in
moderated t, Smyth 2004). The degrees of freedom are Satterthwaite's (1946), less a tenth, for which simulated intervals
cover 95 %. The critical value is that of the studentized range: it holds for all pairs, also for those chosen because
they looked best. The choice of text has its own standard error, from a block bootstrap of all designs on the same
blocks, and its own critical value; the two half-widths are added as squares.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from heddle.analysis.comparison.critical_values import FloatArray, pair_critical_value
from heddle.analysis.comparison.statistics import (
    CONFIDENCE,
    VALIDATION_WINDOWS,
    Run,
    TextSampling,
    finished_runs,
    resampled_ratios,
    run_windows,
)
from heddle.errors import DataError

ALPHA = 1 - CONFIDENCE
PRIOR_DEGREES = 4.0
DEGREES_SHARE = 0.9
Level = Callable[[int], float]  # the nominal level at a number of seeds


def fixed_level(seeds: int) -> float:
    """The level of a comparison whose number of seeds was chosen in advance."""
    return ALPHA


@dataclass(frozen=True)
class PairStatistics:
    """Differences of designs (rows) minus others (columns), each [designs, designs]; nan where there is none.

    seeds: that both finished; mean: of the differences; variance: of one seed's difference; degrees: of this variance;
    effects: [designs], each design's loss apart from the luck that a seed brings to all; run_variance: of one run apart
    from that luck, from all pairs, with pooled_degrees; text_error: the standard error over the choice of text, with
    text_degrees.
    """

    names: tuple[str, ...]
    seeds: npt.NDArray[np.int64]
    mean: FloatArray
    variance: FloatArray
    degrees: FloatArray
    effects: FloatArray
    run_variance: float
    pooled_degrees: float
    text_error: FloatArray
    text_degrees: float

    @property
    def leader(self) -> int | None:
        """The design with the lowest loss, the first of several; None where none has a loss."""
        return None if np.isnan(self.effects).all() else int(np.nanargmin(self.effects))

    @cached_property
    def seed_error(self) -> FloatArray:
        """The standard error of the mean over the luck of training."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.variance / self.seeds)

    def seed_half_width(self, row: int, column: int, level: Level = fixed_level) -> float:
        """Half of the interval over the luck of training; nan below two seeds."""
        if self.seeds[row, column] < 2:
            return float("nan")
        alpha = level(int(self.seeds[row, column]))
        critical = pair_critical_value(len(self.names), self.degrees[row, column], alpha)
        return critical * float(self.seed_error[row, column])

    def half_widths(self, level: Level = fixed_level) -> FloatArray:
        """`half_width` of every pair, [designs, designs]."""
        halves = np.full(self.mean.shape, np.nan)
        for seeds in np.unique(self.seeds[self.seeds >= 2]):
            # pairs with the same number of seeds have the same degrees of freedom
            row, column = np.argwhere(self.seeds == seeds)[0]
            critical = pair_critical_value(len(self.names), self.degrees[row, column], level(int(seeds)))
            halves = np.where(self.seeds == seeds, critical * self.seed_error, halves)
        if math.isnan(self.text_degrees):
            return halves
        text = pair_critical_value(len(self.names), self.text_degrees, ALPHA) * self.text_error
        return np.where(np.isnan(halves), text, np.hypot(halves, np.nan_to_num(text)))

    def text_half_width(self, row: int, column: int) -> float:
        """Half of the interval over the choice of text; nan without text."""
        if np.isnan(self.text_error[row, column]):
            return float("nan")
        return pair_critical_value(len(self.names), self.text_degrees, ALPHA) * float(self.text_error[row, column])

    def half_width(self, row: int, column: int, level: Level = fixed_level) -> float:
        """Half of the interval; with one seed that over the choice of text, nan where that is missing too."""
        seed, text = self.seed_half_width(row, column, level), self.text_half_width(row, column)
        return text if np.isnan(seed) else float(np.hypot(seed, np.nan_to_num(text)))


def pair_statistics(runs: Mapping[str, Sequence[Run]], sampling: TextSampling = VALIDATION_WINDOWS) -> PairStatistics:
    """The statistics of all pairs of designs from their runs, paired by seed.

    Raises DataError where runs of one seed were measured on different text.
    """
    by_seed = {name: {run["seed"]: run for run in finished_runs(of_design)} for name, of_design in runs.items()}
    seeds = sorted({seed for of_design in by_seed.values() for seed in of_design})
    losses = np.full((len(by_seed), len(seeds)), np.nan)
    for row, of_design in enumerate(by_seed.values()):
        for column, seed in enumerate(seeds):
            if seed in of_design:
                losses[row, column] = of_design[seed]["bits_per_byte"]
    text_error, text_degrees = _text_errors(list(by_seed.values()), sampling)
    return seed_statistics(tuple(by_seed), losses, text_error, text_degrees)


def seed_statistics(
    names: tuple[str, ...], losses: FloatArray, text_error: FloatArray | None = None, text_degrees: float = np.nan
) -> PairStatistics:
    """The statistics of all pairs from losses [designs, seeds], nan where a run is missing.

    text_error: [designs, designs], or None: on this text only.
    """
    designs = len(names)
    differences = losses[:, None, :] - losses[None, :, :]
    is_pair = np.isfinite(differences)
    count = is_pair.sum(2)
    differences = np.where(is_pair, differences, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = differences.sum(2) / count
        squares = (np.where(is_pair, differences - mean[..., None], 0.0) ** 2).sum(2)
        own = squares / (count - 1)
    own[count < 2] = np.nan
    upper = np.triu(count >= 2, 1)
    pooled, pooled_degrees = np.nan, _pooled_degrees(losses)
    if upper.any():
        pooled = float(squares[upper].sum() / (count[upper] - 1).sum())
    weight = pooling_weight(count)
    variance = own if designs == 2 else weight * own + (1 - weight) * pooled
    degrees = np.maximum(moderated_degrees(designs, count, pooled_degrees), 1.0)
    variance = np.where((differences == 0).all(2) & (count > 0), 0.0, variance)  # a design against itself
    if text_error is None:
        text_error = np.full((designs, designs), np.nan)
    effects = design_effects(losses)
    return PairStatistics(
        names, count, mean, variance, degrees, effects, pooled / 2, pooled_degrees, text_error, text_degrees
    )


def design_effects(losses: FloatArray) -> FloatArray:
    """[designs]: least squares of loss = design + seed, the seeds' mean 0; nan for a design without a loss.

    Where every design has every seed these are the means. Where a design was dropped early, its mean over the few
    seeds that it has would be compared with means over others.
    """
    cells = np.isfinite(losses)
    effects = np.full(len(losses), np.nan)
    rows, columns = np.nonzero(cells)
    if not len(rows):
        return effects
    if cells[cells.any(1)].all():
        effects[cells.any(1)] = losses[cells.any(1)].mean(1)
        return effects
    system = np.zeros((len(rows) + 1, sum(losses.shape)))
    system[np.arange(len(rows)), rows] = 1
    system[np.arange(len(rows)), len(losses) + columns] = 1
    system[-1, len(losses) :] = 1
    solution = np.linalg.lstsq(system, np.append(losses[cells], 0.0), rcond=None)[0]
    effects[cells.any(1)] = solution[: len(losses)][cells.any(1)]
    return effects


def pooling_weight(seeds: npt.NDArray[np.int64] | int) -> FloatArray:
    """The weight of a pair's own variance."""
    own_degrees = np.maximum(np.asarray(seeds, dtype=np.float64) - 1, 0.0)
    return own_degrees / (own_degrees + PRIOR_DEGREES)


def moderated_degrees(designs: int, seeds: npt.NDArray[np.int64] | int, pooled_degrees: float) -> FloatArray:
    """Degrees of freedom of a pair's variance; for one pair of two designs those of Student's t."""
    own_degrees = np.maximum(np.asarray(seeds, dtype=np.float64) - 1, 1.0)
    if designs == 2:
        return own_degrees
    weight = pooling_weight(seeds)
    return DEGREES_SHARE / (weight**2 / own_degrees + (1 - weight**2) / max(pooled_degrees, 1.0))


def _pooled_degrees(losses: FloatArray) -> float:
    """Residual degrees of freedom of the model loss = design + seed, over seeds that two designs finished."""
    cells = np.isfinite(losses)
    cells = cells[:, cells.sum(0) > 1]
    return float(cells.sum() - cells.any(1).sum() - cells.shape[1] + 1)


def _text_errors(by_seed: Sequence[Mapping[int, Run]], sampling: TextSampling) -> tuple[FloatArray, float]:
    """([designs, designs] standard errors over the choice of text, degrees of freedom); nan without enough text."""
    designs, degrees = len(by_seed), float("nan")
    errors = np.full((designs, designs), np.nan)
    groups: dict[tuple[int, ...], set[int]] = {}
    shared = {}
    for row in range(designs):
        for column in range(row):
            shared[row, column] = tuple(sorted(by_seed[row].keys() & by_seed[column].keys()))
            groups.setdefault(shared[row, column], set()).update((row, column))
    for seeds, members in groups.items():
        tables = {member: _mean_windows([by_seed[member][seed] for seed in seeds]) for member in members}
        present = {member: table for member, table in tables.items() if table is not None}
        if not seeds or len(present) < 2:
            continue
        first = next(iter(present.values()))
        if any(table.shape != first.shape or not np.array_equal(table[1], first[1]) for table in present.values()):
            raise DataError(
                f"The runs of seed {seeds[0]} were measured on different validation windows; "
                "measure all designs on the same data."
            )
        resampled = {
            member: resampled_ratios(bits, sizes, sampling.block_length) for member, (bits, sizes) in present.items()
        }
        for row, column in shared:
            ratios, others = resampled.get(row), resampled.get(column)
            if shared[row, column] == seeds and ratios is not None and others is not None:
                degrees = ratios.degrees
                errors[row, column] = errors[column, row] = ratios.scale * float((ratios.values - others.values).std())
    return errors, degrees


def _mean_windows(runs: Sequence[Run]) -> FloatArray | None:
    """[2, windows]: mean bits and bytes of each window over runs; None where a run has no windows."""
    tables = [run_windows(run) for run in runs]
    present = [table for table in tables if table is not None]
    if not present or len(present) < len(tables):
        return None
    if any(table.shape != present[0].shape for table in present):
        raise DataError("The seeds were measured on different validation windows; use the same data for all.")
    return np.asarray(np.mean(present, axis=0).T)
