"""The judge's evidence: e-values against integrals and loops, error rates by simulation, levels against papers."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from evidence import judge_streams
from heddle.errors import ConfigError, DataError
from heddle.lab.judge import evidence
from heddle.lab.judge.evidence import (
    EFFECTS,
    LOOK,
    LOOK_LEVEL,
    MAX_PAIRS,
    PLANNED,
    RULES,
    SAFFRON_CANDIDATE,
    WEIGHTS,
    Decision,
    Noise,
    chance,
    e_value,
    first_look,
    gamma,
    improvement_bounds,
    lifted,
    log_evidence,
    needed_sum,
    next_level,
    pairs_to_settle,
    planned_chance,
    planned_test,
    pooled_noise,
    summarize_by_e_bh,
    verdict,
)

KNOWN = Noise(0.5, math.inf)
OWN = Noise(0.5, 5, own=True)


def plain_ratio(differences: Sequence[float], noise: Noise) -> float:
    """The likelihood of pairs and prior sample, integrated over log σ with the prior dσ/σ: each effect against none."""
    degrees = 0.0 if noise.own else noise.degrees

    def likelihood(effect: float) -> float:
        def density(log_sigma: float) -> float:
            sigma = math.exp(log_sigma)
            log_density = -degrees * (log_sigma + (noise.deviation / sigma) ** 2 / 2)
            for value in differences:
                log_density -= log_sigma + ((value - effect * sigma) / sigma) ** 2 / 2
            return math.exp(log_density)

        start = math.log(noise.deviation)
        return sum(
            quad(density, start + low, start + low + 0.5, epsabs=0, epsrel=1e-12)[0] for low in np.arange(-6, 16, 0.5)
        )

    return sum(w * likelihood(g) for g, w in zip(EFFECTS, WEIGHTS, strict=True)) / likelihood(0.0)


@pytest.mark.parametrize(
    ("differences", "degrees"),
    [([0.3], 3), ([-1.2], 3), ([0.5, -0.1, 0.9], 7), ([1.5, 1.2, 1.4, 1.9], 31), ([-0.3, -2.0], 15)],
)
def test_the_ratio_is_the_integral_over_the_unknown_deviation(differences: list[float], degrees: int) -> None:
    for noise in (Noise(0.5, degrees), Noise(0.5, degrees, own=True)):
        if not noise.own or len(differences) > 1:
            assert e_value(differences, noise) == pytest.approx(plain_ratio(differences, noise), rel=1e-9)


def test_with_a_known_deviation_it_is_the_product_of_densities() -> None:
    differences = [0.4, 1.1, -0.2, 0.8]
    expected = 0.0
    for effect, weight in zip(EFFECTS, WEIGHTS, strict=True):
        product = 1.0
        for value in differences:
            product *= stats.norm.pdf(value, effect * 0.5, 0.5) / stats.norm.pdf(value, 0, 0.5)
        expected += weight * product
    assert e_value(differences, KNOWN) == pytest.approx(expected, rel=1e-12)
    assert e_value(differences, Noise(0.5, 1e7)) == pytest.approx(expected, rel=1e-4)
    assert WEIGHTS.sum() == pytest.approx(1, abs=1e-12)


def next_mean(of: Callable[[float, float], float], sums: float, squares: float, count: int, degrees: float) -> float:
    """The mean of a function of (Σd, Σd²) after one more pair without effect, given those of `count` pairs."""
    scale = math.sqrt((degrees + squares) / (degrees + count))
    law = degrees + count
    constant = math.lgamma((law + 1) / 2) - math.lgamma(law / 2) - math.log(law * math.pi) / 2

    def integrand(x: float) -> float:
        return math.exp(constant - (law + 1) / 2 * math.log1p(x * x / law)) * of(
            sums + scale * x, squares + (scale * x) ** 2
        )

    edges = [-np.inf, -6, -3, -1.5, 0, 1.5, 3, 6, 12, np.inf]
    return sum(quad(integrand, a, b, epsabs=1e-12, limit=100)[0] for a, b in pairwise(edges))


STATES = [(0.0, 0.0, 0), (1.4, 1.96, 1), (-0.8, 0.64, 1), (4.0, 6.5, 3)]  # Σd, Σd², pairs


@pytest.mark.parametrize(("sums", "squares", "count"), STATES)
def test_without_effect_one_more_pair_leaves_the_mean(sums: float, squares: float, count: int) -> None:
    degrees, level = 12.0, 0.02

    def ratio(s: float, q: float) -> float:
        return math.exp(float(log_evidence(s, q, count + 1, degrees)))

    def planned(s: float, q: float) -> float:
        return float(planned_chance(s, q, count + 1, degrees, level, MAX_PAIRS))

    before = math.exp(float(log_evidence(sums, squares, count, degrees))) if count else 1.0
    assert next_mean(ratio, sums, squares, count, degrees) == pytest.approx(before, rel=1e-8)
    before = float(planned_chance(sums, squares, count, degrees, level, MAX_PAIRS)) if count else level / 2
    after = next_mean(planned, sums, squares, count, degrees)
    assert (after if sums >= 0 else -1) <= before * (1 + 1e-8)  # 0 where Σd ≤ 0, which only takes away
    assert after > 0.8 * before

    def as_if_known(s: float, q: float) -> float:  # planted: an estimated deviation without its degrees of freedom
        return math.exp(min(float(log_evidence(s, q, count + 1, math.inf)), 7.0))

    if not count:
        assert next_mean(as_if_known, 0, 0, 0, degrees) > 1.05


@pytest.mark.parametrize("noise", [Noise(1.0, 9), KNOWN])
def test_a_worse_proposal_never_has_more_evidence(noise: Noise) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        differences = rng.normal(rng.normal(), 1, rng.integers(1, MAX_PAIRS + 2))
        lower = (differences - rng.exponential()).tolist()
        for level in (None, 0.01):
            assert e_value(lower, noise, level) <= e_value(differences.tolist(), noise, level) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_planned_test_is_student_s_whatever_the_unit_and_the_pooled_spread(seed: int) -> None:
    draw, level = np.random.default_rng(seed), 0.02
    values = draw.normal(1.5, 1.0, MAX_PAIRS)
    p = stats.ttest_1samp(values, 0, alternative="greater").pvalue
    found = e_value(values.tolist(), OWN, level)
    rest = (1 - PLANNED) * e_value(values.tolist(), OWN)
    assert found == pytest.approx((p <= PLANNED * level) / level + rest, rel=1e-12)
    assert e_value((values * 1000).tolist(), Noise(0.001, 3, own=True), level) == pytest.approx(found, rel=1e-9)
    assert e_value(values[:-1].tolist(), OWN, level) == (1 - PLANNED) * e_value(values[:-1].tolist(), OWN)
    assert e_value([0.0] * MAX_PAIRS, OWN, level) < 1  # runs that are equal in every bit
    assert e_value([0.3] * MAX_PAIRS, OWN, level) > 1 / level


def test_without_effect_one_more_pair_leaves_the_mean_of_the_own_ratio() -> None:
    """Given the ratios of two pairs, the third over their length is Student's t of 2 degrees, whatever σ."""
    sums, squares = 0.9, 1.3

    def after(x: float) -> float:
        scaled = x * math.sqrt(squares / 2)
        return math.exp(float(log_evidence(sums + scaled, squares + scaled**2, 3, 0))) * float(stats.t.pdf(x, 2))

    before = math.exp(float(log_evidence(sums, squares, 2, 0)))
    edges = [-np.inf, -9, -3, -1, 0, 1, 3, 9, np.inf]
    assert sum(quad(after, a, b, epsabs=1e-12)[0] for a, b in pairwise(edges)) == pytest.approx(before, rel=1e-8)
    # and the first pair: only its sign is known
    signs = [math.exp(float(log_evidence(sign, 1.0, 1, 0))) for sign in (-1.0, 1.0)]
    assert np.mean(signs) == pytest.approx(1, rel=1e-9)


def ever_better(noise: Noise, level: float, trials: int = 4000) -> float:
    """The share of null proposals that pass, whose pairs spread 1 to 4 times as much as the ledger's runs did."""
    draw, passed = np.random.default_rng(2), 0
    for _ in range(trials):
        values = (draw.exponential(1) + 1) * draw.standard_normal(MAX_PAIRS)
        if noise.own:  # only at the planned pairs, which most of the level is for; L adds at most the rest
            passed += bool(planned_test(values.sum(), (values**2).sum(), MAX_PAIRS, level))
        else:
            passed += values.sum() >= needed_sum(MAX_PAIRS, noise.degrees, level)
    return passed / trials


def test_proposals_that_spread_more_break_the_pooled_level_and_not_their_own() -> None:
    level = 0.05
    assert ever_better(OWN, level) <= PLANNED * level + 3 * math.sqrt(level / 4000)
    assert ever_better(Noise(1.0, math.inf), level) > 2 * level


def test_own_bounds_are_student_s_at_the_planned_pairs() -> None:
    values = np.array([0.2, 0.5, 0.1, 0.6, 0.3, 0.35, 0.2, 0.4])
    low, high = improvement_bounds(values.tolist(), OWN, 0.05)
    half = stats.t.ppf(1 - PLANNED * 0.025, 7) * values.std(ddof=1) / math.sqrt(8)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), rel=1e-6)
    assert improvement_bounds([0.3], OWN) == (-math.inf, math.inf)
    later = [*values, *values]
    low, high = improvement_bounds(later, OWN, 0.05)
    assert e_value((np.array(later) - low).tolist(), OWN, 0.025) == pytest.approx(40, rel=1e-6)


def test_a_lifted_peak_has_the_mean_of_an_e_value() -> None:
    mean = quad(lambda x: lifted(math.exp(x)) * math.exp(-x), 0, 1)[0]  # the peak is at least 1 / p with probability p
    mean += quad(lambda x: lifted(math.exp(x)) * math.exp(-x), 1, 700)[0]
    assert mean == pytest.approx(1 - 1 / 700, abs=1e-4)
    assert lifted(500.0) < 500
    assert lifted(0.2) == 0.5


def test_a_first_look() -> None:
    """By a run's spread: a pair's over the square root of 2, and that of the incumbent's mean besides."""
    noise, reference = Noise(math.sqrt(2), 1e9, own=True), [1.0, 3.0]
    spread = math.sqrt(1.5)
    assert first_look(2 - (LOOK + 0.01) * spread, reference, noise) is None
    assert first_look(2 - (LOOK - 0.01) * spread, reference, noise) == "no clear difference"
    worst = float(stats.norm.ppf(1 - LOOK_LEVEL)) * spread
    assert first_look(2 + worst - 0.01, reference, noise) == "no clear difference"
    assert first_look(2 + worst + 0.01, reference, noise) == first_look(math.inf, reference, noise) == "worse"


def false_rates(
    level: float,
    draw: Callable[[np.random.Generator, int], Any] = lambda rng, trials: rng.standard_normal((trials, MAX_PAIRS)),
    degrees: float = math.inf,
    own_deviation: bool = False,
    trials: int = 10_000,
) -> tuple[float, float]:
    """(share of proposals without effect whose e ever reaches 1 / level, 3 standard errors above the level)."""
    rng = np.random.default_rng(1)
    deviations = np.sqrt(rng.chisquare(degrees, trials) / degrees) if degrees < math.inf else np.ones(trials)
    differences = draw(rng, trials)
    reached = np.zeros(trials, dtype=bool)
    for count in range(1, MAX_PAIRS + 1):
        values = differences[:, :count]
        spread = values.std(1, ddof=1) if own_deviation and count > 1 else deviations
        values = values / spread[:, None]
        sums, squares = values.sum(1), (values**2).sum(1)
        e = np.exp(np.minimum(log_evidence(sums, squares, count, degrees), 600)) / 2
        e += planned_chance(sums, squares, count, degrees, level, MAX_PAIRS) / level
        reached |= e >= 1 / level
    return float(reached.mean()), level + 3 * math.sqrt(level / trials)


def reused(rng: np.random.Generator, trials: int) -> Any:
    """Planted: each block of windows is read four times."""
    return np.repeat(rng.standard_normal((trials, 2)), 4, axis=1)


def test_the_level_holds_at_every_pair_and_faults_break_it() -> None:
    for degrees, trials in ((15, 1000), (math.inf, 10_000)):
        rate, bound = false_rates(0.05, degrees=degrees, trials=trials)
        assert 0.02 < rate <= bound
    rate, bound = false_rates(0.05, reused)
    assert rate > 2 * bound
    rate, bound = false_rates(0.05, own_deviation=True)
    assert rate > 2 * bound


def test_what_other_noise_does_to_the_level() -> None:
    """Heavy tails do little, wider runs of the proposal more; a deviation that is 1.5 times too small breaks it."""
    heavy, bound = false_rates(0.05, lambda rng, trials: rng.standard_t(4, (trials, MAX_PAIRS)) / math.sqrt(2))
    assert heavy <= bound
    wider, _ = false_rates(0.05, lambda rng, trials: rng.normal(0, math.sqrt(1.625), (trials, MAX_PAIRS)))
    small, _ = false_rates(0.05, lambda rng, trials: rng.normal(0, 1.5, (trials, MAX_PAIRS)))
    assert bound < small < 3 * bound
    assert wider < small
    large, _ = false_rates(0.05, lambda rng, trials: rng.normal(0, 1 / 1.5, (trials, MAX_PAIRS)))
    assert large < 0.02


def test_bounds_are_where_the_evidence_reaches_the_level() -> None:
    noise, differences = Noise(0.4, 15), np.array([0.2, 0.5, 0.1, 0.6])
    low, high = improvement_bounds(differences.tolist(), noise)
    assert low < differences.mean() < high
    assert e_value((differences - low).tolist(), noise) == pytest.approx(40, rel=1e-6)
    assert e_value((high - differences).tolist(), noise) == pytest.approx(40, rel=1e-6)
    assert improvement_bounds([], noise) == (-math.inf, math.inf)
    assert improvement_bounds([-math.inf], noise) == (-math.inf, math.inf)


def test_pooled_noise_is_the_spread_of_pairs() -> None:
    losses = np.array([[1.0, 1.4, 1.1], [0.9, 1.2, 1.3]])
    one = pooled_noise(losses[:1])
    assert one.deviation == pytest.approx(math.sqrt(2) * float(np.std(losses[0], ddof=1)))
    both = pooled_noise(losses)  # two designs: the spread of their differences
    assert both.deviation == pytest.approx(float(np.std(losses[0] - losses[1], ddof=1)))
    assert one.degrees == both.degrees == 2
    later = both.with_pairs([0.1, 0.4, 0.2])
    assert later.degrees == 4
    expected = (2 * both.deviation**2 + 2 * float(np.var([0.1, 0.4, 0.2], ddof=1))) / 4
    assert later.deviation == pytest.approx(math.sqrt(expected))
    assert both.with_pairs([0.3]) is both
    rng = np.random.default_rng(0)
    squares = [
        pooled_noise(rng.normal(size=(3, 1)) + rng.normal(size=4) + rng.normal(0, 0.5, (3, 4))).deviation ** 2
        for _ in range(2000)
    ]
    assert np.mean(squares) == pytest.approx(0.5, rel=0.06)


def test_the_predicted_chance_is_that_of_effects_drawn_given_the_pairs() -> None:
    rng = np.random.default_rng(0)
    noise, level, differences = Noise(2.0, 20), 0.02, [2.5, 1.0]
    count, total = 2, sum(differences) / 2.0
    effects = rng.normal(total / (count + 1), 1 / math.sqrt(count + 1), 100_000)
    sums = total + rng.normal((MAX_PAIRS - count) * effects, math.sqrt(MAX_PAIRS - count))
    expected = float((sums >= needed_sum(MAX_PAIRS, 20, level)).mean())
    assert chance(differences, noise, level) == pytest.approx(expected, abs=0.006)
    assert chance(differences, noise, 0.0) == 0


def test_pairs_to_settle_have_the_power() -> None:
    pairs = pairs_to_settle(0.4, KNOWN, 0.01)
    assert pairs is not None

    def power(count: int) -> float:
        return float(stats.norm.sf((needed_sum(count, math.inf, 0.01) * 0.5 - count * 0.4) / (0.5 * math.sqrt(count))))

    assert power(pairs) >= 0.8 > power(pairs - 1)
    assert pairs_to_settle(0.0, KNOWN, 0.01) is None
    pairs = pairs_to_settle(0.4, Noise(0.5, 9, own=True), 0.01)
    assert pairs is not None

    def own_power(count: int) -> float:
        return float(stats.nct.sf(stats.t.ppf(1 - PLANNED * 0.01, count - 1), count - 1, 0.8 * math.sqrt(count)))

    assert own_power(pairs) >= 0.8 > own_power(pairs - 1)


def test_verdicts() -> None:
    noise = Noise(1.0, 31)
    assert verdict([], noise, 0.002) is None
    assert verdict([3.0], noise, 0.002) is None
    assert verdict([0.1], noise, 0.002) == "no clear difference"
    strong = [3.0, 2.5, 3.5, 2.8]
    assert verdict(strong, noise, 0.002) == "better"
    assert verdict(strong, noise, 0.0) == "no clear difference"  # no level is left
    assert verdict([-value for value in strong], noise, 0.002) == "worse"
    assert verdict([-math.inf], noise, 0.002) == "worse"
    assert e_value([3.0, -math.inf], noise, 0.002) == 0
    undecided = [1.2] * (MAX_PAIRS - 1) + [0.9]
    assert verdict(undecided, noise, 0.002) == "no clear difference"
    assert verdict(undecided, noise, 0.002, more=MAX_PAIRS) is None
    later = [*undecided, *[1.2] * MAX_PAIRS]  # resubmitted: half of the ratio goes on
    assert e_value(later, noise, 0.002) == pytest.approx(e_value(later, noise) / 2)
    assert verdict(later, noise, 0.002, more=MAX_PAIRS) == "better"


def test_verdicts_by_the_own_spread() -> None:
    noise, level = Noise(1.0, 31, own=True), 0.01
    strong = [3.0, 2.5, 3.5, 2.8, 3.1, 2.2, 3.3, 2.9]
    assert [verdict(strong[:count], noise, level) for count in range(9)] == [None] * 8 + ["better"]
    assert verdict([-1.5], noise, level) == "no clear difference"
    assert verdict([-value for value in strong], noise, level) == "worse"
    wide = [0.4, 7.5, 0.2, 0.9, 6.8, -0.5, 3.0, 0.1]  # as much on average, on a part of the text
    assert verdict(wide, noise, level) == "no clear difference"
    assert verdict(wide, Noise(1.0, 31), level) == "better"  # planted: the pooled spread
    assert verdict([*strong[:7], -30.0], noise, level, more=8) == "no clear difference"
    assert verdict([1.2, 0.8, 2.9, -1.4, 1.1, 2.6, -0.6, 0.9], noise, level, more=8) is None


def random_past(rule: str, seed: int, horizon: int | None, length: int = 30) -> list[Decision]:
    rng, past = np.random.default_rng(seed), list[Decision]()
    for _ in range(length):
        level = next_level(past, 0.1, rule, horizon)
        better = bool(rng.random() < 0.3 and level > 0)
        peak = 1 / level if better else float(rng.exponential(8))
        past.append(Decision(level, sum(d.better for d in past), peak, better))
    return past


@pytest.mark.parametrize("horizon", [None, 40, 20])
@pytest.mark.parametrize("seed", range(3))
def test_levels_are_the_published_ones_and_spend_at_most_alpha(seed: int, horizon: int | None) -> None:
    past = random_past("e-lond", seed, horizon)
    for t, decision in enumerate(past, 1):
        assert decision.level == pytest.approx(0.1 * gamma(t, horizon) * (decision.found + 1), rel=1e-12)
    for rule, is_saffron in (("e-lord", False), ("e-saffron", True)):
        past = random_past(rule, seed, horizon)
        share = first = 1 / (horizon or 100)
        spent, found = 0.0, 0
        for t, decision in enumerate(past, 1):
            rest = 0.1 * (1 - SAFFRON_CANDIDATE if is_saffron else 1) - spent
            level = 0.0 if horizon and t > horizon else share * rest * (found + 1)
            assert decision.level == pytest.approx(min(level, SAFFRON_CANDIDATE) if is_saffron else level, rel=1e-10)
            if not (is_saffron and decision.peak >= 1 / SAFFRON_CANDIDATE):
                spent += decision.level / (found + 1)
            found += decision.better
            share += first * (-(0.5**found) if decision.better else 0.5 ** (t - found))
        assert spent <= 0.1
    assert sum(gamma(t, horizon) for t in range(1, 20_000)) <= 1 + 1e-12


@pytest.mark.parametrize("rule", [*RULES, "without gamma"])
def test_the_false_discovery_rate_of_sharp_evidence(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """e = 1/level with probability `level`, else 0, has mean 1; the proposer sends no effects once two are better."""
    rules: dict[str, Any] = {**RULES, "without gamma": lambda past, alpha, _: alpha * (1 + sum(d.better for d in past))}
    monkeypatch.setattr(evidence, "RULES", rules)
    rng, shares = np.random.default_rng(0), []
    for _ in range(500):
        past, false = list[Decision](), 0
        for _ in range(20):
            level, found = next_level(past, 0.2, rule, 20), sum(d.better for d in past)
            null = found >= 2
            better = bool(not null or rng.random() < level)
            false += null and better
            past.append(Decision(level, found, 1 / level if better else 0.0, better))
        shares.append(false / max(1, sum(d.better for d in past)))
    bound = 0.2 + 3 * float(np.std(shares)) / math.sqrt(500)
    assert (np.mean(shares) <= bound) == (rule != "without gamma")


def test_e_bh_is_the_largest_set_that_its_own_size_allows() -> None:
    values = [60.0, 3.0, 900.0, 0.0, 41.0, 30.0]
    better = summarize_by_e_bh(values, 0.1, 6)
    best = 0
    for size in range(1, 7):
        if sum(e >= 6 / (0.1 * size) for e in values) >= size:
            best = size
    assert best == 4
    assert better == [e >= 6 / (0.1 * best) for e in values]
    assert summarize_by_e_bh([1.0, 2.0], 0.1) == [False, False]


def test_wrong_arguments_are_named() -> None:
    for call, field in (
        (lambda: Noise(0.0, 3), "deviation"),
        (lambda: Noise(1.0, 0), "degrees"),
        (lambda: pooled_noise([[1.0]]), "losses"),
        (lambda: e_value([math.inf], KNOWN), "differences"),
    ):
        with pytest.raises(DataError, match=field):
            call()
    with pytest.raises(ConfigError, match="rule e-lon"):
        next_level([], 0.1, "e-lon")
    with pytest.raises(ConfigError, match="alpha"):
        next_level([], 1.0)


def test_streams_on_the_noise_of_real_runs_hold_and_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_streams, "PROPOSALS", 8)

    def rates(proposer: str, own: bool = True, leading: bool = False, **noise: float) -> dict[str, float]:
        source = judge_streams.Source.read(np.random.default_rng(0), **noise)
        assert min(source.tables[0].shape) >= 64
        outcome = judge_streams.run_streams(source, proposer, streams=100, own=own, leading=leading)
        return judge_streams.error_rates(outcome)

    assert rates("adversarial")["worst_moment_upper_95"] <= 0.12
    assert rates("adversarial", leading=True)["worst_moment_upper_95"] <= 0.12
    with monkeypatch.context() as patch:
        inner = judge_streams.Leads.look

        def look(leads: judge_streams.Leads, trials: judge_streams.Trials) -> Any:
            looked = inner(leads, trials)
            gains = leads.gains[looked] / trials.deviation[looked]
            for total, value in ((trials.sums, gains), (trials.squares, gains**2), (trials.counts, 1)):
                total[looked] += (MAX_PAIRS - 1) * value
            return looked

        patch.setattr(judge_streams.Leads, "look", look)
        assert rates("null", leading=True)["fdr"] > 0.12  # planted: what chose the proposal counts as its pairs
    monkeypatch.setattr(judge_streams.Source, "kinds", lambda source, count: (source.rng.random(count) < 0.2) * 1 + 1)
    assert rates("null", spread=20.0)["fdr_upper_95"] <= 0.12
    assert rates("null", own=False, spread=20.0)["fdr"] > 0.2  # planted: a spread that is not the proposal's
    monkeypatch.setattr(judge_streams, "next_level", lambda past, alpha, *_: alpha * (1 + sum(d.better for d in past)))
    assert rates("null")["fdr"] > 0.12  # planted: levels that spend alpha on every proposal


def test_what_leads_makes_a_better_model_than_what_is_shown_to_be_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_streams, "PROPOSALS", 20)

    def share(leading: bool) -> float:
        source = judge_streams.Source.read(np.random.default_rng(0))
        outcome = judge_streams.run_streams(source, "harmful", streams=60, leading=leading)
        return float(outcome.quality.sum() / np.maximum(outcome.effects, 0).sum())

    leading = share(True)
    assert leading > share(False) + 0.1
    monkeypatch.setattr(judge_streams, "LEAD", -9.0)
    assert share(True) < leading - 0.1  # planted: everything is adopted


def test_a_lead_is_the_mean_of_first_runs_and_pairs_by_their_variances() -> None:
    """Many draws: the weights have the least spread, and the unit is that of a run."""
    rng, noise = np.random.default_rng(0), Noise(math.sqrt(2) * 3.0, math.inf, own=True)
    draws = [
        (rng.normal(-6.0, 3.0, 4), rng.normal(0.0, 3.0, 6), rng.normal(6.0, noise.deviation, 2)) for _ in range(4000)
    ]
    leads = np.array([evidence.lead(list(looks), list(runs), list(pairs), noise) for looks, runs, pairs in draws])
    assert abs(leads.mean() - 2.0) < 0.05
    looks, pairs = 1 / (1 / 4 + 1 / 6), 1.0
    assert abs(leads.std() * math.sqrt(looks + pairs) - 1) < 0.05
    assert evidence.lead([1.0, math.inf], [2.0], [], noise) == -math.inf
    assert evidence.lead([1.0], [2.0], [-math.inf], noise) == -math.inf


def test_first_runs_go_on_while_they_promise_a_lead() -> None:
    noise, reference = Noise(math.sqrt(2), 30.0, own=True), [10.0] * 6
    assert evidence.leading_look([15.0], reference, noise) == "worse"
    assert evidence.leading_look([10.2], reference, noise) == "another run"
    assert evidence.leading_look([10.4], reference, noise) == "no clear difference"
    assert evidence.leading_look([9.0, 9.0, 9.0], reference, noise) == "another run"
    assert evidence.leading_look([9.0, 9.0, 9.0, 15.0], reference, noise) == "no clear difference"
    assert evidence.leading_look([9.0] * 4, reference, noise) is None
    assert evidence.leading_look([9.0, math.inf], reference, noise) == "no clear difference"
