"""The section on longer texts: its sentence, what the page says, and its figure."""

import math
from typing import Any

import pytest

from heddle.lab.pages.render import render
from heddle.training.evaluation.length_extrapolation import ExtrapolationResult
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import (
    length_figure,
    length_result,
    length_verdict,
    report_context,
    report_page,
    write_report,
)
from tests.html_page import Page


def with_lost_numbers(report: dict[str, Any]) -> dict[str, Any]:
    """The first design gives no finite number at 8 ×."""
    for run in report["designs"][0]["runs"]:
        run["extrapolation"][-1] = length_result(ExtrapolationResult(8, [(math.nan, 100)] * 6, None))
    return reports.finish(report)


def test_the_sentence_mentions_every_design() -> None:
    assert length_verdict(with_lost_numbers(reports.make_report())) == [
        "At 8 × the trained length bits per byte change, on the same text: gqa-tiny 0.000 ± 0.005, "
        "window-tiny +0.601 ± 0.006, mha-tiny not finite and hybrid-delta-tiny refused."
    ]
    assert length_verdict(without_longer_texts(reports.make_report(), None)) == []


def without_longer_texts(report: dict[str, Any], note: str | None) -> dict[str, Any]:
    """A report in which no longer text was read."""
    report["extrapolation"] = {**dict.fromkeys(report["extrapolation"], 0), "multiples": [], "note": note}
    for row in report["designs"]:
        for run in row["runs"]:
            run["extrapolation"] = []
    return reports.finish(report)


def test_the_page_says_what_was_read_and_measured() -> None:
    parsed = Page(report_page(with_lost_numbers(reports.make_report())))
    text = parsed.text()
    assert "plot-lengths" in parsed.ids
    for words in (
        "same 6 spans of validation text, of 2048 tokens each (from 5 documents)",
        "cut into pieces of 256 tokens as in training",
        "A rising line The design does not generalize to longer sequences",
        "+0.202 ± 0.009",
        "0.000 ± 0.005",
        "not finite",
        "hybrid-delta-tiny rejects 4 ×: embedding.position: position 1023 is beyond the 512 learned ones.",
        "is shown under “Longer sequences than in training”",
    ):
        assert words in text
    assert "The lengths are shorter than requested" not in text
    shorter = reports.make_report()
    shorter["extrapolation"]["note"] = "the longest held-out document has 3000 tokens"
    assert (
        "The lengths are shorter than requested: the longest held-out document has 3000 tokens."
        in Page(report_page(shorter)).text()
    )


def test_what_was_not_read_has_no_section() -> None:
    off, short = (
        without_longer_texts(reports.make_report(), note)
        for note in (None, "the longest held-out document has 9 tokens")
    )
    for report in (off, short):
        assert render("report/lengths.html", **report_context(report)).strip() == ""
        assert length_figure(report) is None
        assert "<h2>Longer sequences than" not in report_page(report)
        assert "longer context is not measured here" in Page(report_page(report)).text()
    assert "Not measured: the longest held-out document has 9 tokens." in Page(report_page(short)).text()
    assert "Not measured" not in report_page(off)


@pytest.mark.parametrize("make", [reports.make_report, reports.single, reports.crowd])
def test_the_figure_shows_the_changes(make: Any) -> None:
    report = make()
    figure = length_figure(report)
    assert figure is not None
    lines = {trace["meta"]: trace for trace in figure["data"] if trace["mode"] == "lines+markers"}
    crosses = {trace["meta"]: trace for trace in figure["data"] if trace["mode"] == "markers"}
    for index, design in enumerate(report["designs"]):
        rows = [row for row in design["extrapolation"] if row["bits_per_byte"] is not None]
        assert (index in lines) == bool(rows)
        if rows:
            assert lines[index]["x"] == [256 * row["multiple"] for row in rows]
            assert lines[index]["y"] == pytest.approx([row["bits_per_byte"] for row in rows])
            assert (index in crosses) == (len(rows) < 4)
    for trace in crosses.values():
        assert (trace["x"], trace["text"]) == ([512], ["at 4 × refused"])
    assert figure["layout"]["shapes"][0]["x0"] == figure["layout"]["shapes"][0]["x1"] == 256


def test_nothing_finished_draws_nothing(tmp_path: Any) -> None:
    report = reports.hollow()
    assert length_figure(report) is None
    write_report(report, tmp_path)
    assert "not measured" in (tmp_path / "report.html").read_text(encoding="utf-8")
