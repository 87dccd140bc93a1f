"""The intervals of a comparison: known values, coverage by simulation, planted bugs, and what may be claimed."""

from typing import Any

import numpy as np
import pytest

from heddle.analysis.comparison import statistics
from heddle.analysis.comparison.statistics import bits_per_byte, paired_difference, t_quantile, text_half_width, verdict
from heddle.errors import DataError
from tests.analysis.comparison import reports

# Student's t as printed in tables: (two-sided level, degrees of freedom, quantile)
TABLE = [
    (0.95, 1, 12.706),
    (0.95, 2, 4.303),
    (0.95, 3, 3.182),
    (0.95, 4, 2.776),
    (0.95, 9, 2.262),
    (0.95, 30, 2.042),
    (0.95, 120, 1.980),
    (0.95, 5000, 1.960),
    (0.99, 2, 9.925),
    (0.99, 10, 3.169),
    (0.90, 5, 2.015),
]


@pytest.mark.parametrize(("level", "freedom", "quantile"), TABLE)
def test_t_is_that_of_the_tables(level: float, freedom: int, quantile: float) -> None:
    assert t_quantile(level, freedom) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(("level", "freedom"), [(0.0, 2), (1.0, 2), (0.95, 0)])
def test_t_refuses_what_has_no_answer(level: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="t_quantile"):
        t_quantile(level, freedom)


def made_run(seed: int, bits: np.ndarray, size: int = 1000) -> dict[str, Any]:
    """A finished run from the bits per byte of each window."""
    windows = [[float(value) * size, size] for value in bits]
    return {"seed": seed, "status": "done", "bits_per_byte": float(bits.mean()), "windows": windows}


def trial(rng: np.random.Generator, seeds: int, luck: float, text: float) -> tuple[list[Any], list[Any]]:
    """Two designs that are equal on average: they differ by the luck of training and by this text alone."""
    base = rng.normal(2.3, 0.4, 48)
    taste = rng.normal(0, text, 48)
    sides: tuple[list[Any], list[Any]] = ([], [])
    for seed in range(seeds):
        shared = rng.normal(0, 0.05)
        for side, liking in zip(sides, (taste, np.zeros(48)), strict=True):
            noise = rng.normal(0, 0.01, 48)
            side.append(made_run(seed, base + liking + shared + rng.normal(0, luck) + noise))
    return sides


def coverage(seeds: int, luck: float, text: float, trials: int = 500) -> float:
    """How often the 95 % interval holds the true difference, 0."""
    rng = np.random.default_rng(1)
    return float(np.mean([not paired_difference(*trial(rng, seeds, luck, text))["resolved"] for _ in range(trials)]))


@pytest.mark.parametrize(
    ("seeds", "luck", "text"), [(2, 0.02, 0.0), (3, 0.02, 0.0), (3, 0.0, 0.1), (3, 0.02, 0.1), (5, 0.02, 0.1)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(seeds: int, luck: float, text: float) -> None:
    # three standard errors of 500 trials below 95 %; the two parts together may be a little too wide
    assert 0.92 < coverage(seeds, luck, text) <= 0.995


def test_z_for_t_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "t_quantile", lambda level, freedom: 1.96)
    assert coverage(3, 0.02, 0.0) < 0.90


def test_leaving_out_the_text_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "text_half_width", lambda *given: 0.0)
    assert coverage(3, 0.0, 0.1) < 0.60


def test_one_seed_does_not_cover_training_and_says_so() -> None:
    assert coverage(1, 0.0, 0.1) > 0.92
    assert coverage(1, 0.05, 0.1) < 0.80
    row = paired_difference(*trial(np.random.default_rng(0), 1, 0.02, 0.1))
    assert row["pairs"] == 1
    assert "not the luck of training" in row["method"]


def test_pairing_by_seed_resolves_what_shared_luck_would_hide() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(2.3, 0.4, 48)
    shared = [0.3, -0.2, 0.1]
    baseline = [made_run(seed, base + shared[seed] + rng.normal(0, 0.001, 48)) for seed in range(3)]
    design = [made_run(seed, base + shared[seed] + 0.02 + rng.normal(0, 0.001, 48)) for seed in (2, 0, 1)]
    row = paired_difference(design, baseline)
    assert row["resolved"]
    assert row["mean"] == pytest.approx(0.02, abs=1e-3)
    # planted bug: paired by place in the list instead of by seed
    unpaired = [{**run, "seed": place} for place, run in enumerate(design)]
    assert not paired_difference(unpaired, baseline)["resolved"]


def test_text_part_is_the_standard_error_where_windows_are_independent() -> None:
    values = np.random.default_rng(0).normal(0, 1, 400)
    half = text_half_width(values, np.ones(400))
    assert half == pytest.approx(1.96 * values.std() / 20, rel=0.2)


def test_text_part_is_wider_where_neighbouring_windows_resemble_each_other() -> None:
    topics = np.repeat(np.random.default_rng(0).normal(0, 1, 50), 8)
    shuffled = np.random.default_rng(1).permutation(topics)
    together, apart = text_half_width(topics, np.ones(400)), text_half_width(shuffled, np.ones(400))
    assert together is not None
    assert apart is not None
    assert together > 1.8 * apart


def test_few_windows_give_no_interval() -> None:
    row = paired_difference([made_run(0, np.full(3, 2.0))], [made_run(0, np.full(3, 2.1))])
    assert row["low"] is None
    assert not row["resolved"]
    assert "no interval" in row["method"]
    assert bits_per_byte([made_run(0, np.full(3, 2.0))]) == {
        "mean": 2.0,
        "low": None,
        "high": None,
        "over": "1 seed, no interval",
    }


def test_the_same_design_twice_is_not_resolved() -> None:
    runs = reports.report()["designs"][0]["runs"]
    row = paired_difference(runs, runs)
    assert (row["mean"], row["low"], row["high"], row["resolved"]) == (0, 0, 0, False)


def test_the_same_runs_give_the_same_numbers() -> None:
    first, second = reports.report(), reports.report()
    assert first["differences"] == second["differences"]
    assert first["verdict"] == second["verdict"]


def test_difference_changes_sign_with_its_sides() -> None:
    one, other = (row["runs"] for row in reports.report()["designs"][:2])
    ahead, behind = paired_difference(one, other), paired_difference(other, one)
    assert ahead["mean"] == pytest.approx(-behind["mean"])
    assert ahead["low"] == pytest.approx(-behind["high"])


def test_windows_must_be_the_same() -> None:
    one = [made_run(seed, np.full(8, 2.0)) for seed in range(2)]
    with pytest.raises(DataError, match=r"seed 0 .* different validation windows"):
        paired_difference(one, [made_run(seed, np.full(8, 2.0), size=900) for seed in range(2)])
    with pytest.raises(DataError, match="different validation windows"):
        paired_difference(one, [made_run(seed, np.full(9, 2.0)) for seed in range(2)])
    mixed = [made_run(0, np.full(8, 2.0)), made_run(1, np.full(9, 2.0))]
    with pytest.raises(DataError, match="The seeds were measured on different"):
        paired_difference(mixed, mixed)


def test_runs_that_did_not_finish_are_left_out_and_named() -> None:
    made = reports.report()
    reports.diverge(made["designs"][1]["runs"][2])
    good = [run["bits_per_byte"] for run in made["designs"][1]["runs"][:2]]
    reports.finish(made)
    row = made["differences"][0]
    assert row["pairs"] == 2
    assert "seed 2" in row["method"]
    interval = made["designs"][1]["bits_per_byte"]
    assert interval["mean"] == pytest.approx(np.mean(good))
    assert interval["over"] == "2 seeds, 1 of 3 did not finish"


def test_a_number_that_is_not_finite_is_no_result() -> None:
    runs = [made_run(0, np.full(8, 2.0)), {**made_run(1, np.full(8, 2.0)), "bits_per_byte": float("nan")}]
    assert bits_per_byte(runs)["mean"] == 2.0


def test_nothing_finished_gives_nulls() -> None:
    made = reports.hollow()
    assert made["designs"][0]["bits_per_byte"]["mean"] is None
    assert made["differences"][0] == {
        "design": "gqa-tiny",
        "baseline": "mha-tiny",
        "mean": None,
        "low": None,
        "high": None,
        "resolved": False,
        "pairs": 0,
        "method": "No seed was finished by both designs, so there is no difference to give.",
    }
    assert made["verdict"] == ["No design finished a run, so nothing can be compared."]


def shifted(offsets: dict[str, float], seeds: int = 3) -> dict[str, Any]:
    """A report of designs whose bits per byte are certain and differ by the given offsets."""
    made = reports.report(dict.fromkeys(offsets, reports.TINY["gqa-tiny"]), seeds=seeds)
    for row, offset in zip(made["designs"], offsets.values(), strict=True):
        source = made["designs"][0]["runs"]
        row["runs"] = [
            {
                **run,
                "bits_per_byte": 2.0 + offset,
                "windows": [[(2.0 + offset) * size, size] for _, size in run["windows"]],
            }
            for run in source
        ]
    return reports.finish(made)


def test_verdict_claims_a_lead_only_where_it_is_resolved() -> None:
    assert shifted({"a": 0.0, "b": -0.1})["verdict"][0] == (
        "b has the lowest bits per byte, 1.900; its difference to a, −0.100 ± 0.000, is resolved."
    )
    assert shifted({"a": 0.0, "b": 0.0})["verdict"][0].endswith("is not resolved.")
    assert "each of the other 2 is resolved" in shifted({"a": 0.0, "b": -0.1, "c": 0.1})["verdict"][0]
    assert "not resolved against b" in shifted({"a": 0.0, "b": 0.0, "c": 0.0})["verdict"][0]
    assert "resolved against c, not against b" in shifted({"a": 0.0, "b": 0.0, "c": 0.1})["verdict"][0]


def test_verdict_says_what_the_smallest_state_costs() -> None:
    made = reports.report()
    assert any(
        sentence.startswith("window-tiny needs 6 % of the state of mha-tiny (1.57 MB against 25.2 MB at 8k), for +0.03")
        and sentence.endswith("bits per byte (worse).")
        for sentence in made["verdict"]
    )
    alone = reports.report({name: reports.TINY[name] for name in ("mha-tiny", "gqa-tiny")})
    assert any("gqa-tiny needs a quarter of the state" in s and "(not resolved)" in s for s in alone["verdict"])
    assert shifted({"a": 0.0, "b": 0.1})["verdict"][1] == "All keep the same state: 6.29 MB at 8k."


def test_verdict_tells_of_one_seed_and_of_failures() -> None:
    first, second, *_ = reports.report(seeds=1)["verdict"]
    assert "on one seed" in first
    assert "resolved for the choice of text only" in first
    assert "luck of training" in second
    assert "luck of training" not in " ".join(reports.report(seeds=3)["verdict"])
    text = " ".join(reports.crowd()["verdict"])
    assert "Only some seeds finished" in text
    assert "No run finished: experiments" in text


def test_verdict_of_one_design_compares_nothing() -> None:
    assert verdict(reports.single()) == [
        "mha-tiny reaches 2.249 bits per byte; there is no second design to compare it with.",
        "Recall (MQAR): mha-tiny answers 100 % right; picking blindly gives 8.3 %.",
        "At 8 × the trained context bits per byte change, on the same text, on one seed: mha-tiny −0.091 (better).",
    ]
