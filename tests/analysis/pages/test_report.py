"""The report on disk: one page that needs no network, readable without scripts, whole or not at all."""

import html
import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest
from plotly.offline import get_plotlyjs

from heddle.errors import MachineError
from heddle.lab.pages import render as render_module
from heddle.lab.pages.render import DASH_ARRAYS, MARKER_SHAPES, DesignStyle, design_styles, static
from heddle.lab.pages.report_figures import LABEL, _design_labels
from heddle.training.evaluation.length_extrapolation import ExtrapolationResult
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import (
    length_result,
    mean_curve,
    name_parts,
    overview_figures,
    report_context,
    report_page,
    write_report,
)
from tests.analysis.comparison.test_effects import varied
from tests.analysis.comparison.tunings import with_tuning
from tests.analysis.pages.test_ability_section import whole
from tests.analysis.pages.test_effect_section import named
from tests.html_page import Page

MAKERS = [reports.make_report, reports.single, reports.crowd, reports.hollow]
ATTACK = '<script>alert("1")</script>'


def test_the_page_holds_plotly_once_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_module, "plotly_script", get_plotlyjs)
    text = report_page(reports.make_report())
    parsed = Page(text)
    assert text.count(get_plotlyjs()) == 1
    assert len(parsed.scripts) == 3
    assert parsed.loads == []
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", own)
    assert "default-src 'none'" in own
    assert Page('<a href="https://example.org">x</a>').loads == ["https://example.org"]


@pytest.mark.parametrize("make", MAKERS)
def test_pages_nest_and_name_every_place_once(make: Any) -> None:
    parsed = Page(report_page(make()))
    assert len(parsed.ids) == len(set(parsed.ids))
    for tag in ("h1", "main", "header", "footer", "table", "th", "figure", "figcaption", "dl"):
        assert tag in parsed.tags
    with pytest.raises(AssertionError):
        Page("<p><b>planted</p></b>")


@pytest.mark.parametrize("make", MAKERS)
def test_everything_is_readable_without_scripts(make: Any) -> None:
    report = make()
    text = Page(report_page(report)).text()
    squeezed = text.replace(" ", "")
    for sentence in (*report["verdict"], *report["warnings"], *(row["method"] for row in report["differences"])):
        assert sentence.replace(" ", "") in squeezed
    for row in report["designs"]:
        for words in (row["name"], row["summary"]):
            assert words in text
        mean = row["bits_per_byte"]["mean"]
        assert mean is None or f"{mean:.3f}" in text
    for words in (
        report["data"]["hash"],
        report["command"],
        report["hardware"]["cpu"],
        "The memory that one sequence needs",
    ):
        assert words in text


def test_the_table_says_numbers_and_judgements() -> None:
    text = Page(report_page(reports.make_report())).text()
    for words in ("−0.022 ± 0.012 better", "+0.031 ± 0.011 worse", "not resolved", "baseline", "24.1 k tok/s"):
        assert words in text
    for words in ("1.31 M parameters", "910 MB", "25.2 MB", "State at 8k", "Decode at 8k"):
        assert words in text


def test_one_seed_never_looks_sure() -> None:
    several, single = report_page(reports.make_report()), report_page(reports.make_report(seeds=1))
    assert 'class="judgment better"' in several
    assert 'class="judgment worse"' in several
    assert 'class="judgment better"' not in single
    assert 'class="judgment worse"' not in single
    assert "better, one seed" in single


def attacked() -> dict[str, Any]:
    """A report whose every word comes from someone who would like to run a script."""
    name = f"{ATTACK}%{{x}}"
    report = reports.make_report({"mha-tiny": reports.TINY["mha-tiny"], name: reports.TINY["gqa-tiny"]})
    refused = length_result(ExtrapolationResult(4, [], ATTACK))
    for index, row in enumerate(report["designs"]):
        row.update(summary=ATTACK, source=ATTACK, varied_fields={"layers.*.mixer.window": f"{index}{ATTACK}"})
        for run in row["runs"]:
            experts = {ATTACK: {"load": [0.5, 0.5], "entropy": None, "dropped": 0.0}}
            run.update(sample=ATTACK, experts=experts, extrapolation=[*run["extrapolation"][:2], refused])
    report = reports.finish(report)
    report.update(command=ATTACK, warnings=[ATTACK], heddle=ATTACK, created=ATTACK)
    report["data"].update(name=ATTACK, hash=ATTACK)
    report["hardware"].update(cpu=ATTACK)
    return report


def test_words_of_others_stay_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = report_page(attacked())
    parsed = Page(text)
    assert ATTACK not in text
    assert len(parsed.scripts) == 3
    words = parsed.text()
    assert words.count(ATTACK) >= 20
    for sentence in (f"rejects 4 ×: {ATTACK}", "Loads of the experts of mha-tiny", f"difference to 0{ATTACK}"):
        assert sentence in words or sentence in html.unescape(text)
    assert "<" not in parsed.scripts[0]
    names = {trace["name"] for trace in json.loads(parsed.scripts[0])["state"]["data"]}
    assert names == {"mha-tiny", "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;% {x}"}
    # planted bug: nothing is escaped
    unescaped = render_module.environment().overlay(autoescape=False)
    monkeypatch.setattr(render_module, "environment", lambda: unescaped)
    with pytest.raises(AssertionError):
        Page(report_page(attacked()))


@pytest.mark.parametrize(
    "make",
    [
        *MAKERS,
        varied,
        lambda: named(["1", "2", "3", "4"]),
        lambda: named(["a", "b", "<script>%{x}", "d"]),
        lambda: with_tuning(reports.make_report()),
        lambda: with_tuning(reports.make_report(), None, "lr=0.001..0.008", "optimizer=adamw,muon"),
        lambda: with_tuning(reports.make_report(), None, "lr=0.001,0.01", "warmup=0,8"),
        whole,
    ],
)
def test_figures_are_what_plotly_knows_in_colors_of_the_page(make: Any) -> None:
    """Of every section; words of others are no markup of plotly's."""
    drawn = json.dumps(report_context(make())["figures"], allow_nan=False)
    assert "<script" not in drawn
    assert "%{x}" not in drawn
    light, dark = static("base.css").split("prefers-color-scheme: dark")
    for name in set(re.findall(r'"\w*color": "([\w-]+)"', drawn)):
        assert f"--{name}: " in light
        assert name == "clear" or f"--{name}: " in dark
    for figure in json.loads(re.sub(r'("\w*color":\s*)"[\w-]+"', r'\1"#123456"', drawn)).values():
        plotly.graph_objects.Figure(figure or {})
    with pytest.raises(ValueError, match="linewidth"):
        plotly.graph_objects.Figure({"data": [{"type": "scatter", "linewidth": 2}]})


def test_figures_show_what_was_measured() -> None:
    report = reports.make_report()
    drawn = overview_figures(report)
    assert all(drawn.values())
    loss, state, speed, trade = (drawn[name] or {} for name in ("loss", "state", "speed", "tradeoff"))
    assert [len(figure["data"]) for figure in (loss, state, speed, trade)] == [4 * 4, 4, 8, 4]
    assert state["data"][0]["y"] == [value for _, value in report["designs"][0]["state_bytes"]]
    base = report["designs"][0]["bits_per_byte"]["mean"]
    for trace, row in zip(trade["data"][1:], report["differences"], strict=True):
        reach = trace["error_y"]["array"][0]
        assert (abs(trace["y"][0] - base) > reach) == row["resolved"]
    assert list(overview_figures(reports.hollow()).values()) == [None] * 4


def test_labels_of_near_designs_do_not_overlap() -> None:
    near = [{"name": f"mla-tinyqa-{n}", "x": [1e6 * (1 + n / 100)], "y": [2.0], "meta": n} for n in range(4)]
    far = {"name": "mha-tiny", "x": [4e6], "y": [2.9], "meta": 4}
    labels = _design_labels([*near, far], [5.8, 6.8], [1.0, 3.0])
    heights = sorted(label["yshift"] for label in labels[:4])
    assert min(after - before for before, after in pairwise(heights)) >= LABEL[1]
    assert labels[4]["yshift"] == 0, "one that is alone stays beside its point"


def test_a_diverged_run_ends_with_a_cross_and_stays_out_of_the_mean() -> None:
    report = reports.make_report()
    whole = mean_curve(report["designs"][1])
    run = report["designs"][1]["runs"][0]
    reports.diverge(run)
    loss = overview_figures(reports.finish(report))["loss"] or {}
    crosses = [trace for trace in loss["data"] if trace["marker"]["symbol"] == "x"]
    assert [trace["text"] for trace in crosses] == [["seed 0 diverged here"]]
    assert crosses[0]["x"] == [run["curve"][19][0]]
    assert len(mean_curve(report["designs"][1])) == len(whole)


def test_the_mean_curve_ends_at_the_number_of_the_table() -> None:
    """Also of a design whose mean is adjusted to the seeds of the others."""
    report = reports.make_report()
    design = report["designs"][1]
    design["bits_per_byte"]["mean"] += 0.25
    last = mean_curve(design)[-1][1]
    assert last == pytest.approx(design["bits_per_byte"]["mean"])


def test_designs_can_be_distinguished_without_color() -> None:
    styles = design_styles([str(number) for number in range(24)], "3")
    assert styles["3"] == DesignStyle("series-0", "solid", "circle")
    assert len({(style.dash, style.marker) for style in styles.values()}) == 24
    assert len({(style.color, style.dash) for style in styles.values()}) == 24
    for style in styles.values():
        assert style.dash in DASH_ARRAYS
        assert style.marker == "circle" or style.marker in MARKER_SHAPES


def test_names_in_a_sentence_are_marked_whole() -> None:
    report = {"designs": [{"name": "mha"}, {"name": "mha-tiny"}], "baseline": "mha"}
    parts = name_parts(report, "mha-tiny beats mha, not mha-tiny-2")
    assert [text for text, is_name in parts if is_name] == ["mha-tiny", "mha"]
    assert "".join(text for text, _ in parts) == "mha-tiny beats mha, not mha-tiny-2"


def test_an_article_is_not_marked_as_a_name() -> None:
    report = {"designs": [{"name": "a"}, {"name": "b"}], "baseline": "a"}
    assert name_parts(report, "b needs a quarter of the state of a") == [
        ("b", True),
        (" needs a quarter of the state of a", False),
    ]
    assert name_parts({"designs": [{"name": "a"}], "baseline": "a"}, "a alone") == [("a alone", False)]


@pytest.mark.parametrize("make", MAKERS)
def test_written_files_are_strict_and_the_same_every_time(make: Any, tmp_path: Path) -> None:
    report = make()
    path = write_report(report, tmp_path / "deep" / "first")
    assert path == tmp_path / "deep" / "first" / "report.html"
    write_report(make(), tmp_path / "second")
    for name in ("report.html", "report.json"):
        assert (path.parent / name).read_bytes() == (tmp_path / "second" / name).read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads((path.parent / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert read["differences"] == report["differences"]
    assert read["verdict"] == report["verdict"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "report.json"]


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(reports.single(), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device"):
        write_report(reports.make_report(), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(MachineError, match="cannot be written"):
        write_report(reports.single(), tmp_path / "taken")
