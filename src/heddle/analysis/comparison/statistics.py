"""Statistics of a comparison's runs: means, paired differences and their 95 % intervals.

Two sources of chance are covered. Training depends on the seed, and the validation text is one sample of its kind.
With n seeds of paired differences d with standard deviation s, the interval of a difference between designs has

    half-width² = (t(n−1) · s / √n)² + text²

where `text` is the half-width of a block bootstrap over the validation windows (Künsch 1989). With one seed only the
text part exists, and the result's `method` says so.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heddle.errors import DataError

CONFIDENCE = 0.95
RESAMPLES = 2000
BOOTSTRAP_SEED = 20_240_607
Run = Mapping[str, Any]
Windows = npt.NDArray[np.float64]


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

    if not 0 < confidence < 1 or degrees_of_freedom < 1:
        raise ValueError(
            f"t_quantile needs 0 < confidence < 1 and degrees_of_freedom ≥ 1, not {confidence} and {degrees_of_freedom}"
        )
    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))


def seed_half_width(values: Sequence[float]) -> float:
    """Half of the 95 % Student t interval of the mean of n ≥ 2 values, one per seed."""
    deviation = float(np.std(values, ddof=1))
    return t_quantile(CONFIDENCE, len(values) - 1) * deviation / math.sqrt(len(values))


def text_half_width(bits: Windows, sizes: Windows, block_length: int | None = None) -> float | None:
    """Half of the 95 % interval of sum(bits) / sum(sizes) over the choice of text; None below four windows.

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


def finished_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs that finished with a finite number."""
    scored = [run for run in runs if run["status"] == "done" and run["bits_per_byte"] is not None]
    return [run for run in scored if math.isfinite(run["bits_per_byte"])]


def run_seconds(run: Run) -> float:
    """The time of a run from the start of its last process to its end, or of its steps; 0 where it has neither."""
    return float(run.get("wall_seconds") or run.get("seconds") or 0.0)


def mean_bits_per_byte(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean bits per byte of a design's finished runs: mean, low, high (95 %), and in `basis` what they rest on.

    With two seeds or more the interval covers the luck of training on this validation text, with one seed the choice
    of text. All are None where nothing finished. Designs share the text, so compare them by `paired_difference`, not
    by whether their intervals overlap.
    """
    finished = finished_runs(runs)
    missing = f", {len(runs) - len(finished)} of {len(runs)} did not finish" if len(finished) < len(runs) else ""
    if not finished:
        return {"mean": None, "low": None, "high": None, "basis": f"no finished run{missing}"}
    values = [float(run["bits_per_byte"]) for run in finished]
    mean = float(np.mean(values))
    if len(values) > 1:
        return _interval(mean, seed_half_width(values)) | {"basis": f"{len(values)} seeds{missing}"}
    windows = run_windows(finished[0])
    half = None if windows is None else text_half_width(windows[:, 0], windows[:, 1])
    basis = "1 seed, no interval" if half is None else "1 seed, text only"
    return _interval(mean, half) | {"basis": basis + missing}


def paired_difference(
    design_runs: Sequence[Run], baseline_runs: Sequence[Run], sampling: TextSampling = VALIDATION_WINDOWS
) -> dict[str, Any]:
    """Bits per byte of a design minus those of the baseline, seed by seed: below 0 the design is better.

    Returns mean, low, high (95 %), resolved (whether the interval excludes 0), pairs (seeds that both sides finished),
    and the method in words. Without a pair the numbers are None. sampling: what text the runs' windows are.
    Raises DataError where the two runs of a pair were measured on different text.
    """
    design_by_seed = {run["seed"]: run for run in finished_runs(design_runs)}
    baseline_by_seed = {run["seed"]: run for run in finished_runs(baseline_runs)}
    seeds = [run["seed"] for run in design_runs if run["seed"] in design_by_seed and run["seed"] in baseline_by_seed]
    all_seeds = sorted({run["seed"] for run in (*design_runs, *baseline_runs)})
    if not seeds:
        numbers = {"mean": None, "low": None, "high": None, "resolved": False, "pairs": 0}
        return numbers | {"method": "No seed was finished by both designs, so there is no difference to give."}
    pairs = [(design_by_seed[seed], baseline_by_seed[seed]) for seed in seeds]
    differences = [float(run["bits_per_byte"]) - float(reference["bits_per_byte"]) for run, reference in pairs]
    text = _text_half_width_of_pairs(pairs, sampling)
    half = math.hypot(seed_half_width(differences), text or 0.0) if len(pairs) > 1 else text
    interval = _interval(float(np.mean(differences)), half)
    resolved = half is not None and not interval["low"] <= 0 <= interval["high"]
    method = describe_method(len(pairs), text is not None, sampling)
    method += describe_unpaired([seed for seed in all_seeds if seed not in seeds])
    return interval | {"resolved": resolved, "pairs": len(pairs), "method": method}


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile: half of the samples lie between them."""
    low, high = np.quantile(samples, (0.25, 0.75))
    return float(low), float(high)


def ranges_overlap(first: Sequence[float] | None, second: Sequence[float] | None) -> bool:
    """Whether two ranges (low, high) share a point; also where one was not measured."""
    return first is None or second is None or (first[0] <= second[1] and second[0] <= first[1])


def _interval(mean: float, half: float | None) -> dict[str, Any]:
    if half is None:
        return {"mean": mean, "low": None, "high": None}
    return {"mean": mean, "low": mean - half, "high": mean + half}


def run_windows(run: Run) -> Windows | None:
    """[windows, 2]: bits and bytes of each validation window, or None where the run has none."""
    table = np.asarray(run.get("windows") or [], dtype=np.float64)
    return table if table.ndim == 2 and len(table) and np.isfinite(table).all() else None


def _text_half_width_of_pairs(pairs: Sequence[tuple[Run, Run]], sampling: TextSampling) -> float | None:
    """The half-width that the choice of text gives to the difference averaged over the seeds."""
    tables = []
    for run, reference in pairs:
        windows, reference_windows = run_windows(run), run_windows(reference)
        if windows is None or reference_windows is None:
            return None
        if windows.shape != reference_windows.shape or not np.array_equal(windows[:, 1], reference_windows[:, 1]):
            raise DataError(
                f"The runs of seed {run['seed']} were measured on different validation windows; "
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
        f" Left out, because one of the two sides gave no number: {names}. "
        "The mean of a side that failed looks better than it is."
    )


def describe_method(pairs: int, text: bool, sampling: TextSampling, designs: int = 2) -> str:
    """How an interval over `pairs` seeds was computed, of a pair or of all pairs of several designs at once."""
    if pairs == 1 and not text:
        return f"One seed and too little text for {sampling.description}: no interval can be given."
    at_once = f" for all pairs of {designs} designs at once" if designs > 2 else ""
    if pairs == 1:
        return (
            f"One seed: the 95 % interval{at_once} ({sampling.description}) covers the choice of text "
            "but not the luck of training. Another seed may give a result outside it."
        )
    statistic = "studentized range" if designs > 2 else "Student t"
    method = f"95 % interval{at_once}: {statistic} over {pairs} differences paired by seed"
    method += f", widened by {sampling.description}." if text else ", on this text only."
    if pairs == 2:
        method += " With two seeds it is very wide; a third seed narrows it most."
    return method
