"""Loss by group and recall in text as the report has them: means, paired differences, gains over the control."""

from typing import Any

import numpy as np
import pytest

from heddle.lab.compare.text_profile import count_recall_rows
from tests.analysis.comparison.plain import _as_runs, _gain, _over_depths, profile_rows, recall_in_text
from tests.laws.planting import Plant, calls, condition, operand_dropped, wrapped

NEEDLES, SPANS, BLOCKS = 8, 12, 16


def make_run(seed: int, *, right: float, guessed: float, copied: float, rare: float = 0.0) -> dict[str, Any]:
    """right, guessed: the share of the needle's 8 tokens with and without it; copied: bits per byte that a span loses.

    rare: bits per byte that the second group of tokens loses.
    """
    draw = np.random.default_rng([seed, 1])
    noise = draw.normal(0, 0.02, SPANS)
    first = [(100 * (2 + float(n)), 100) for n in noise]
    block_noise = draw.normal(0, 0.01, BLOCKS)
    groups = [[(1000 * (level + float(n)), 1000) for n in block_noise] for level in (1.0, 3.0 + rare)]
    groups[1][3] = (0.0, 0)  # a block without a token of this group
    return {
        "seed": seed,
        "status": "done",
        "bits_per_byte": 2.0,
        "loss_profile": {"positions": groups[:1], "frequencies": groups},
        "text_recall": {
            "first_spans": first,
            "repeated_spans": [(bits - 100 * copied, size) for bits, size in first],
            "needles": [
                {
                    "depth": depth,
                    "losses": [(40.0 * (2 - share), 40)] * NEEDLES,
                    "correct": [(8 * share + float(n), 8) for n in draw.normal(0, 0.05, NEEDLES)],
                }
                for depth, share in ((0.1, right - 0.1), (0.9, right + 0.1), (None, guessed))
            ],
        },
    }


def runs(**changes: float) -> list[dict[str, Any]]:
    return [make_run(seed, **{"right": 0.5, "guessed": 0.25, "copied": 0.3} | changes) for seed in range(3)]


def test_needles_are_compared_with_their_control() -> None:
    recalled = recall_in_text(runs(), runs(right=0.3, guessed=0.1))
    assert recalled is not None
    needle = recalled["needle"]
    assert needle["value"] == pytest.approx(0.5, abs=0.02)
    assert needle["control"] == pytest.approx(0.25, abs=0.02)
    assert needle["gain"]["mean"] == pytest.approx(0.25, abs=0.02)
    assert needle["gain"]["resolved"]
    assert needle["gain"]["low"] < needle["gain"]["mean"] < needle["gain"]["high"]
    assert needle["difference"]["mean"] == pytest.approx(0.05, abs=0.02)  # this gain minus the baseline's
    assert recalled["needle_loss"]["gain"]["mean"] == pytest.approx(-0.25, abs=1e-9)


def test_a_needle_that_does_not_help_is_not_resolved() -> None:
    recalled = recall_in_text(runs(right=0.25), runs())
    assert recalled is not None
    assert not recalled["needle"]["gain"]["resolved"]


def test_spans_lose_what_is_copied() -> None:
    recalled = recall_in_text(runs(copied=0.3), runs(copied=0.1))
    assert recalled is not None
    span = recalled["span"]
    assert (span["control"], span["value"]) == (pytest.approx(2.0, abs=0.02), pytest.approx(1.7, abs=0.02))
    assert span["gain"]["mean"] == pytest.approx(-0.3)
    assert span["difference"]["mean"] == pytest.approx(-0.2)
    assert span["difference"]["resolved"]


def test_groups_are_compared_with_the_baseline() -> None:
    [common, rare] = profile_rows(runs(rare=0.2), runs(), "frequencies")
    assert common["difference"]["mean"] == 0
    assert rare["bits_per_byte"] == pytest.approx(3.2, abs=0.02)
    assert rare["difference"]["mean"] == pytest.approx(0.2)
    assert rare["difference"]["resolved"]
    assert rare["difference"]["pairs"] == 3
    assert len(profile_rows(runs(), runs(), "positions")) == 1


@pytest.mark.parametrize(
    "plant",
    [
        wrapped(_over_depths, lambda over_depths, run, name, hidden: over_depths(run, name=name, hidden=not hidden)),
        operand_dropped(_gain, "other"),
        condition(_as_runs, "size", True),
        calls(profile_rows, "scored", lambda scored, group: scored(0)),
    ],
    ids=["control and needle swapped", "no control", "blocks without a token", "one group for all"],
)
def test_planted_errors_are_caught(monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    plant(monkeypatch)
    tests = [
        test_needles_are_compared_with_their_control,
        test_spans_lose_what_is_copied,
        test_groups_are_compared_with_the_baseline,
        test_a_group_without_a_token_has_no_number,
    ]
    failures = 0
    for test in tests:
        try:
            test()
        except (AssertionError, ValueError, RuntimeWarning):
            failures += 1
    assert failures


def test_a_group_without_a_token_has_no_number() -> None:
    empty = runs()
    for run in empty:
        run["loss_profile"]["frequencies"][0] = [(0.0, 0)] * BLOCKS
    [row, _] = profile_rows(empty, empty, "frequencies")
    assert row["bits_per_byte"] is None
    assert row["difference"]["mean"] is None
    rare = runs()
    for run in rare:
        run["loss_profile"]["frequencies"][0] = [(500.0, 1000)] * 2 + [(0.0, 0)] * (BLOCKS - 2)
    assert profile_rows(rare, rare, "frequencies")[0]["bits_per_byte"] == 0.5


def test_runs_without_the_measurement_have_none() -> None:
    bare = [run | {"text_recall": None, "loss_profile": None} for run in runs()]
    assert recall_in_text(bare, bare) is None
    assert recall_in_text([], []) is None
    assert profile_rows(bare, bare, "positions") == []
    short = runs()
    for run in short:
        run["text_recall"] = {"first_spans": [], "repeated_spans": [], "needles": []}
    assert recall_in_text(short, short) is None
    diverged = [run | {"status": "diverged", "bits_per_byte": None} for run in runs()]
    assert recall_in_text(diverged, runs()) is None


def test_recall_reads_little() -> None:
    assert count_recall_rows(256, 10**7) == 32
    assert count_recall_rows(256, 10_000) == 4
    needles = count_recall_rows(256, 100_000)
    assert needles > 4
    assert (2 + 3 + 1) * needles * 256 <= 100_000 / 8  # spans, needles at three depths, and the control
