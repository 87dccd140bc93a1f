"""The sections on what designs can do and where their loss lies: what the page says, draws, and leaves out."""

from typing import Any

from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import (
    profile_cards,
    profile_figures,
    profile_rows,
    recall_in_text,
    report_page,
    summary_rows,
    text_recall_table,
)
from tests.analysis.comparison.test_text_profile import make_run
from tests.html_page import Page


def whole(designs: int = 4) -> dict[str, Any]:
    """A report with recall in text and a profile."""
    report = reports.make_report(dict(list(reports.TINY.items())[:designs]))
    measured = {
        design["name"]: [
            make_run(seed, right=0.5 - 0.1 * index, guessed=0.1, copied=0.3 - 0.1 * index, rare=0.1 * index)
            for seed in range(3)
        ]
        for index, design in enumerate(report["designs"])
    }
    reference = measured[report["baseline"]]
    report["recall_left_out"] = [{"name": "s5", "title": "S5", "reason": "it is <hard>", "accuracies": {}}]
    report["loss_profile"] = {
        "positions": [[0, 16]],
        "frequencies": [
            {"share": 0.1, "tokens": 3, "examples": ["␣the", "<b>"]},
            {"share": 0.9, "tokens": 260, "examples": ["↵"]},
        ],
    }
    report["text_recall"] = {
        "row_length": 256,
        "spans": 16,
        "needles": 8,
        "depths": [0.1, 0.5, 0.9],
        "span_length": 32,
        "query_tokens": 8,
        "note": "",
    }
    for design in report["designs"]:
        runs = measured[design["name"]]
        design["loss_profile"] = {name: profile_rows(runs, reference, name) for name in ("positions", "frequencies")}
        design["text_recall"] = recall_in_text(runs, reference)
    return report


def test_the_page_shows_what_designs_can_do() -> None:
    text = Page(report_page(whole())).text()
    for words in (
        "What the designs can do",
        "S5: not tested, because it is <hard>.",
        "In held-out text",
        "The trained models read 8 sequences of 256 tokens",
        "again − first",
    ):
        assert words in text, words


def test_the_page_shows_where_the_loss_lies() -> None:
    text = Page(report_page(whole())).text()
    assert "Loss by position" in text
    assert "Loss by frequency of the token" in text
    assert "␣the <b>" in text
    assert "+0.100 ± 0.000" in text
    assert "+0.100 ± 0.000 worse" not in text  # its intervals hold one by one; those that are judged hold at once


def test_needles_stand_beside_their_control() -> None:
    table = text_recall_table(whole())
    assert table is not None
    first, second, *_ = table.rows
    assert first[:3] == ["mha-tiny", "50 %", "10 %"]
    assert first[3].startswith("+40")
    assert " ± " in first[3]
    assert first[-1] == "baseline"
    assert second[-1].startswith("+")
    assert " ± " in second[-1]


def test_a_report_without_them_has_no_section() -> None:
    report = reports.make_report()
    report["recall"] = {}
    page = report_page(report)
    assert "What the designs can do" not in page
    assert "Where the loss lies" not in page
    assert profile_cards(report) == []
    for design in report["designs"]:  # planned, and not measured yet
        design.update(text_recall=None, loss_profile={"positions": [], "frequencies": []})
    report.update(text_recall=whole()["text_recall"], loss_profile=whole()["loss_profile"])
    assert "Where the loss lies" not in report_page(report)


def test_one_design_has_no_differences() -> None:
    report = whole(designs=1)
    figures = profile_figures(report)
    assert [card.figure for card in profile_cards(report)] == list(figures)
    assert [figure["layout"]["shapes"] for figure in figures.values()] == [[], []]
    assert figures["profile-frequencies"]["layout"]["yaxis"]["title"]["text"] == "bits per byte"
    assert report_page(report)


def test_every_speed_has_its_range() -> None:
    report = reports.make_report()
    rows = {row.name: row for row in summary_rows(report)}
    costs = {cost.title: cost.ends for cost in rows["mha-tiny"].costs}
    assert costs == {"Training": "20.8 to 21.8 k", "Peak memory": "", "State at 8k": "", "Decode at 8k": "120 to 128"}
    assert "20.8 to 21.8 k" in Page(report_page(report)).text()
