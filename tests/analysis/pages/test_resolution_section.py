"""The section on what is not resolved: a row for each open pair, and none where nothing is open."""

from heddle.lab.pages.render import render
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import report_context, resolution_table


def page(report: dict[str, object]) -> str:
    return render("report.html", **report_context(report), plotly="", revision=None)


def test_open_pairs_have_a_row() -> None:
    report = reports.make_report()
    table = resolution_table(report)
    assert table is not None
    assert table.rows == [
        [
            "mha-tiny − gqa-tiny",
            "−0.009 ± 0.013",
            "± 0.023",
            "0.018",
            "± 0.01: 8 seeds, 4 min; ± 0.005: 37 seeds, 25 min, 1.3 × text",
        ]
    ]
    text = page(report)
    assert "<h2>What is not resolved</h2>" in text
    for cell in table.rows[0]:
        assert cell.replace("± ", "±\u00a0") in text
    assert "The intervals hold for all pairs of the 4 designs at once" in " ".join(text.split())


def test_one_seed_needs_a_second() -> None:
    luck = reports.TINY["gqa-tiny"][1:]
    table = resolution_table(reports.make_report({"a": (0.0, *luck), "b": (0.001, *luck)}, seeds=1))
    assert table is not None
    assert {row[-1] for row in table.rows} == {"a second seed"}


def test_without_open_pairs_there_is_no_section() -> None:
    assert resolution_table(reports.single()) is None
    assert resolution_table(reports.hollow()) is None
    assert "What is not resolved" not in page(reports.single()).replace("“What is not resolved”", "")
