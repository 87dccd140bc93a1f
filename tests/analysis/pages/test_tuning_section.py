"""The section on tuning: its sentences, its tables and its figures."""

import math

import pytest

from heddle.lab.compare.tuning import needs_shared_run
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import (
    report_page,
    shared_value_matters,
    tuning_figures,
    tuning_report,
    tuning_section,
)
from tests.analysis.comparison.tunings import make_tuning, with_tuning
from tests.html_page import Page

NAMES = [*reports.TINY]


def test_a_shared_value_that_answers_otherwise() -> None:
    report = with_tuning(reports.make_report())
    chosen, shared = report["tuning"]["sentences"]
    assert chosen.startswith("Each design was trained at its own best values, found by 28 runs")
    assert "lr 0.002 (mha-tiny and hybrid-delta-tiny), lr 0.004 (gqa-tiny) and lr 0.008 (window-tiny)" in chosen
    assert "All designs were run at the best shared values too, lr 0.004, on the same seeds, and the answers" in shared
    assert "mha-tiny − gqa-tiny is +0.031 ± 0.015 (worse) at shared values and −0.009 ± 0.015 (not resolved)" in shared
    pair = report["tuning"]["shared_values"]["pairs"][0]
    assert pair["designs"] == NAMES[:2]
    assert pair["own"]["mean"] == pytest.approx(-0.009, abs=0.001)
    text = Page(report_page(report)).text()
    for sentence in report["tuning"]["sentences"]:
        assert sentence in text


def test_a_shared_value_that_is_as_good() -> None:
    same = with_tuning(reports.make_report(), dict.fromkeys(NAMES, 0.004))
    assert same["tuning"]["sentences"][-1].startswith("All designs have the same best values")
    # two designs with one optimum each, so close to each other that nothing changes by more than an interval
    tuning = make_tuning({"a": 0.004, "b": 0.0041})
    runs = {name: reports.design(name, (offset, 0.03, 1, 1, 1, 1), [0, 1, 2], index)["runs"]
            for index, (name, offset) in enumerate({"a": 0.0, "b": 0.3}.items())}  # fmt: skip
    assert not shared_value_matters(tuning, runs)
    assert not needs_shared_run(tuning, "a")
    far = make_tuning({"a": 0.001, "b": 0.016})
    assert shared_value_matters(far, runs)
    assert needs_shared_run(far, "a") or needs_shared_run(far, "b")
    single = with_tuning(reports.single())
    assert single["tuning"]["sentences"][-1] == "There is no second design to share values with."


def test_edges_and_what_was_not_tried_are_said() -> None:
    wide = tuning_report(make_tuning({"a": 0.05}, "lr=0.001,0.002,0.004", budget=60, diverges=1.0), {"a": []}, {})
    assert (
        "A best value of lr was at an edge of its range, which was widened by 0.008, 0.016, 0.032 and 0.064."
        in (wide["sentences"])
    )
    poor = tuning_report(make_tuning({"a": 0.05}, "lr=0.001,0.002,0.004", budget=2, diverges=1.0), {"a": []}, {})
    assert "Not tried next to the best value: a (lr above 0.008)." in poor["sentences"][-2]


def test_the_tables_show_what_diverged() -> None:
    report = with_tuning(reports.make_report(), None, "lr=0.004..0.032", "optimizer=adamw,muon")
    section = tuning_section(report)
    assert section is not None
    (_, table), _ = section.cards
    assert section.choices.header == ["design", "lr", "optimizer", "bits per byte of the trial"]
    cells = [cell for row in table.rows for cell in row[1:]]
    assert "diverged" in cells or "–" in cells
    assert any(cell.startswith("2.") for cell in cells)
    assert section.grid == "9 combinations on 33% of a run"


@pytest.mark.parametrize("fields", [(), ("lr=0.001..0.008", "optimizer=adamw,muon"), ("lr=0.001,0.01", "warmup=0,8")])
def test_the_figures_draw_every_design(fields: tuple[str, ...]) -> None:
    report = with_tuning(reports.make_report(), None, *fields)
    figures = tuning_figures(report)
    assert list(figures) == [f"tuning-{index}" for index in range(max(1, len(fields)))]
    for index, figure in enumerate(figures.values()):
        assert figure is not None
        assert {trace["meta"] for trace in figure["data"]} == set(range(len(report["designs"])))
        assert all(math.isfinite(y) for trace in figure["data"] for y in trace["y"])
        rings = [trace for trace in figure["data"] if trace["marker"]["symbol"] == "circle-open"]
        assert len(rings) == len(report["designs"])
        for ring, tuned in zip(rings, report["tuning"]["designs"], strict=True):
            assert ring["x"] == [tuned["best"][index]]
            assert ring["y"] == [tuned["bits_per_byte"]]
        low, high = figure["layout"]["yaxis"]["range"]
        assert all(low < ring["y"][0] < high for ring in rings)


def test_what_was_not_tuned_has_no_section() -> None:
    plain = reports.make_report()
    assert tuning_section(plain) is None
    assert tuning_figures(plain) == {}
    assert "Each design at its own best" not in report_page(plain)
    assert tuning_figures(plain | {"tuning": None}) == {}
