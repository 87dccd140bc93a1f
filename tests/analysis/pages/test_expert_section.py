"""The section on experts: what it shows, for which designs, and that it is empty for dense designs."""

import re
from typing import Any

import pytest

from heddle.lab.pages import render as render_module
from heddle.lab.pages.render import render
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import report_context, report_page
from tests.html_page import Page

EVEN, UNEVEN = [0.25] * 4, [0.7, 0.1, 0.1, 0.1]


def expert_section(report: dict[str, Any]) -> str:
    """The section alone."""
    return render("report/experts.html", **report_context(report)).strip()


def layer_summary(load: list[float], entropy: float | None = 1.25, dropped: float = 0.0) -> dict[str, Any]:
    return {"load": load, "entropy": entropy, "dropped": dropped}


def sparse() -> dict[str, Any]:
    """Two designs with experts: one in two layers, even and uneven, one of whose runs diverged; the others dense."""
    report = reports.make_report()
    for run in report["designs"][1]["runs"]:
        run["experts"] = {
            "layers.0.feedforward": layer_summary(EVEN),
            "layers.3.feedforward": layer_summary(UNEVEN, 0.5, 0.02),
        }
    report["designs"][1]["runs"][2]["experts"]["layers.0.feedforward"] = layer_summary([0.4, 0.2, 0.2, 0.2])
    report["designs"][1]["runs"][2]["experts"]["layers.3.feedforward"] = layer_summary(
        UNEVEN[::-1], 0.5, 0.02
    )  # others of a seed
    for run in report["designs"][2]["runs"]:
        run["experts"] = {"layers.1.feedforward": layer_summary([0.5, 0.5], None)}
    report["designs"][3]["runs"][0]["experts"] = None
    reports.diverge(report["designs"][1]["runs"][1])
    report["designs"][1]["runs"][1]["experts"] = {"layers.0.feedforward": layer_summary([1.0, 0.0, 0.0, 0.0])}
    return reports.finish(report)


def test_designs_without_experts_have_no_section() -> None:
    assert expert_section(reports.make_report()) == ""
    assert expert_section(reports.hollow()) == ""


def test_each_design_with_experts_has_a_table_and_its_bars() -> None:
    section = expert_section(sparse())
    parsed = Page(section)
    text = parsed.text()
    assert parsed.tags.count("table") == 2
    assert parsed.tags.count("svg") == 3
    assert parsed.tags.count("rect") == 4 + 4 + 2
    assert "gqa-tiny" in text
    assert "window-tiny" in text
    assert "mha-tiny" not in text
    assert "hybrid-delta-tiny" not in text
    for words in ("layers.3 ", "0.40 2.80 0.50 of 1.39 2.0 %", "0.90 1.30 1.25 of 1.39 0.0 %"):
        assert words in text
    assert "1.00 1.00 – 0.0 %" in text


def test_a_bar_is_as_high_as_its_share() -> None:
    section = expert_section(sparse())
    heights = [float(height) for height in re.findall(r'<rect [^>]* height="([\d.]+)"', section)]
    # 2.8 of an even share is the highest of its design; of the other one the picture ends at 2
    assert heights[4:8] == pytest.approx([40.0, *[40 * 0.4 / 2.8] * 3], abs=0.01)
    assert heights[8:] == pytest.approx([20.0, 20.0])
    lines = [float(y) for y in re.findall(r'<line [^>]*y1="([\d.]+)"', section)]
    assert lines == pytest.approx([40 - 40 / 2.8, 40 - 40 / 2.8, 20.0], abs=0.01)


def test_the_page_holds_it_in_colours_of_both_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "plotly_script", lambda: "/* plotly */")
    text = report_page(sparse())
    parsed = Page(text)
    assert "<h2>Experts</h2>" in text
    assert "<h2>Experts</h2>" not in report_page(reports.make_report())
    assert parsed.loads == []
    section = expert_section(sparse())
    assert not re.search(r"#[0-9a-f]{3,6}\b|rgb", section)  # colours are the page's own variables
    assert set(re.findall(r"var\(--([\w-]+)\)", section)) == {"series-1", "series-2"}
