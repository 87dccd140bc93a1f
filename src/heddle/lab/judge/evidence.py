"""Evidence that a proposal is better than the incumbent, and the level it needs in a stream of proposals.

A pair is one run of the incumbent and one of the proposal, with one fresh seed, measured on one fresh block of held-out
windows; its difference d is the incumbent's loss minus the proposal's. H0: the mean of d over seeds and text is ≤ 0.

What is assumed: given all that was known when the proposal was fixed, its pairs are independent draws of N(δ, σ²) with
a σ of this proposal. Windows are drawn from the whole text and seeds are fresh, so the draws are equal in law however
much the effect varies over text and over seeds; that their means are near Gaussian is the assumption. Nothing is pooled
over proposals: only a ratio of Σd and Σd² counts, with a distribution at δ = 0 that does not depend on σ. Two tests
share the level:

    planned, 0.95 of it: Student's t of exactly N pairs, N fixed beforehand:    Σd / √N ≥ s t(N − 1), s from these pairs
    the likelihood ratio, 0.05 of it:    L = Σ_g w_g exp(−n g²/2) I(g Σd / √Σd²) / I(0),
        I(b) = ∫ u^(n−1) exp(−u²/2 + b u) du over u > 0    (right Haar prior of σ; g = δ/σ)

    e = [n = N and the planned test rejects] / level + 0.05 L

In the order of pairs L is a martingale with respect to the ratios d_i / |d_1| (Pérez-Ortiz et al. 2022; Wang and Ramdas
2023), so by Ville P(e ever ≥ 1 / level | the past) ≤ level; e falls when all d fall, so δ = 0 is the worst case. The
bound holds for the whole sequence of pairs as if all were bought: any rule that buys fewer (futility, a first look,
which use the pooled spread) only takes `better` away. No pair may be read twice.

FDR: let t be true nulls, and found_t what had been called better when t was fixed. When t is better, so are found_t
before it, and no `better` is withdrawn: FDR ≤ Σ E[1{t ever better} / (1 + found_t)] ≤ Σ E[level_t / (1 + found_t)] ≤
alpha, for any levels fixed by the past whose sum of level / (1 + found) is at most alpha: e-LOND and e-LORD. e-SAFFRON
needs P(e ever ≥ 10 | the past) ≤ 0.1 besides, which is Ville again. A resubmission continues the sequence of pairs.

`Noise(own=False)` is the model of older ledgers: σ common to the stream, estimated by s with ν degrees of freedom from
earlier runs. Then A = ν s² + Σd² stands for Σd² and ν + n for n, the planned test asks for Σd ≥ C = s √N t(ν; level/2),
and e = P / level + L / 2 with P the probability under δ = 0, given n pairs, that it will reject: P = T(ν+n; (Σd − C) /
√((N − n) A / (ν+n))). Its evidence is too large where an effect varies over the text. It is still used for `worse` and
for which pairs are worth their cost; no bound over the stream depends on these.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from heddle.errors import ConfigError, DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EFFECTS = np.array([0.1, 0.2, 0.4, 0.8, 1.3, 2.0])  # of the mixture, in deviations of a pair
WEIGHTS = np.array([0.03, 0.05, 0.07, 0.15, 0.5, 0.2])
MAX_PAIRS = 8
PLANNED = 0.95  # of the level: for the test of the planned number of pairs
MIN_CHANCE, MIN_CHANCE_POOLED = 0.005, 0.11  # of being called better within MAX_PAIRS; below it no pair is bought
LOOK = 0.5  # standard deviations by which a first run must be lower than the incumbent's
LOOKS = (-0.3, 0.0, 0.1)  # where proposals that lead are adopted: gains, in a run's deviations, that buy another run
LOOK_LEADING, LEAD = 0.8, 0.3  # such gains after the last of these runs that buy pairs, and that make an incumbent
WORSE_LEVEL, LOOK_LEVEL = 0.05, 0.01  # of one proposal: `worse` is not in the bound over the stream
_NODES = 200  # of an integral


@dataclass(frozen=True)
class Noise:
    """The spread of pairs' differences, from runs that were finished before the proposal was fixed.

    deviation: standard deviation of one pair's difference, in the unit of the losses. degrees: its degrees of freedom;
    inf: it is known. own: evidence uses the spread of the proposal's own pairs, and this spread only serves planning.
    """

    deviation: float
    degrees: float
    own: bool = False  # of older ledgers

    def __post_init__(self) -> None:
        if not 0 < self.deviation < math.inf:
            raise DataError(f"deviation {self.deviation}: must be a finite number above 0; measure runs of other seeds")
        if not self.degrees >= 1:
            raise DataError(f"degrees {self.degrees}: must be at least 1; measure two seeds or more")

    def with_pairs(self, differences: Sequence[float]) -> "Noise":
        """The noise for proposals after this one: each pair of a finished proposal but one adds a degree of freedom."""
        extra = len(differences) - 1
        if extra < 1 or math.isinf(self.degrees):
            return self
        squares = self.degrees * self.deviation**2 + extra * float(np.var(differences, ddof=1))
        return replace(self, deviation=math.sqrt(squares / (self.degrees + extra)), degrees=self.degrees + extra)


def pooled_noise(losses: npt.ArrayLike) -> Noise:
    """Pool [designs, seeds] mean losses to the spread of a pair. Raises DataError.

    One design: its seeds on the same text. Several: a column is one seed and one text for all designs, and what they
    share is removed: (designs − 1)(seeds − 1) degrees of freedom. A difference has twice a run's variance.
    """
    table = np.asarray(losses, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2 or not table.shape[0] or not np.isfinite(table).all():
        raise DataError(f"losses of shape {table.shape}: must be finite, [designs, seeds], with two seeds or more")
    rest = table - table.mean(1, keepdims=True)
    designs, seeds = table.shape
    if designs > 1:
        rest -= rest.mean(0)
    degrees = max(designs - 1, 1) * (seeds - 1)
    return Noise(math.sqrt(2 * float((rest**2).sum()) / degrees), degrees)


def log_evidence(sums: npt.ArrayLike, squares: npt.ArrayLike, count: int, degrees: npt.ArrayLike) -> Floats:
    """log L of Σd and Σd² of `count` ≥ 1 pairs, in deviations of the noise. Any shape, [...]; degrees too; 0: own."""
    sums, squares, degrees = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (sums, squares, degrees)))
    terms, unknown = sums[..., None] * EFFECTS, ~np.isinf(degrees)
    if unknown.any():
        finite = degrees[unknown]
        scale = np.sqrt(finite + squares[unknown])
        ratios = np.divide(sums[unknown], scale, out=np.zeros_like(scale), where=scale > 0)
        terms[unknown] = _log_moment(ratios[..., None] * EFFECTS, (finite + count)[..., None])
    terms = terms + np.log(WEIGHTS) - count * EFFECTS**2 / 2
    top = terms.max(-1)
    result: Floats = top + np.log(np.exp(terms - top[..., None]).sum(-1))
    return result


def _log_moment(slopes: Floats, powers: Floats) -> Floats:
    """log of I(b) / I(0) for I(b) = ∫ u^(m−1) exp(−u²/2 + b u) du over u > 0: the trapezoidal rule in log u."""
    from scipy.special import gammaln

    nodes = _NODES if powers.min() > 4 else 2 * _NODES  # long tails
    peaks = (slopes + np.sqrt(slopes**2 + 4 * powers)) / 2
    widths = 1 / np.sqrt(peaks**2 + powers)
    left, right = 9 * widths + 40 / powers, 9 * widths
    steps = (left + right) / (nodes - 1)
    logs = np.log(peaks)[..., None] - left[..., None] + steps[..., None] * np.arange(nodes)
    u = np.exp(logs)
    heights = powers[..., None] * logs - u**2 / 2 + slopes[..., None] * u
    top = heights.max(-1)
    integral = top + np.log(np.exp(heights - top[..., None]).sum(-1) * steps)
    result: Floats = integral - (powers / 2 - 1) * math.log(2) - gammaln(powers / 2)
    return result


def planned_chance(
    sums: Floats | float,
    squares: Floats | float,
    count: int,
    degrees: Floats | float,
    level: Floats | float,
    pairs: int,
) -> Floats:
    """P under δ = 0 that the test of `level` / 2 at `pairs` ≥ count pairs rejects; sums and squares in deviations."""
    from scipy.special import stdtr

    lacking = needed_sum(pairs, degrees, level) - sums
    if count == pairs:
        chances = (lacking <= 0).astype(np.float64)
    else:
        with np.errstate(invalid="ignore"):  # known deviation: inf / inf
            scale = np.where(np.isinf(degrees), 1.0, (degrees + squares) / (degrees + count))
        chances = stdtr(degrees + count, -lacking / np.sqrt((pairs - count) * scale))
    result: Floats = np.where(np.asarray(sums) > 0, chances, 0.0)
    return result


def needed_sum(pairs: int, degrees: Floats | float, level: Floats | float) -> Floats:
    """The sum of differences, in deviations, that makes `pairs` pairs better, if so many were planned: pooled noise."""
    from scipy.special import stdtrit

    result: Floats = np.asarray(stdtrit(degrees, 1 - np.asarray(level) / 2) * math.sqrt(pairs))
    return result


def planned_test(sums: Floats, squares: Floats, pairs: int, level: Floats | float) -> npt.NDArray[np.bool_]:
    """Whether Student's t of `pairs` ≥ 2 pairs rejects at PLANNED of the level. Any shape."""
    rest = np.maximum(squares - sums**2 / pairs, 0) / (pairs - 1)
    result: npt.NDArray[np.bool_] = (sums > 0) & (sums >= needed_t(pairs, level) * np.sqrt(pairs * rest))
    return result


def needed_t(pairs: int, level: Floats | float) -> Floats:
    """The t of the planned test."""
    from scipy.special import stdtrit

    return np.asarray(stdtrit(pairs - 1, 1 - PLANNED * np.asarray(level)))


def e_value(
    differences: Sequence[float], noise: Noise, level: float | None = None, max_pairs: int = MAX_PAIRS
) -> float:
    """Evidence that the mean of (incumbent − proposal) is above 0; 1 without a pair, 0 after a difference of −inf.

    level, max_pairs: fixed before the first pair; of later pairs, and without a level, the likelihood ratio remains
    alone. A run of the proposal that diverged counts as −inf. Raises DataError for nan or inf.
    """
    if any(math.isnan(value) or value == math.inf for value in differences):
        raise DataError(f"differences {list(differences)}: the incumbent's run diverged; it cannot be compared with")
    if not differences:
        return 1.0
    if -math.inf in differences:
        return 0.0
    values = np.asarray(differences, dtype=np.float64) / noise.deviation
    sums, squares = np.array(values.sum()), np.array((values**2).sum())
    ratio = math.exp(min(float(log_evidence(sums, squares, len(values), 0 if noise.own else noise.degrees)), 700.0))
    if not level:
        return ratio
    if noise.own:
        is_planned = len(values) == max_pairs and bool(planned_test(sums, squares, max_pairs, level))
        return is_planned / level + (1 - PLANNED) * ratio
    planned = 0.0
    if len(values) <= max_pairs:
        planned = float(planned_chance(sums, squares, len(values), noise.degrees, level, max_pairs))
    return planned / level + ratio / 2


def improvement_bounds(
    differences: Sequence[float], noise: Noise, alpha: float = 0.05, max_pairs: int = MAX_PAIRS
) -> tuple[float, float]:
    """(low, high) of the mean difference: a confidence sequence, so it holds at every number of pairs at once.

    Each end holds with 1 − alpha / 2. After a verdict of `better`, alpha = its level keeps the false coverage rate of
    all such intervals (Xu and Ramdas 2024); twice that, of each end. An end that the pairs do not bound is −inf or inf.
    """
    if not differences or not np.isfinite(differences).all():
        return -math.inf, math.inf
    values = np.asarray(differences, dtype=np.float64)
    low, high = _lower_bound(values, noise, alpha / 2, max_pairs), -_lower_bound(-values, noise, alpha / 2, max_pairs)
    return low, high


def _lower_bound(differences: Floats, noise: Noise, alpha: float, max_pairs: int) -> float:
    """The mean below which the evidence that it is larger reaches 1 / alpha."""
    rest, level = differences - differences.mean(), alpha if noise.own else None

    def reached(distance: float) -> bool:
        shifted = rest + distance * noise.deviation
        return e_value(shifted.tolist(), noise, level, max_pairs) >= 1 / alpha

    return float(differences.mean()) - noise.deviation * _smallest(reached, 1e4)


def _smallest(reached: Callable[[float], bool], limit: float) -> float:
    """The smallest number above 0 from which a condition holds; inf above the limit."""
    high = 1.0
    while not reached(high):
        high *= 2
        if high > limit:
            return math.inf
    low = 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def chance(differences: Sequence[float], noise: Noise, level: float, max_pairs: int = MAX_PAIRS) -> float:
    """The predicted probability that `max_pairs` pairs make the proposal better, from those it has.

    The effect has the prior N(0, deviation²). The level holds at any stopping time, so this may stop it.
    """
    count, total = len(differences), sum(differences) / noise.deviation
    if level <= 0 or count >= max_pairs:
        return float(level > 0 and e_value(differences, noise, level, max_pairs) >= 1 / level)
    needed = needed_sum(max_pairs, noise.degrees, level)
    if noise.own:
        needed = needed_t(max_pairs, level) * math.sqrt(max_pairs)
    return float(predicted_chance(total, count, needed, max_pairs))


def predicted_chance(total: Floats | float, count: int | Ints, needed: Floats | float, max_pairs: int | Ints) -> Floats:
    """`chance` from Σd of `count` < max_pairs pairs, in deviations; any shape."""
    from scipy.special import ndtr

    left = max_pairs - count
    expected = np.asarray(total, dtype=np.float64) * (1 + left / (count + 1))
    result: Floats = ndtr((expected - needed) / np.sqrt(left + left**2 / (count + 1)))
    return result


def verdict(
    differences: Sequence[float], noise: Noise, level: float, max_pairs: int = MAX_PAIRS, more: int = 0
) -> str | None:
    """`better`, `worse` or `no clear difference`; None: another pair is worth its cost.

    max_pairs: of the first submission; a resubmission has `more` pairs beyond it. Ask after every pair, in their order:
    only then is `better` decided at a stopping time.
    """
    if level > 0 and e_value(differences, noise, level, max_pairs) >= 1 / level:
        return "better"
    pooled = replace(noise, own=False)
    worse_level = WORSE_LEVEL - LOOK_LEVEL if noise.own else WORSE_LEVEL
    if -math.inf in differences or e_value([-value for value in differences], pooled) >= 1 / worse_level:
        return "worse"
    least, ahead = (MIN_CHANCE if noise.own else MIN_CHANCE_POOLED), max_pairs + more
    if len(differences) >= ahead:
        return "no clear difference"
    if noise.own:  # beyond the planned pairs the likelihood ratio remains, which takes about a tenth of its share
        ahead, level = (max_pairs, level) if len(differences) < max_pairs else (ahead, level * (1 - PLANNED) / 10)
    if chance(differences, noise, level, ahead) < least:
        return "no clear difference"
    return None


def first_look(loss: float, reference: Sequence[float], noise: Noise) -> str | None:
    """A verdict from one run of the proposal on calibration text; None: pairs are worth their cost.

    reference: losses of the incumbent on the same text, from other seeds.
    """
    from scipy.special import stdtr

    spread = noise.deviation * math.sqrt((1 + 1 / len(reference)) / 2)  # a run has half of a pair's variance
    distance = (float(np.mean(reference)) - loss) / spread
    if stdtr(noise.degrees, distance) <= LOOK_LEVEL:
        return "worse"
    return None if distance >= LOOK else "no clear difference"


def leading_look(losses: Sequence[float], reference: Sequence[float], noise: Noise) -> str | None:
    """As `first_look`, of 1 to 4 runs where proposals that lead are adopted; `another run` where one is worth its cost.

    What leads becomes the incumbent without a claim, so more runs decide it, each only while the others promise it.
    """
    if len(losses) == 1 and first_look(losses[0], reference, noise) == "worse":
        return "worse"
    gain = lead(losses, reference, (), noise)
    if len(losses) <= len(LOOKS):
        return "another run" if gain >= LOOKS[len(losses) - 1] else "no clear difference"
    return None if gain >= LOOK_LEADING else "no clear difference"


def lead(losses: Sequence[float], reference: Sequence[float], differences: Sequence[float], noise: Noise) -> float:
    """The estimated gain over the incumbent, in deviations of a run, from first runs and pairs; −inf if one diverged.

    It decides what the next proposals change, and no verdict: the bound over the stream holds for any incumbent.
    """
    values = [float(np.mean(reference)) - float(np.mean(losses)), *differences]
    if not np.isfinite(values).all():
        return -math.inf
    looks = 1 / (1 / len(losses) + 1 / len(reference))  # in pairs it is half of that, as their variance is double
    total = looks * values[0] + sum(differences) / 2
    return total / (looks + len(differences) / 2) / (noise.deviation / math.sqrt(2))


def pairs_to_settle(effect: float, noise: Noise, level: float) -> int | None:
    """How many planned pairs call a true improvement of `effect` better with probability 0.8; None: none can."""
    from scipy.special import nctdtr, ndtri

    if effect <= 0 or level <= 0:
        return None
    size = effect / noise.deviation
    deviations = float(needed_sum(1, noise.degrees, level)) + float(ndtri(0.8))
    pairs = max(2, math.ceil((deviations / size) ** 2))
    if noise.own:  # more, as the spread must be estimated
        pairs = max(2, math.ceil(((float(ndtri(1 - PLANNED * level)) + float(ndtri(0.8))) / size) ** 2))
        while nctdtr(pairs - 1, size * math.sqrt(pairs), float(needed_t(pairs, level))) > 0.2:
            pairs += max(1, pairs // 100)
    return pairs


@dataclass(frozen=True)
class Decision:
    """What the levels of later proposals depend on in an earlier one.

    level: its level. found: proposals called better when it was submitted first. peak: the largest evidence so far.
    better: whether it has been called better, at any time.
    """

    level: float
    found: int
    peak: float
    better: bool


def gamma(number: int, horizon: int | None) -> float:
    """The share of alpha for proposal `number` ≥ 1. The shares of a stream sum to at most 1.

    horizon: how many proposals will be decided; each has an equal share, and later ones none. None: unlimited, the
    shares are 1 / (2.1098 · (t+1) ln²(t+1)).
    """
    if horizon is not None:
        return 1 / horizon if number <= horizon else 0.0
    return 1 / (2.1098 * (number + 1) * math.log(number + 1) ** 2)


def e_lond(past: Sequence[Decision], alpha: float, horizon: int | None = None) -> float:
    """e-LOND (Xu and Ramdas 2024): alpha · gamma · (1 + number called better).

    Of the three, only it needs no more than E[e] ≤ 1 for each true null, whatever the dependence between proposals, as
    in older ledgers.
    """
    return alpha * gamma(len(past) + 1, horizon) * (1 + sum(decision.better for decision in past))


def e_lord(past: Sequence[Decision], alpha: float, horizon: int | None = None) -> float:
    """e-LORD (Zhang et al. 2025): a share of what past levels have left of alpha, times (1 + number called better).

    Assumes the level of a null given everything before; in older ledgers, whose deviation is estimated, only roughly.
    """
    spent = sum(decision.level / (1 + decision.found) for decision in past)
    return _share(past, horizon) * max(alpha - spent, 0.0) * (1 + sum(decision.better for decision in past))


SAFFRON_CANDIDATE = 0.1  # evidence of at least 1 / 0.1 gives its level back


def e_saffron(past: Sequence[Decision], alpha: float, horizon: int | None = None) -> float:
    """e-SAFFRON (Zhang et al. 2025): as e-LORD, but a proposal whose evidence ever was 10 or more spends nothing.

    Assumes what e-LORD does. It has more power where many proposals are better, and less where few are.
    """
    weak = [decision for decision in past if decision.peak < 1 / SAFFRON_CANDIDATE]
    spent = sum(decision.level / (1 + decision.found) for decision in weak)
    rest = max(alpha * (1 - SAFFRON_CANDIDATE) - spent, 0.0)
    level = _share(past, horizon) * rest * (1 + sum(decision.better for decision in past))
    return min(level, SAFFRON_CANDIDATE)


def _share(past: Sequence[Decision], horizon: int | None) -> float:
    """The share of the rest of alpha: 1 / horizon (unlimited: 1/100), less after each `better`, more after each other.

    The changes halve: with k proposals called better the k-th takes 2^−k of the first share away, with k others the
    k-th adds 2^−k.
    """
    if horizon is not None and len(past) >= horizon:
        return 0.0
    found = sum(decision.better for decision in past)
    first = 1 / (horizon or 100)
    return min(first * (1 + 0.5**found - 0.5 ** (len(past) - found)), 1.0)


RULES: dict[str, Callable[[Sequence[Decision], float, int | None], float]] = {
    "e-lond": e_lond,
    "e-lord": e_lord,
    "e-saffron": e_saffron,
}


def next_level(past: Sequence[Decision], alpha: float, rule: str = "e-lond", horizon: int | None = None) -> float:
    """The level of the next proposal; `past` in the order of first submissions. Raises ConfigError."""
    if rule not in RULES:
        raise ConfigError(f"rule {rule}: must be one of {', '.join(RULES)}")
    if not 0 < alpha < 1:
        raise ConfigError(f"alpha {alpha}: must be between 0 and 1")
    return RULES[rule](past, alpha, horizon)


def lifted(peak: float) -> float:
    """An e-value of the largest evidence so far, whatever the stopping rule (Dawid et al. 2011; Vovk and Wang 2021)."""
    if peak <= 1.0001:
        return 0.5
    return float((peak - 1 - math.log(peak)) / math.log(peak) ** 2)


def summarize_by_e_bh(evidence: Sequence[float], alpha: float, horizon: int | None = None) -> list[bool]:
    """Which proposals online e-BH (Fischer et al. 2024) calls better; for the summary at the end only.

    evidence: of each proposal at its last look, or its peak if `lifted`. It may call earlier proposals better than
    their verdicts did, so it may not choose incumbents.
    """
    for found in range(len(evidence), 0, -1):
        better = [e * alpha * gamma(t, horizon) * found >= 1 for t, e in enumerate(evidence, 1)]
        if sum(better) >= found:
            return better
    return [False] * len(evidence)
