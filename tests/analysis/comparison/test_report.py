"""The report on disk: one page that needs no network, readable without scripts, whole or not at all."""

import json
import os
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest
from plotly.offline import get_plotlyjs

from heddle.analysis.comparison import figures as figures_module
from heddle.analysis.comparison import report as report_module
from heddle.analysis.comparison import summary
from heddle.analysis.comparison.figures import figures, styles
from heddle.analysis.comparison.report import page, write_report
from heddle.analysis.comparison.style import CSS
from heddle.errors import MachineError
from tests.analysis.comparison import reports
from tests.html_page import Page

MAKERS = [reports.report, reports.single, reports.crowd, reports.hollow]
ATTACK = '<script>alert("1")</script>'


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves plotly's five megabytes out where a test is not about them."""
    monkeypatch.setattr(report_module, "get_plotlyjs", lambda: "/* plotly */")


def test_the_page_holds_plotly_once_and_loads_nothing() -> None:
    text = page(reports.report())
    parsed = Page(text)
    assert text.count(get_plotlyjs()) == 1
    assert len(parsed.scripts) == 3
    assert parsed.loads == []
    own = text.replace(get_plotlyjs(), "")
    assert not re.search(r"https?://|url\(|@import|<link|<iframe|<img", own)
    assert "default-src 'none'" in own
    assert Page('<a href="https://example.org">x</a>').loads == ["https://example.org"]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("make", MAKERS)
def test_pages_nest_and_name_every_place_once(make: Any) -> None:
    parsed = Page(page(make()))
    assert len(parsed.ids) == len(set(parsed.ids))
    for tag in ("h1", "main", "header", "footer", "table", "th", "figure", "figcaption", "dl"):
        assert tag in parsed.tags
    with pytest.raises(AssertionError):
        Page("<p><b>planted</p></b>")


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("make", MAKERS)
def test_everything_is_readable_without_scripts(make: Any) -> None:
    made = make()
    text = Page(page(made)).text()
    squeezed = text.replace(" ", "")
    for sentence in (*made["verdict"], *made["warnings"], *(row["method"] for row in made["differences"])):
        assert sentence.replace(" ", "") in squeezed
    for row in made["designs"]:
        for words in (row["name"], row["summary"]):
            assert words in text
        mean = row["bits_per_byte"]["mean"]
        assert mean is None or f"{mean:.3f}" in text
    for words in (made["data"]["hash"], made["command"], made["hardware"]["cpu"], "What one sequence keeps"):
        assert words in text


@pytest.mark.usefixtures("light")
def test_the_table_says_numbers_and_judgements() -> None:
    text = Page(page(reports.report())).text()
    for words in ("−0.022 ± 0.008 better", "+0.031 ± 0.006 worse", "not resolved", "baseline", "24.1 k tok/s"):
        assert words in text
    for words in ("1.31 M parameters", "910 MB", "25.2 MB", "State at 8k", "Decode at 8k"):
        assert words in text


@pytest.mark.usefixtures("light")
def test_one_seed_never_looks_sure() -> None:
    several, one = page(reports.report()), page(reports.report(seeds=1))
    assert 'class="word better"' in several
    assert 'class="word worse"' in several
    assert 'class="word better"' not in one
    assert 'class="word worse"' not in one
    assert "better, one seed" in one


def attacked() -> dict[str, Any]:
    """A report whose every word comes from someone who would like to run a script."""
    name = f"{ATTACK}%{{x}}"
    made = reports.report({"mha-tiny": reports.TINY["mha-tiny"], name: reports.TINY["gqa-tiny"]})
    for row in made["designs"]:
        row.update(summary=ATTACK, source=ATTACK)
        for run in row["runs"]:
            run.update(sample=ATTACK)
    made.update(command=ATTACK, warnings=[ATTACK], heddle=ATTACK, created=ATTACK)
    made["data"].update(name=ATTACK, hash=ATTACK)
    made["hardware"].update(cpu=ATTACK)
    return made


@pytest.mark.usefixtures("light")
def test_words_of_others_stay_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = page(attacked())
    parsed = Page(text)
    assert ATTACK not in text
    assert len(parsed.scripts) == 3
    assert parsed.text().count(ATTACK) >= 12
    assert "<" not in parsed.scripts[0]
    names = {trace["name"] for trace in json.loads(parsed.scripts[0])["state"]["data"]}
    assert names == {"mha-tiny", "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;% {x}"}
    monkeypatch.setattr(summary, "escape", lambda words: words)
    assert len(Page(page(attacked())).scripts) > 3


@pytest.mark.parametrize("make", MAKERS)
def test_figures_are_what_plotly_knows(make: Any) -> None:
    painted = re.sub(r'("\w*color":\s*)"[\w-]+"', r'\1"#123456"', json.dumps(figures(make()), allow_nan=False))
    for figure in json.loads(painted).values():
        if figure is not None:
            plotly.graph_objects.Figure(figure)
    with pytest.raises(ValueError, match="linewidth"):
        plotly.graph_objects.Figure({"data": [{"type": "scatter", "linewidth": 2}]})


def test_figures_show_what_was_measured() -> None:
    made = reports.report()
    drawn = figures(made)
    assert all(drawn.values())
    loss, state, speed, trade = (drawn[name] or {} for name in ("loss", "state", "speed", "trade"))
    assert [len(figure["data"]) for figure in (loss, state, speed, trade)] == [4 * 4, 4, 8, 4]
    assert state["data"][0]["y"] == [value for _, value in made["designs"][0]["state_bytes"]]
    base = made["designs"][0]["bits_per_byte"]["mean"]
    for trace, row in zip(trade["data"][1:], made["differences"], strict=True):
        reach = trace["error_y"]["array"][0]
        assert (abs(trace["y"][0] - base) > reach) == row["resolved"]
    assert list(figures(reports.hollow()).values()) == [None] * 4


def test_a_diverged_run_ends_with_a_cross_and_stays_out_of_the_mean() -> None:
    made = reports.report()
    whole = figures_module.mean_curve(made["designs"][1])
    run = made["designs"][1]["runs"][0]
    reports.diverge(run)
    loss = figures(reports.finish(made))["loss"] or {}
    crosses = [trace for trace in loss["data"] if trace["marker"]["symbol"] == "x"]
    assert [trace["text"] for trace in crosses] == [["seed 0 diverged here"]]
    assert crosses[0]["x"] == [run["curve"][19][0]]
    assert len(figures_module.mean_curve(made["designs"][1])) == len(whole)


def test_designs_can_be_told_apart_without_colour() -> None:
    made = {"designs": [{"name": str(place)} for place in range(24)], "baseline": "3"}
    chosen = styles(made)
    assert chosen["3"] == ("series-0", "solid", "circle")
    assert len({(dash, marker) for _, dash, marker in chosen.values()}) == 24
    assert len({(colour, dash) for colour, dash, _ in chosen.values()}) == 24
    for _, dash, marker in chosen.values():
        assert dash in summary.DASH_ARRAYS
        assert marker == "circle" or marker in summary.SHAPES


def test_every_colour_of_a_figure_is_one_of_the_page() -> None:
    names = set(re.findall(r'"\w*color": "([\w-]+)"', json.dumps(figures(reports.crowd()))))
    assert {"series-0", "series-6", "ink", "soft", "grid"} <= names
    light, dark = CSS.split("prefers-color-scheme: dark")
    for name in names:
        assert f"--{name}: " in light
        assert name == "clear" or f"--{name}: " in dark


def test_names_in_a_sentence_are_marked_whole() -> None:
    made = {"designs": [{"name": "mha"}, {"name": "mha-tiny"}], "baseline": "mha"}
    marked = summary.named(made, "mha-tiny beats mha, not mha-tiny-2")
    assert re.findall(r">([\w-]+)</span>", marked) == ["mha-tiny", "mha"]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("make", MAKERS)
def test_written_files_are_strict_and_the_same_every_time(make: Any, tmp_path: Path) -> None:
    made = make()
    path = write_report(made, tmp_path / "deep" / "first")
    assert path == tmp_path / "deep" / "first" / "report.html"
    write_report(make(), tmp_path / "second")
    for name in ("report.html", "report.json"):
        assert (path.parent / name).read_bytes() == (tmp_path / "second" / name).read_bytes()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads((path.parent / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert read["differences"] == made["differences"]
    assert read["verdict"] == made["verdict"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["report.html", "report.json"]


@pytest.mark.usefixtures("light")
def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(reports.single(), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MachineError, match="No space left on device; choose another --out"):
        write_report(reports.report(), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(MachineError, match="cannot be written"):
        write_report(reports.single(), tmp_path / "taken")
