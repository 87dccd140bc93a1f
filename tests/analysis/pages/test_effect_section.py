"""What the page and the terminal show of varied fields and equal sizes."""

import json
from typing import Any

from heddle.lab.pages.render import render
from tests.analysis.comparison import reports
from tests.analysis.comparison.plain import effect_figures, equal_size_table, report_context, report_page
from tests.analysis.comparison.test_effects import varied
from tests.html_page import Page


def named(labels: list[str]) -> dict[str, Any]:
    """A report whose four designs are the values of one field."""
    report = reports.make_report()
    for design, label in zip(report["designs"], labels, strict=True):
        design["varied_fields"] = {"layers.*.mixer.window": label}
    return reports.finish(report)


def test_nothing_varied_leaves_no_section() -> None:
    assert render("report/effects.html", **report_context(reports.make_report())).strip() == ""
    assert effect_figures(reports.make_report()) == {}


def test_the_page_shows_every_value_and_pair() -> None:
    parsed = Page(report_page(varied()))
    text = parsed.text()
    for words in (
        "Effects of the varied fields",
        "kv_heads",
        "residual",
        "Each value's mean is over 2 designs.",
        "kv_heads and residual",
    ):
        assert words in text
    report = varied()["effects"]
    for field in report["fields"]:
        for value in field["values"]:
            assert f"{value['mean']:.3f}" in text
    assert "resolved" in text
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {"plot-effect-0", "plot-effect-1"} <= set(parsed.ids)
    assert set(json.loads(parsed.scripts[0])) >= {"loss", "effect-0", "effect-1"}


def test_numbers_are_drawn_along_x_and_names_as_rows() -> None:
    heads, kind = (effect_figures(varied())[name] or {} for name in ("effect-0", "effect-1"))
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
    report = varied()
    for index, field in enumerate(report["effects"]["fields"]):
        figure = effect_figures(report)[f"effect-{index}"] or {}
        axis, bar = ("y", "error_y") if index == 0 else ("x", "error_x")
        level = figure["layout"]["shapes"][0][f"{axis}0"]
        for value, mean, half in zip(
            field["values"], figure["data"][-1][axis], figure["data"][-1][bar]["array"], strict=True
        ):
            if value["difference"]:
                assert (abs(mean - level) > half) == value["difference"]["resolved"]


def test_wide_numbers_are_on_a_logarithmic_axis_and_null_makes_names_of_all() -> None:
    wide = effect_figures(named(["64", "16", "512", "128"]))["effect-0"] or {}
    assert wide["layout"]["xaxis"]["type"] == "log"
    assert wide["data"][-1]["x"] == [16.0, 64.0, 128.0, 512.0]
    mixed = effect_figures(named(["64", "16", "null", "128"]))["effect-0"] or {}
    assert mixed["data"][-1]["y"] == ["64", "16", "null", "128"]


def test_values_of_which_nothing_finished() -> None:
    report = varied()
    for design in report["designs"]:
        for run in design["runs"]:
            reports.diverge(run)
    report = reports.finish(report)
    assert list(effect_figures(report).values()) == [None, None]
    text = Page(report_page(report)).text()
    assert "Nothing was measured for this figure." in text
    assert "not measured" in text


def equal_sizes() -> dict[str, Any]:
    report = reports.make_report() | {"equal_size": "parameters"}
    report["designs"][1]["width"] = {"original": 128, "trained": 136}
    return report


def test_equal_sizes_are_shown_with_their_deviation() -> None:
    table = equal_size_table(equal_sizes())
    assert table.header == ["design", "width", "parameters", "deviation"]
    assert table.rows[0] == ["mha-tiny", "128", "1.31 M", "baseline"]
    assert table.rows[1] == ["gqa-tiny", "128 → 136", "1.33 M", "+1.3%"]
    text = Page(report_page(equal_sizes())).text()
    for words in ("Equal size", "128 → 136", "+1.3%", "as many parameters as mha-tiny"):
        assert words in text


def test_flops_name_their_context_length() -> None:
    report = equal_sizes() | {"equal_size": "flops"}
    title = f"forward FLOPs per token at {report['budget']['sequence_length']} tokens"
    assert equal_size_table(report).header[2] == title
    text = Page(report_page(report)).text()
    assert title in text
    assert text.count(" FLOPs per token at 256 tokens") > len(report["designs"])


def test_the_terminal_shows_fields_where_there_are_several() -> None:
    text = reports.printed(varied())
    for words in ("kv_heads  bits per byte  difference to 2", "difference to pre_norm", "worse", "baseline"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80
    assert "bits per byte  difference to 64" not in reports.printed(named(["64", "16", "512", "128"]))
    assert "equal size: design" in reports.printed(equal_sizes())
