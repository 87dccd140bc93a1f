"""Numbers have units and sensible digits, and judgments claim no more than the interval."""

from typing import Any

import pytest

from tests.analysis.comparison import plain as tables
from tests.analysis.comparison import reports


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "0"),
        (7, "7"),
        (238.4, "238"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.6, "1.00 k"),
        (24_100, "24.1 k"),
        (99_960, "100 k"),
        (999_600, "1.00 M"),
        (1_310_000, "1.31 M"),
        (3.1e12, "3.10 T"),
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "–"),
    ],
)
def test_numbers_are_scaled(value: float | None, words: str) -> None:
    assert tables.format_number(value) == words


def test_units() -> None:
    assert tables.format_bytes(6.0e6) == "6.00 MB"
    assert tables.format_bytes(512) == "512 B"
    assert [tables.format_bits(value) for value in (-0.0004, -0.0006)] == ["0.000", "-0.001"]
    assert tables.format_rate(24_100) == "24.1 k tok/s"
    assert tables.format_rate(None) == "–"
    assert [tables.format_context(context) for context in (512, 1000, 1024, 8192, 131_072)] == [
        "512",
        "1000",
        "1k",
        "8k",
        "128k",
    ]


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (("tokens", 500_000), "500 k tokens"),
        (("seconds", 90.0), "90 seconds"),
        (("flops", 1.2e15), "1.20 P FLOPs"),
    ],
)
def test_budgets(budget: tuple[str, float], words: str) -> None:
    assert tables.format_budget({"kind": budget[0], "value": budget[1]}) == words


def difference(mean: float | None, half: float | None, pairs: int = 3) -> dict[str, Any]:
    if mean is None or half is None:
        return {"mean": mean, "low": None, "high": None, "resolved": False, "pairs": pairs}
    low, high = mean - half, mean + half
    return {"mean": mean, "low": low, "high": high, "resolved": not low <= 0 <= high, "pairs": pairs}


@pytest.mark.parametrize(
    ("mean", "half", "words"),
    [
        (0.012, 0.015, "+0.012 ± 0.015"),
        (-0.0341, 0.0021, "−0.034 ± 0.002"),
        (0.0124, 0.0119, "+0.0124 ± 0.0119"),
        (-0.1, 0.00012, "−0.1000 ± 0.0001"),
        (0.0, 0.0, "0.000 ± 0.000"),
        (-0.00004, 0.0, "0.000 ± 0.000"),
        (-1e-9, None, "0.000"),
        (4e-4, None, "0.000"),
        (-6e-4, None, "−0.001"),
        (0.012, None, "+0.012"),
        (None, None, "–"),
    ],
)
def test_differences_never_look_resolved_when_they_are_not(mean: float | None, half: float | None, words: str) -> None:
    assert tables.format_difference(difference(mean, half)) == words


def test_judgements() -> None:
    assert tables.judgment(difference(-0.02, 0.01)) == "better"
    assert tables.judgment(difference(0.02, 0.01)) == "worse"
    assert tables.judgment(difference(0.02, 0.03)) == "not resolved"
    assert tables.judgment(difference(0.02, 0.01, pairs=1)) == "worse, one seed"
    assert tables.judgment(difference(0.02, None)) == "not resolved"
    assert tables.judgment(difference(None, None)) == "not measured"
    assert tables.judgment(None) == "not measured"


def test_lists_and_shares() -> None:
    assert tables.join_names(["a"]) == "a"
    assert tables.join_names(["a", "b"]) == "a and b"
    assert tables.join_names(["a", "b", "c"]) == "a, b and c"
    assert tables.join_names(["a", "b", "c", "d", "e"]) == "a, b and 3 more"
    assert [tables.format_share(part, 100) for part in (50, 33.4, 25, 12.5, 38, 230, 0.2)] == [
        "half",
        "a third",
        "a quarter",
        "an eighth",
        "38 %",
        "2.3 times",
        "under 1 %",
    ]


def test_contexts_are_shared_by_all_designs_that_have_any() -> None:
    series: list[dict[str, Any]] = [
        {"state_bytes": [[1024, 1.0], [8192, 2.0], [16_384, 3.0]]},
        {"state_bytes": [[1024, 1.0], [8192, 2.0]]},
        {"state_bytes": []},
    ]
    assert tables.shared_context(series, "state_bytes") == 8192
    series[1]["state_bytes"][1] = [8192, None]
    assert tables.shared_context(series, "state_bytes") == 1024
    assert tables.shared_context([{"state_bytes": None}], "state_bytes") is None


def test_ranking_puts_the_unfinished_last() -> None:
    names = [row["name"] for row in tables.ranked_designs(reports.crowd())]
    assert names[-1].endswith("run-007")
    assert tables.ranked_designs(reports.make_report())[0]["name"] == "hybrid-delta-tiny"
