"""What the report and the terminal say of varied fields and equal sizes."""

import io
import json
import re
from typing import Any

import plotly.graph_objects
import pytest
from rich.console import Console

from heddle.analysis.comparison import report as report_module
from heddle.analysis.comparison.report import page
from heddle.analysis.comparison.style import CSS
from heddle.analysis.comparison.table import print_table
from heddle.analysis.comparison.variation_section import equal_rows, variation_figures, variation_section
from tests.analysis.comparison import reports
from tests.analysis.comparison.test_effects import varied
from tests.html_page import Page


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves plotly's five megabytes out."""
    monkeypatch.setattr(report_module, "get_plotlyjs", lambda: "/* plotly */")


def named(labels: list[str]) -> dict[str, Any]:
    """A report whose four designs are the values of one field."""
    made = reports.report()
    for design, label in zip(made["designs"], labels, strict=True):
        design["varied"] = {"layers.*.mixer.window": label}
    return reports.finish(made)


def test_nothing_varied_leaves_no_section() -> None:
    assert variation_section(reports.report()) == ""
    assert variation_figures(reports.report()) == {}


def test_the_page_tells_every_value_and_pair() -> None:
    parsed = Page(page(varied()))
    text = parsed.text()
    for words in (
        "What varied",
        "kv_heads",
        "residual",
        "The mean of the 2 designs with each value.",
        "kv_heads and residual",
    ):
        assert words in text
    made = varied()["varied"]
    for field in made["fields"]:
        for value in field["values"]:
            assert f"{value['mean']:.3f}" in text
    assert "resolved" in text
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {"plot-varied-0", "plot-varied-1"} <= set(parsed.ids)
    assert set(json.loads(parsed.scripts[0])) >= {"loss", "varied-0", "varied-1"}


def test_numbers_are_drawn_upright_and_names_below_each_other() -> None:
    heads, kind = (variation_figures(varied())[name] or {} for name in ("varied-0", "varied-1"))
    assert heads["layout"]["xaxis"]["tickvals"] == [1.0, 2.0, 4.0]
    assert heads["layout"]["xaxis"]["type"] == "linear"
    assert kind["layout"]["yaxis"]["type"] == "category"
    line, *dots, means = heads["data"]
    assert line["x"] == means["x"] == [1.0, 2.0, 4.0]
    assert len(dots) == 6
    assert [dot["meta"] for dot in dots] == [0, 1, 2, 3, 4, 5]
    assert means["error_y"]["array"][1] == 0.0
    assert min(means["error_y"]["array"][0], means["error_y"]["array"][2]) > 0
    assert kind["data"][-1]["y"] == ["pre_norm", "parallel"]


def test_a_bar_crosses_the_line_where_the_difference_is_not_resolved() -> None:
    made = varied()
    for place, field in enumerate(made["varied"]["fields"]):
        figure = variation_figures(made)[f"varied-{place}"] or {}
        axis, bar = ("y", "error_y") if place == 0 else ("x", "error_x")
        level = figure["layout"]["shapes"][0][f"{axis}0"]
        for value, centre, half in zip(
            field["values"], figure["data"][-1][axis], figure["data"][-1][bar]["array"], strict=True
        ):
            if value["difference"]:
                assert (abs(centre - level) > half) == value["difference"]["resolved"]


def test_wide_numbers_are_on_a_logarithmic_axis_and_null_makes_names_of_all() -> None:
    wide = variation_figures(named(["64", "16", "512", "128"]))["varied-0"] or {}
    assert wide["layout"]["xaxis"]["type"] == "log"
    assert wide["data"][-1]["x"] == [16.0, 64.0, 128.0, 512.0]
    mixed = variation_figures(named(["64", "16", "null", "128"]))["varied-0"] or {}
    assert mixed["data"][-1]["y"] == ["64", "16", "null", "128"]


@pytest.mark.parametrize("labels", [["1", "2", "3", "4"], ["a", "b", "<script>%{x}", "d"]])
def test_figures_are_what_plotly_knows_in_colours_of_the_page(labels: list[str]) -> None:
    drawn = json.dumps([variation_figures(named(labels)), variation_figures(varied())], allow_nan=False)
    assert "<script" not in drawn
    assert "%{x}" not in drawn
    light, dark = CSS.split("prefers-color-scheme: dark")
    for name in set(re.findall(r'"\w*color": "([\w-]+)"', drawn)):
        assert f"--{name}: " in light
        assert name == "clear" or f"--{name}: " in dark
    painted = json.loads(re.sub(r'("\w*color":\s*)"[\w-]+"', r'\1"#123456"', drawn))
    for figures in painted:
        for figure in figures.values():
            plotly.graph_objects.Figure(figure)


def test_words_of_others_stay_words() -> None:
    attack = '<script>alert("1")</script>'
    made = named(["a", attack, "c", "d"])
    text = page(made)
    assert attack not in text
    assert attack in Page(text).text()


def test_values_of_which_nothing_finished() -> None:
    made = varied()
    for design in made["designs"]:
        for run in design["runs"]:
            reports.diverge(run)
    made = reports.finish(made)
    assert list(variation_figures(made).values()) == [None, None]
    text = Page(page(made)).text()
    assert "Nothing was measured for this figure." in text
    assert "not measured" in text


def equal_sizes() -> dict[str, Any]:
    made = reports.report() | {"equal": "parameters"}
    made["designs"][1]["width"] = {"given": 128, "trained": 136}
    return made


def test_equal_sizes_are_told_with_what_is_left() -> None:
    words, rows = equal_rows(equal_sizes())
    assert words == "parameters"
    assert rows[0] == ["mha-tiny", "128", "1.31 M", "baseline"]
    assert rows[1] == ["gqa-tiny", "128 → 136", "1.33 M", "+1.3%"]
    text = Page(page(equal_sizes())).text()
    for words in ("Equal size", "128 → 136", "+1.3%", "as many parameters as mha-tiny"):
        assert words in text


def printed(made: dict[str, Any]) -> str:
    file = io.StringIO()
    print_table(made, Console(file=file, width=80))
    return file.getvalue()


def test_the_terminal_tells_fields_where_there_are_several() -> None:
    text = printed(varied())
    for words in ("kv_heads  bits per byte  difference to 2", "difference to pre_norm", "worse", "baseline"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    assert "bits per byte  difference to 64" not in printed(named(["64", "16", "512", "128"]))
    assert "equal size: design" in printed(equal_sizes())
