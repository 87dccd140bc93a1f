"""The intervals of a comparison: known values, coverage by simulation, and planted bugs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from heddle.errors import DataError
from heddle.lab.compare import statistics
from heddle.lab.compare.results import Run
from heddle.lab.compare.statistics import t_quantile, text_half_width
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import mean_bits_per_byte, paired_difference
from tests.cases import in_turn

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


@pytest.mark.parametrize(("confidence", "degrees", "quantile"), TABLE)
def test_t_quantiles_match_printed_tables(confidence: float, degrees: int, quantile: float) -> None:
    assert t_quantile(confidence, degrees) == pytest.approx(quantile, abs=6e-4)


def finished_run(seed: int, bits: np.ndarray, size: int = 1000) -> dict[str, Any]:
    """A finished run from the bits per byte of each window."""
    windows = [[float(value) * size, size] for value in bits]
    return {"seed": seed, "status": "done", "bits_per_byte": float(bits.mean()), "windows": windows}


def trial(rng: np.random.Generator, seeds: int, luck: float, text: float) -> tuple[list[Any], list[Any]]:
    """Two designs that are equal on average: they differ by seed variance and by this text alone."""
    base = rng.normal(2.3, 0.4, 48)
    taste = rng.normal(0, text, 48)
    sides: tuple[list[Any], list[Any]] = ([], [])
    for seed in range(seeds):
        shared = rng.normal(0, 0.05)
        for side, liking in zip(sides, (taste, np.zeros(48)), strict=True):
            noise = rng.normal(0, 0.01, 48)
            side.append(finished_run(seed, base + liking + shared + rng.normal(0, luck) + noise))
    return sides


def coverage(seeds: int, luck: float, text: float, trials: int = 500) -> float:
    """How often the 95 % interval holds the true difference, 0."""
    rng = np.random.default_rng(1)
    return float(np.mean([not paired_difference(*trial(rng, seeds, luck, text))["resolved"] for _ in range(trials)]))


@pytest.mark.parametrize(
    ("seeds", "luck", "text"),
    in_turn([(3, 0.02, 0.0), (2, 0.02, 0.0), (3, 0.0, 0.1), (5, 0.02, 0.1), (3, 0.02, 0.1)], 1, 3),
)
def test_intervals_contain_the_true_difference_as_often_as_they_claim(seeds: int, luck: float, text: float) -> None:
    # three standard errors of 500 trials below 95 %; the two parts together may be a little too wide
    assert 0.92 < coverage(seeds, luck, text) <= 0.995


def test_z_for_t_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "t_quantile", lambda confidence, degrees_of_freedom: 1.96)
    assert coverage(3, 0.02, 0.0) < 0.90


def test_leaving_out_the_text_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "text_half_width", lambda *arguments: 0.0)
    assert coverage(3, 0.0, 0.1) < 0.60


def test_one_seed_does_not_cover_training_and_says_so() -> None:
    assert coverage(1, 0.0, 0.1) > 0.92
    assert coverage(1, 0.05, 0.1) < 0.80
    row = paired_difference(*trial(np.random.default_rng(0), 1, 0.02, 0.1))
    assert row["pairs"] == 1
    assert "not seed variance" in row["method"]


def test_pairing_by_seed_resolves_what_shared_luck_would_hide() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(2.3, 0.4, 48)
    shared = [0.3, -0.2, 0.1]
    baseline = [finished_run(seed, base + shared[seed] + rng.normal(0, 0.001, 48)) for seed in range(3)]
    design = [finished_run(seed, base + shared[seed] + 0.02 + rng.normal(0, 0.001, 48)) for seed in (2, 0, 1)]
    row = paired_difference(design, baseline)
    assert row["resolved"]
    assert row["mean"] == pytest.approx(0.02, abs=1e-3)
    # planted bug: paired by index in the list instead of by seed
    unpaired = [{**run, "seed": index} for index, run in enumerate(design)]
    assert not paired_difference(unpaired, baseline)["resolved"]


def test_text_part_is_the_standard_error_where_windows_are_independent() -> None:
    values = np.random.default_rng(0).normal(0, 1, 400)
    half = text_half_width(values, np.ones(400))
    assert half == pytest.approx(1.96 * values.std() / 20, rel=0.2)


def test_text_part_is_wider_where_neighbouring_windows_resemble_each_other() -> None:
    topics = np.repeat(np.random.default_rng(0).normal(0, 1, 50), 8)
    shuffled = np.random.default_rng(1).permutation(topics)
    neighbors, shuffled_half = text_half_width(topics, np.ones(400)), text_half_width(shuffled, np.ones(400))
    assert neighbors is not None
    assert shuffled_half is not None
    assert neighbors > 1.8 * shuffled_half


def test_few_windows_give_no_interval() -> None:
    row = paired_difference([finished_run(0, np.full(3, 2.0))], [finished_run(0, np.full(3, 2.1))])
    assert row["low"] is None
    assert not row["resolved"]
    assert "no interval" in row["method"]
    assert mean_bits_per_byte([finished_run(0, np.full(3, 2.0))]) == {
        "mean": 2.0,
        "low": None,
        "high": None,
        "basis": "1 seed, no interval",
    }


def test_swapping_the_sides_changes_the_sign() -> None:
    first, second = (row["runs"] for row in reports.make_report()["designs"][:2])
    ahead, behind = paired_difference(first, second), paired_difference(second, first)
    assert ahead["mean"] == pytest.approx(-behind["mean"])
    assert ahead["low"] == pytest.approx(-behind["high"])


def test_windows_must_be_the_same() -> None:
    runs = [finished_run(seed, np.full(8, 2.0)) for seed in range(2)]
    with pytest.raises(DataError, match="seed 0"):
        paired_difference(runs, [finished_run(seed, np.full(8, 2.0), size=900) for seed in range(2)])
    with pytest.raises(DataError, match="different validation windows"):
        paired_difference(runs, [finished_run(seed, np.full(9, 2.0)) for seed in range(2)])
    mixed = [finished_run(0, np.full(8, 2.0)), finished_run(1, np.full(9, 2.0))]
    with pytest.raises(DataError, match="seeds"):
        paired_difference(mixed, mixed)


def test_runs_that_did_not_finish_are_left_out_and_named() -> None:
    report = reports.make_report()
    reports.diverge(report["designs"][1]["runs"][2])
    finished = [run["bits_per_byte"] for run in report["designs"][1]["runs"][:2]]
    reports.finish(report)
    row = report["differences"][0]
    assert row["pairs"] == 2
    assert "seed 2" in row["method"]
    interval = report["designs"][1]["bits_per_byte"]
    assert interval["mean"] == pytest.approx(np.mean(finished))
    assert interval["basis"] == "2 seeds, 1 of 3 did not finish"


def test_a_number_that_is_not_finite_is_no_result() -> None:
    runs = [finished_run(0, np.full(8, 2.0)), {**finished_run(1, np.full(8, 2.0)), "bits_per_byte": float("nan")}]
    assert mean_bits_per_byte(runs)["mean"] == 2.0


def test_nothing_finished_gives_nulls() -> None:
    report = reports.hollow()
    assert report["designs"][0]["bits_per_byte"]["mean"] is None
    assert report["differences"][0] == {
        "design": "gqa-tiny",
        "baseline": "mha-tiny",
        "mean": None,
        "low": None,
        "high": None,
        "resolved": False,
        "pairs": 0,
        "final": True,
        "method": "No seed was finished by both designs, so there is no difference.",
    }
    assert report["verdict"] == ["No design finished a run, so nothing can be compared."]


def test_the_time_of_a_run_is_that_of_its_process_where_it_is_known() -> None:
    run = Run(seed=0, status="done", bits_per_byte=2.0, seconds=4.0)
    assert replace(run, wall_seconds=9.0).seconds_in_all == 9.0
    assert run.seconds_in_all == 4.0
    assert replace(run, status="diverged", seconds=None).seconds_in_all == 0.0
