"""Statistics of a comparison's runs: means, paired differences and their 95 % intervals.

Two sources of variance are covered. Training depends on the seed, and the validation text is one sample of its kind.
With n seeds of paired differences d with standard deviation s, the interval of a difference between designs has

    half-width² = (t(n−1) · s / √n)² + text²

where `text` is the half-width of a block bootstrap over the validation windows (Künsch 1989). With one seed only the
text part exists, and the result's `method` says so.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from heddle.errors import DataError
from heddle.lab.compare.results import Difference, Interval, MeanLoss, ScoredRun

CONFIDENCE = 0.95
RESAMPLES = 2000
BOOTSTRAP_SEED = 20_240_607
Windows = npt.NDArray[np.float64]
NO_PAIR = "No seed was finished by both designs, so there is no difference."


class TextSampling(NamedTuple):
    """How the measured pieces of text are resampled.

    description: the method, for the report. block_length: neighboring pieces drawn together; None: from their number.
    """

    description: str
    block_length: int | None = None


VALIDATION_WINDOWS = TextSampling("a block bootstrap over validation windows")
TEXT_SPANS = TextSampling("a bootstrap over spans of text", 1)  # far apart, most of them in different documents


def t_quantile(confidence: float, degrees_of_freedom: float) -> float:
    """The t that Student's |T| with these degrees of freedom does not exceed with probability `confidence`."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))


def seed_half_width(values: Sequence[float]) -> float:
    """Half of the 95 % Student t interval of the mean of n ≥ 2 values, one per seed."""
    deviation = float(np.std(values, ddof=1))
    return t_quantile(CONFIDENCE, len(values) - 1) * deviation / math.sqrt(len(values))


def text_half_width(bits: Windows, sizes: Windows, block_length: int | None = None) -> float | None:
    """Half of the 95 % interval of sum(bits) / sum(sizes) over the sampling of the text; None below four windows.

    bits, sizes: [windows], in the order of the text. A circular block bootstrap, because neighboring windows resemble
    each other; block_length is ⌈windows^(1/3)⌉ by default. Its standard deviation is multiplied by a t quantile of
    (blocks − 1) degrees of freedom, so that few windows give a wide interval. It is deterministic.
    """
    resampled = resampled_ratios(bits, sizes, block_length)
    if resampled is None:
        return None
    return t_quantile(CONFIDENCE, resampled.degrees) * resampled.scale * float(resampled.values.std())


class ResampledRatios(NamedTuple):
    """sum(bits) / sum(sizes) on resampled text, [resamples]; scale × its standard deviation is the standard error."""

    values: npt.NDArray[np.float64]
    scale: float
    degrees: int


def resampled_ratios(bits: Windows, sizes: Windows, block_length: int | None = None) -> ResampledRatios | None:
    """The bootstrap of `text_half_width`; None below four windows. It draws the same blocks for any bits."""
    windows = len(bits)
    if windows < 4:
        return None
    block_length = block_length or math.ceil(windows ** (1 / 3))
    blocks = max(2, round(windows / block_length))
    members = (np.arange(windows)[:, None] + np.arange(block_length)) % windows
    starts = np.random.default_rng(BOOTSTRAP_SEED).integers(windows, size=(RESAMPLES, blocks))
    ratios = bits[members].sum(1)[starts].sum(1) / sizes[members].sum(1)[starts].sum(1)
    return ResampledRatios(ratios, math.sqrt(blocks / (blocks - 1)), blocks - 1)


R = TypeVar("R", bound=ScoredRun)


def loss_of(run: ScoredRun) -> float:
    """The bits per byte of a finished run."""
    assert run.bits_per_byte is not None
    return float(run.bits_per_byte)


def finished_runs(runs: Sequence[R]) -> list[R]:
    """The runs that finished with a finite number."""
    return [
        run
        for run in runs
        if run.status == "done" and run.bits_per_byte is not None and math.isfinite(run.bits_per_byte)
    ]


def mean_bits_per_byte(runs: Sequence[ScoredRun]) -> MeanLoss:
    """Mean bits per byte of a design's finished runs, and in `basis` which runs it is a mean of.

    With two seeds or more the interval covers seed variance on this validation text, with one seed the sampling
    error of the text. All are None if nothing finished. Designs share the text, so compare them by `paired_difference`,
    not by whether their intervals overlap.
    """
    finished = finished_runs(runs)
    missing = f", {len(runs) - len(finished)} of {len(runs)} did not finish" if len(finished) < len(runs) else ""
    if not finished:
        return MeanLoss(mean=None, basis=f"no finished run{missing}")
    values = [loss_of(run) for run in finished]
    mean = float(np.mean(values))
    if len(values) > 1:
        return _interval(MeanLoss(mean=mean, basis=f"{len(values)} seeds{missing}"), seed_half_width(values))
    windows = run_windows(finished[0])
    half = None if windows is None else text_half_width(windows[:, 0], windows[:, 1])
    basis = "1 seed, no interval" if half is None else "1 seed, text only"
    return _interval(MeanLoss(mean=mean, basis=basis + missing), half)


def paired_difference(
    design_runs: Sequence[ScoredRun], baseline_runs: Sequence[ScoredRun], sampling: TextSampling = VALIDATION_WINDOWS
) -> Difference:
    """Bits per byte of a design minus the baseline's, seed by seed: below 0 the design is better.

    Without a pair the numbers are None. sampling: how the text of the runs' windows is resampled. Raises DataError
    where the two runs of a pair were measured on different text.
    """
    design_by_seed = {run.seed: run for run in finished_runs(design_runs)}
    baseline_by_seed = {run.seed: run for run in finished_runs(baseline_runs)}
    seeds = [run.seed for run in design_runs if run.seed in design_by_seed and run.seed in baseline_by_seed]
    all_seeds = sorted({run.seed for run in (*design_runs, *baseline_runs)})
    if not seeds:
        return Difference(mean=None, method=NO_PAIR)
    pairs = [(design_by_seed[seed], baseline_by_seed[seed]) for seed in seeds]
    differences = [loss_of(run) - loss_of(reference) for run, reference in pairs]
    text = _text_half_width_of_pairs(pairs, sampling)
    half = math.hypot(seed_half_width(differences), text or 0.0) if len(pairs) > 1 else text
    mean = float(np.mean(differences))
    resolved = half is not None and not mean - half <= 0 <= mean + half
    method = describe_method(len(pairs), text is not None, sampling)
    method += describe_unpaired([seed for seed in all_seeds if seed not in seeds])
    return _interval(Difference(mean=mean, resolved=resolved, pairs=len(pairs), method=method), half)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile: half of the samples lie between them."""
    low, high = np.quantile(samples, (0.25, 0.75))
    return float(low), float(high)


def ranges_overlap(first: Sequence[float] | None, second: Sequence[float] | None) -> bool:
    """Whether two ranges (low, high) share a point; also where one was not measured."""
    return first is None or second is None or (first[0] <= second[1] and second[0] <= first[1])


I = TypeVar("I", bound=Interval)


def _interval(interval: I, half: float | None) -> I:
    """The interval with its ends set."""
    if half is None or interval.mean is None:
        return interval
    return replace(interval, low=interval.mean - half, high=interval.mean + half)


def run_windows(run: ScoredRun) -> Windows | None:
    """[windows, 2]: bits and bytes of each validation window, or None where the run has none."""
    table = np.asarray(run.windows or [], dtype=np.float64)
    return table if table.ndim == 2 and len(table) and np.isfinite(table).all() else None


def _text_half_width_of_pairs(pairs: Sequence[tuple[ScoredRun, ScoredRun]], sampling: TextSampling) -> float | None:
    """The half-width that the sampling error of the text gives to the difference averaged over the seeds."""
    tables = []
    for run, reference in pairs:
        windows, reference_windows = run_windows(run), run_windows(reference)
        if windows is None or reference_windows is None:
            return None
        if windows.shape != reference_windows.shape or not np.array_equal(windows[:, 1], reference_windows[:, 1]):
            raise DataError(
                f"The runs of seed {run.seed} were measured on different validation windows; "
                "measure both designs on the same data."
            )
        tables.append(np.stack([windows[:, 0] - reference_windows[:, 0], windows[:, 1]]))
    if any(table.shape != tables[0].shape for table in tables):
        raise DataError("The seeds were measured on different validation windows; use the same data for all.")
    bits, sizes = np.mean(tables, axis=0)
    return text_half_width(bits, sizes, sampling.block_length)


def describe_unpaired(seeds: Sequence[int]) -> str:
    """A sentence on the seeds that one side of a pair did not finish; empty where there are none."""
    if not seeds:
        return ""
    names = ("seeds " if len(seeds) > 1 else "seed ") + ", ".join(str(seed) for seed in seeds)
    return (
        f" Left out, because one of the two designs has no result: {names}. "
        "A mean without failed runs looks better than it is."
    )


def describe_method(pairs: int, text: bool, sampling: TextSampling, designs: int = 2) -> str:
    """How an interval over `pairs` seeds was computed, of a pair or of all pairs of several designs at once."""
    if pairs == 1 and not text:
        return f"One seed and too little text for {sampling.description}: no interval can be given."
    at_once = f" for all pairs of {designs} designs at once" if designs > 2 else ""
    if pairs == 1:
        return (
            f"One seed: the 95 % interval{at_once} ({sampling.description}) covers the sampling error of the text "
            "but not seed variance. Another seed may give a result outside it."
        )
    statistic = "studentized range" if designs > 2 else "Student t"
    method = f"95 % interval{at_once}: {statistic} over {pairs} differences paired by seed"
    method += f", widened by {sampling.description}." if text else ", on this text only."
    if pairs == 2:
        method += " With two seeds it is very wide; a third seed narrows it most."
    return method


# Critical values of Student's t for one pair of designs, and for all pairs of several designs at once.
#
# With k designs the largest |t| of all pairs is the studentized range of k means over √2 (Tukey 1953), distributed as
#
#     P(range > q) = ∫ f_ν(s) · (1 − W(q s)) ds,    W(w) = k ∫ φ(z) (Φ(z) − Φ(z − w))^(k−1) dz
#
# where f_ν is the density of the estimated standard deviation with ν degrees of freedom. scipy has it too; it takes
# seconds at the small levels that repeated looks need.


FloatArray = npt.NDArray[np.float64]

_DEVIATION_NODES, _RANGE_NODES = 120, 49
MAX_NORMAL = 8.0  # standard deviations


def pair_critical_value(designs: int, degrees_of_freedom: float, alpha: float) -> float:
    """The value that the largest |t| over all pairs of equal designs exceeds with probability `alpha`.

    designs: at least 2. degrees_of_freedom: of the estimated variance, at least 1.
    """
    return _critical_value(designs, _rounded_down(degrees_of_freedom) if designs > 2 else degrees_of_freedom, alpha)


def _rounded_down(degrees: float) -> float:
    """Round down to a coarse grid, so that few critical values are computed, each slightly too large."""
    step = 0.1 if degrees < 10 else 0.5 if degrees < 50 else 5.0
    return math.floor(degrees / step + 1e-9) * step


@cache
def _critical_value(designs: int, degrees: float, alpha: float) -> float:
    from scipy.special import stdtrit

    if designs == 2:
        return float(stdtrit(degrees, 1 - alpha / 2))
    low, high = 0.0, math.log(float(stdtrit(degrees, 1 - alpha / designs**2)) + 1)
    for _ in range(30):  # bisection of log(1 + value)
        middle = (low + high) / 2
        too_small = range_tail(math.sqrt(2) * math.expm1(middle), designs, degrees) > alpha
        low, high = (middle, high) if too_small else (low, middle)
    return math.expm1(high)


def range_tail(value: float, designs: int, degrees_of_freedom: float) -> float:
    """The probability that the studentized range of `designs` equal means exceeds `value`."""
    from scipy.special import ndtr

    log_deviations, density = _deviation_density(degrees_of_freedom)
    normals = np.linspace(-MAX_NORMAL, MAX_NORMAL, _RANGE_NODES)
    weights = np.exp(-(normals**2) / 2) / math.sqrt(2 * math.pi) * (normals[1] - normals[0])
    widths = value * np.exp(log_deviations)
    inside = ndtr(normals) - ndtr(normals - widths[:, None])
    within = designs * (inside ** (designs - 1)) @ weights
    return float(np.clip(1 - within, 0, 1) @ density)


@cache
def _deviation_density(degrees: float) -> tuple[FloatArray, FloatArray]:
    """(log of the estimated over the true standard deviation, its probability) at nodes that cover all of it."""
    low = -28 / degrees - 6 / math.sqrt(2 * degrees)
    high = min(2.2, 8 / math.sqrt(2 * degrees))
    nodes = np.linspace(low, high, _DEVIATION_NODES)
    log_density = degrees * (nodes - np.expm1(2 * nodes) / 2)
    density = np.exp(log_density)
    return nodes, density / density.sum()


# Simultaneous intervals for all pairs: with probability 95 % none of a report's intervals misses the truth.
#
# Two designs are compared by Student's t over the n differences paired by seed. With k designs the spread of a pair is
# estimated from its own differences and from those of all pairs, since few seeds say little about one pair's own:
#
#     variance = w · own + (1 − w) · mean over all pairs,    w = (n − 1) / (n − 1 + 4)
#
# The 4 says how far spreads are expected to differ: by a factor of about 1.5 (a prior of 4 degrees of freedom, as in
# moderated t, Smyth 2004). The degrees of freedom are Satterthwaite's (1946), less a tenth, for which simulated
# intervals cover 95 %. The critical value is from the studentized range: it holds for all pairs, also for those chosen
# because they looked best. The text has its own standard error, from a block bootstrap of all designs on the same
# blocks, and its own critical value; the two half-widths are added as squares.


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
    effects: [designs], each design's loss without the seeds' effect common to all; run_variance: of one run without
    this effect, from all pairs, with pooled_degrees; text_error: the standard error from sampling the text, with
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
        """The standard error of the mean over seed variance."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.variance / self.seeds)

    def seed_half_width(self, row: int, column: int, level: Level = fixed_level) -> float:
        """Half of the interval over seed variance; nan below two seeds."""
        if self.seeds[row, column] < 2:
            return float("nan")
        alpha = level(int(self.seeds[row, column]))
        critical = pair_critical_value(len(self.names), self.degrees[row, column], alpha)
        return critical * float(self.seed_error[row, column])

    def text_half_width(self, row: int, column: int) -> float:
        """Half of the interval over the sampling of the text; nan without text."""
        if np.isnan(self.text_error[row, column]):
            return float("nan")
        return pair_critical_value(len(self.names), self.text_degrees, ALPHA) * float(self.text_error[row, column])

    def half_width(self, row: int, column: int, level: Level = fixed_level) -> float:
        """Half of the interval; with one seed only over the sampling of the text, nan if that is missing too."""
        seed, text = self.seed_half_width(row, column, level), self.text_half_width(row, column)
        return text if np.isnan(seed) else float(np.hypot(seed, np.nan_to_num(text)))


def pair_statistics(runs: Mapping[str, Sequence[ScoredRun]]) -> PairStatistics:
    """The statistics of all pairs of designs from their runs, paired by seed.

    Raises DataError where runs of one seed were measured on different text.
    """
    by_seed = {name: {run.seed: run for run in finished_runs(of_design)} for name, of_design in runs.items()}
    text_error, text_degrees = _text_errors(list(by_seed.values()))
    return seed_statistics(tuple(by_seed), _losses_by_seed(runs), text_error, text_degrees)


def grown_statistics(
    runs: Mapping[str, Sequence[ScoredRun]], earlier_designs: Sequence[Sequence[str]] = ()
) -> list[PairStatistics]:
    """The statistics of all designs, and of the designs before each addition of others, on the runs of today."""
    groups = [runs, *({name: runs[name] for name in names} for names in earlier_designs)]
    return list(map(pair_statistics, groups))


def widest(
    candidates: Sequence[PairStatistics], name: str, other: str, level: Level = fixed_level
) -> tuple[PairStatistics, int, int]:
    """The statistics with the widest interval of a pair, among those with both designs, and the indices of the two.

    An added design changes the estimate of the spread. An earlier pair could become resolved by this alone, after a
    look at it that already spent its 5 %.
    """
    pairs = [
        (each, each.names.index(name), each.names.index(other)) for each in candidates if {name, other} <= {*each.names}
    ]
    return max(pairs, key=lambda pair: float(np.nan_to_num(pair[0].half_width(pair[1], pair[2], level))))


def _losses_by_seed(runs: Mapping[str, Sequence[ScoredRun]]) -> FloatArray:
    """[designs, seeds]; nan where a design did not finish a seed that another one finished."""
    by_seed = [{run.seed: loss_of(run) for run in finished_runs(of_design)} for of_design in runs.values()]
    seeds = sorted({seed for of_design in by_seed for seed in of_design})
    rows = [[of_design.get(seed, np.nan) for seed in seeds] for of_design in by_seed]
    return np.array(rows, dtype=np.float64).reshape(len(by_seed), len(seeds))


def adjusted_means(runs: Mapping[str, Sequence[ScoredRun]]) -> dict[str, float]:
    """The means of designs that lack seeds which others have, estimated as if they had them, by `design_effects`."""
    losses = _losses_by_seed(runs)
    finished = np.isfinite(losses).sum(1)
    effects = zip(runs, design_effects(losses), finished, strict=True)
    return {name: float(effect) for name, effect, count in effects if 0 < count < losses.shape[1]}


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
    """[designs]: least squares of loss = design + seed, with a mean seed effect of 0; nan for a design without a loss.

    If every design has every seed, these are the means. If a design was dropped early, its mean over the few
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
    """Degrees of freedom of a pair's variance; for two designs the same as Student's t."""
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


def _text_errors(by_seed: Sequence[Mapping[int, ScoredRun]]) -> tuple[FloatArray, float]:
    """([designs, designs] standard errors from sampling the text, degrees of freedom); nan without enough text."""
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
        resampled = {member: resampled_ratios(bits, sizes) for member, (bits, sizes) in present.items()}
        for row, column in shared:
            ratios, others = resampled.get(row), resampled.get(column)
            if shared[row, column] == seeds and ratios is not None and others is not None:
                degrees = ratios.degrees
                errors[row, column] = errors[column, row] = ratios.scale * float((ratios.values - others.values).std())
    return errors, degrees


def _mean_windows(runs: Sequence[ScoredRun]) -> FloatArray | None:
    """[2, windows]: mean bits and bytes of each window over runs; None where a run has no windows."""
    tables = [run_windows(run) for run in runs]
    present = [table for table in tables if table is not None]
    if not present or len(present) < len(tables):
        return None
    if any(table.shape != present[0].shape for table in present):
        raise DataError("The seeds were measured on different validation windows; use the same data for all.")
    return np.asarray(np.mean(present, axis=0).T)
