"""What the runs of a comparison allow to be said: means, paired differences and their 95 % intervals.

Two things could have come out otherwise. Training has luck (another seed), and the validation text is one
sample of its kind. A difference between designs answers for both: with n seeds of paired differences d and a
spread s, half-width² = (t(n−1) · s / √n)² + text², where text is the half-width a block bootstrap over the
validation windows gives (Künsch 1989). With one seed only the text part exists, and the method says so.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from heddle.analysis.comparison import trades, wording
from heddle.errors import DataError

LEVEL = 0.95
RESAMPLES = 2000
SEED = 20_240_607
Run = Mapping[str, Any]
Windows = npt.NDArray[np.float64]


class Sample(NamedTuple):
    """What of the text was measured one by one. block: how many neighbours to draw at once, None by their number."""

    words: str
    block: int | None = None


WINDOWS = Sample("a block bootstrap over validation windows")
STRETCHES = Sample("a bootstrap over stretches of text", 1)  # far from each other, most of other documents


def t_quantile(level: float, freedom: int) -> float:
    """The t for which Student's |T| with `freedom` degrees of freedom is at most t with probability `level`.

    Bisection on the closed finite series in θ = atan(t / √freedom) (Abramowitz & Stegun 26.7.3, 26.7.4).
    """
    if not 0 < level < 1 or freedom < 1:
        raise ValueError(f"t_quantile needs 0 < level < 1 and freedom ≥ 1, not {level} and {freedom}")
    odd = freedom % 2
    # term k of the series is term k−1 times cos²θ · (2k−1)/(2k), or (2k)/(2k+1) where freedom is odd
    steps = np.arange(1, (freedom - odd) // 2)
    ratios = (2 * steps - 1 + odd) / (2 * steps + odd)

    def probability(theta: float) -> float:
        terms = 1 + float(np.cumprod(ratios * math.cos(theta) ** 2).sum())
        if not odd:
            return math.sin(theta) * terms
        series = math.sin(theta) * math.cos(theta) * terms if freedom > 1 else 0.0
        return 2 / math.pi * (theta + series)

    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def seed_half_width(values: Sequence[float]) -> float:
    """Half of the 95 % Student t interval of the mean of n ≥ 2 values, one a seed."""
    spread = float(np.std(values, ddof=1))
    return t_quantile(LEVEL, len(values) - 1) * spread / math.sqrt(len(values))


def text_half_width(bits: Windows, sizes: Windows, block: int | None = None) -> float | None:
    """Half of the 95 % interval of sum(bits) / sum(sizes) over the choice of text; None below four windows.

    bits, sizes: [windows], in the order of the text. Circular block bootstrap with blocks of ⌈windows^(1/3)⌉ or as
    given, because neighbouring windows resemble each other; its spread is taken with a t of (blocks − 1) degrees of
    freedom, so that few windows give a wide interval. The same windows give the same answer.
    """
    windows = len(bits)
    if windows < 4:
        return None
    block = block or math.ceil(windows ** (1 / 3))
    blocks = max(2, round(windows / block))
    members = (np.arange(windows)[:, None] + np.arange(block)) % windows
    starts = np.random.default_rng(SEED).integers(windows, size=(RESAMPLES, blocks))
    ratios = bits[members].sum(1)[starts].sum(1) / sizes[members].sum(1)[starts].sum(1)
    return t_quantile(LEVEL, blocks - 1) * float(ratios.std()) * math.sqrt(blocks / (blocks - 1))


def finished(runs: Sequence[Run]) -> list[Run]:
    """The runs that ended well and gave a finite number."""
    done = [run for run in runs if run["status"] == "done" and run["bits_per_byte"] is not None]
    return [run for run in done if math.isfinite(run["bits_per_byte"])]


def bits_per_byte(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean bits per byte of a design's finished runs, with a 95 % interval and, in `over`, what it covers.

    Two seeds or more: the luck of training on this validation text. One seed: the choice of text only. Nulls
    where nothing finished. Designs share the text, so compare them by `paired_difference`, not by overlap.
    """
    good = finished(runs)
    lost = f", {len(runs) - len(good)} of {len(runs)} did not finish" if len(good) < len(runs) else ""
    if not good:
        return {"mean": None, "low": None, "high": None, "over": f"no finished run{lost}"}
    values = [float(run["bits_per_byte"]) for run in good]
    mean = float(np.mean(values))
    if len(values) > 1:
        return _interval(mean, seed_half_width(values)) | {"over": f"{len(values)} seeds{lost}"}
    windows = _windows(good[0])
    half = None if windows is None else text_half_width(windows[:, 0], windows[:, 1])
    over = "1 seed, no interval" if half is None else "1 seed, text only"
    return _interval(mean, half) | {"over": over + lost}


def paired_difference(
    design_runs: Sequence[Run], baseline_runs: Sequence[Run], sample: Sample = WINDOWS
) -> dict[str, Any]:
    """Bits per byte of a design minus those of the baseline, seed by seed: below 0 the design is better.

    Returns mean, low, high (95 %), resolved (the interval leaves out 0), pairs, and the method in words.
    Seeds that either side did not finish are left out, and the method says so. With no pair: nulls.
    sample: which parts of the text the runs' windows are. Raises DataError where a pair was not measured on the same.
    """
    good = {run["seed"]: run for run in finished(design_runs)}
    base = {run["seed"]: run for run in finished(baseline_runs)}
    seeds = [run["seed"] for run in design_runs if run["seed"] in good and run["seed"] in base]
    every = sorted({run["seed"] for run in (*design_runs, *baseline_runs)})
    note = _left_out([seed for seed in every if seed not in seeds])
    if not seeds:
        nothing = "No seed was finished by both designs, so there is no difference to give."
        empty = {"mean": None, "low": None, "high": None, "resolved": False, "pairs": 0}
        return empty | {"method": nothing}
    pairs = [(good[seed], base[seed]) for seed in seeds]
    differences = [float(mine["bits_per_byte"]) - float(other["bits_per_byte"]) for mine, other in pairs]
    text = _text_part(pairs, sample)
    if len(pairs) > 1:
        half: float | None = math.hypot(seed_half_width(differences), text or 0.0)
    else:
        half = text
    result = _interval(float(np.mean(differences)), half)
    resolved = half is not None and not result["low"] <= 0 <= result["high"]
    method = _method(len(pairs), text is not None, sample) + note
    return result | {"resolved": resolved, "pairs": len(pairs), "method": method}


def _interval(mean: float, half: float | None) -> dict[str, Any]:
    if half is None:
        return {"mean": mean, "low": None, "high": None}
    return {"mean": mean, "low": mean - half, "high": mean + half}


def _windows(run: Run) -> Windows | None:
    """[windows, 2]: bits and bytes of each validation window, or None where they were not kept."""
    table = np.asarray(run.get("windows") or [], dtype=np.float64)
    return table if table.ndim == 2 and len(table) and np.isfinite(table).all() else None


def _text_part(pairs: Sequence[tuple[Run, Run]], sample: Sample) -> float | None:
    """The text's half-width of the difference averaged over the seeds."""
    tables = []
    for mine, other in pairs:
        left, right = _windows(mine), _windows(other)
        if left is None or right is None:
            return None
        if left.shape != right.shape or not np.array_equal(left[:, 1], right[:, 1]):
            raise DataError(
                f"The runs of seed {mine['seed']} were measured on different validation windows; "
                "measure both designs on the same data."
            )
        tables.append(np.stack([left[:, 0] - right[:, 0], left[:, 1]]))
    if any(table.shape != tables[0].shape for table in tables):
        raise DataError("The seeds were measured on different validation windows; use the same data for all.")
    bits, sizes = np.mean(tables, axis=0)
    return text_half_width(bits, sizes, sample.block)


def _left_out(seeds: Sequence[int]) -> str:
    if not seeds:
        return ""
    names = ("seeds " if len(seeds) > 1 else "seed ") + ", ".join(str(seed) for seed in seeds)
    return (
        f" Left out, because one of the two sides gave no number: {names}; "
        "a mean without its failures flatters the side that failed."
    )


def _method(pairs: int, text: bool, sample: Sample) -> str:
    if pairs == 1 and not text:
        return f"One seed and too little text for {sample.words}: no interval can be given."
    if pairs == 1:
        return (
            f"One seed: the 95 % interval ({sample.words}) covers the choice of text "
            "but not the luck of training; another seed may well land outside it."
        )
    method = f"95 % interval: Student t over {pairs} differences paired by seed"
    method += f", widened by {sample.words}." if text else ", on this text only."
    if pairs == 2:
        method += " With two seeds it is very wide; a third narrows it most."
    return method


def verdict(report: Mapping[str, Any]) -> list[str]:
    """A few plain sentences to read first: the lowest loss and how sure, state, recall, longer texts, what failed.

    Says "lowest" of the means as measured and "resolved" only where the paired interval leaves out 0.
    """
    ranking = [design for design in wording.ranked(report) if wording.mean_of(design) is not None]
    if not ranking:
        return ["No design finished a run, so nothing can be compared."]
    certain = [_lowest(ranking), *_one_seed(ranking), *_state(report, ranking)]
    return [*certain, *trades.recall_verdict(report), *trades.longer_verdict(report), *_trouble(report)]


def _lowest(ranking: list[wording.Design]) -> str:
    best, *others = ranking
    value = wording.bits(wording.mean_of(best))
    if not others:
        return f"{best['name']} reaches {value} bits per byte; there is no second design to compare it with."
    differences = {other["name"]: paired_difference(best["runs"], other["runs"]) for other in others}
    sure = [name for name, row in differences.items() if row["resolved"] and row["mean"] < 0]
    unsure = [name for name in differences if name not in sure]
    single = max(row["pairs"] for row in differences.values()) == 1
    start = f"{best['name']} has the lowest bits per byte, {value}"
    # one seed says nothing of the luck of training, so neither may the first sentence
    start, resolved = (
        (start + ", on one seed", "resolved for the choice of text only") if single else (start, "resolved")
    )
    if len(others) == 1 and differences[others[0]["name"]]["mean"] is not None:
        [(name, row)] = differences.items()
        return f"{start}; its difference to {name}, {wording.signed(row)}, is {resolved if sure else 'not resolved'}."
    if not unsure:
        return f"{start}, and the difference to each of the other {len(others)} is {resolved}."
    if not sure:
        return f"{start}, but its lead is not resolved against {wording.listing(unsure)}."
    sides = f"{resolved} against {wording.listing(sure)}, not against {wording.listing(unsure)}"
    return f"{start}; its lead is {sides}."


def _state(report: Mapping[str, Any], ranking: list[wording.Design]) -> list[str]:
    """What the cheapest state costs, and the cheapest whose cost is not resolved, against the baseline."""
    context = wording.shared_context(ranking, "state_bytes")
    sizes = {design["name"]: wording.at(design["state_bytes"], context) for design in ranking}
    known = {name: size for name, size in sizes.items() if size is not None}
    baseline = report["baseline"]
    if context is None or len(known) < 2 or not known.get(baseline):
        return []
    place, full = wording.context_name(context), known[baseline]
    smallest = min(known.values())
    if smallest == max(known.values()):
        return [f"All keep the same state: {wording.scaled(full, 'B')} at {place}."]
    if smallest == full:
        return [f"No state is smaller than that of {baseline}: {wording.scaled(full, 'B')} at {place}."]

    def sentence(name: str) -> str:
        difference = wording.difference_of(report, name)
        cost = f"{wording.signed(difference)} bits per byte ({wording.judgement(difference)})"
        amounts = f"{wording.scaled(known[name], 'B')} against {wording.scaled(full, 'B')} at {place}"
        share = wording.share(known[name], full)
        return f"{name} needs {share} of the state of {baseline} ({amounts}), for {cost}."

    cheapest = min(known, key=lambda name: known[name])
    open_ones = [
        name
        for name, size in known.items()
        if size < full and not wording.judgement(wording.difference_of(report, name)).startswith("worse")
    ]
    bargain = min(open_ones, key=lambda name: known[name], default=cheapest)
    return [sentence(name) for name in dict.fromkeys([cheapest, bargain])]


def _trouble(report: Mapping[str, Any]) -> list[str]:
    counts = {row["name"]: (len(finished(row["runs"])), len(row["runs"])) for row in report["designs"]}
    none = [name for name, (good, _) in counts.items() if not good]
    some = [f"{name} on {good} of {every}" for name, (good, every) in counts.items() if 0 < good < every]
    sentences = []
    if some:
        text = f"Only some seeds finished: {wording.listing(some)}; a mean without the others flatters."
        sentences.append(text)
    return sentences + ([f"No run finished: {wording.listing(none)}."] if none else [])


def _one_seed(ranking: list[wording.Design]) -> list[str]:
    if len(ranking) < 2 or max(len(finished(design["runs"])) for design in ranking) > 1:
        return []
    return ["With one seed no interval covers the luck of training: another seed may change the order."]
