"""The page of a conversion: one file, no network, every number of the results in it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects
import pytest

from heddle.lab.conversion.results import CONVERTED, ORIGINAL, ConversionResults, conversion_verdict
from heddle.lab.pages.conversion import (
    conversion_page,
    model_styles,
    page_context,
    stretched_axis,
    sweep_figure,
    write_conversion_page,
)
from heddle.lab.pages.figures import Figure
from heddle.lab.pages.render import plotly_script
from heddle.training.evaluation.scores import finite_ratio
from tests.analysis.conversion.conversions import broken, model, results, single, sweep
from tests.html_page import Page

ATTACK = '<script>alert("1")</script>'
MAKERS = [single, sweep, broken]


@pytest.mark.parametrize("make", MAKERS)
def test_the_page_is_one_file(make: Callable[[], ConversionResults]) -> None:
    text = conversion_page(make())
    page = Page(text)
    assert page.loads == []
    own = text.replace(plotly_script(), "")
    assert not re.search(r"https?://|url\(|@import", own)
    assert text == conversion_page(make())
    for tag in ("h1", "main", "table", "figure", "dl"):
        assert tag in page.tags


@pytest.mark.parametrize("make", MAKERS)
def test_the_page_says_everything(make: Callable[[], ConversionResults]) -> None:
    whole = make()
    whole.text = replace(whole.text, bos_ids=(2,))
    page = Page(conversion_page(whole)).text()
    assert re.findall(r"[a-z]\.[A-Z][a-z]+ ", page) == []  # sentences without a space between them
    for sentence in (*conversion_verdict(whole), whole.command, whole.text.sha256, whole.hardware["cpu"]):
        assert sentence in page
    for each in whole.models:
        loss = finite_ratio(each.windows)
        assert each.name in page
        assert page.count(each.summary) == 1  # of a healed model it is the converted one's
        assert loss is None or f"{loss:.3f}" in page


def test_the_table_says_numbers_and_judgements() -> None:
    page = Page(conversion_page(single())).text()
    flops = f"FLOPs per token at {single().text.sequence_length:,}"
    wanted = ("+0.120 ± 0.004 +6.0 % worse", "2.30 kB", "576 B", "594 tok/s", "healed, 91 % of the loss removed", flops)
    for words in wanted:
        assert words in page
    for words in ("70 %", "62 %", "LlamaForCausalLM", "948 k", "18.9 MB", "594 tok/s (579 to 606)", "24 %"):
        assert words in page
    assert "How small can the state get before it hurts?" not in page
    assert "How small can the state get before it hurts?" in Page(conversion_page(sweep())).text()


def test_words_of_others_stay_words() -> None:
    models = [model("original", ORIGINAL, ""), model(ATTACK, CONVERTED, ATTACK, 4, 0.1)]
    whole = results(models, warnings=[ATTACK])
    whole.command = whole.source = ATTACK
    text = conversion_page(whole)
    assert ATTACK not in text
    assert len(Page(text).scripts) == len(Page(conversion_page(single())).scripts)
    assert ATTACK in Page(text).text()


def test_the_sweep_is_drawn_where_its_numbers_are() -> None:
    figure = sweep_figure(sweep())
    assert figure is not None
    original, *lines, lowest, highest = figure["data"]
    assert [len(line["x"]) for line in lines] == [3] * 6
    low, high = figure["layout"]["yaxis"]["range"]
    for line in lines:
        assert line["x"] == sorted(line["x"])
        # a smaller state costs more
        assert line["y"] == sorted(line["y"], reverse=True)
        for y, above, below in zip(line["y"], line["error_y"]["array"], line["error_y"]["arrayminus"], strict=True):
            assert low <= y - below < y < y + above <= high
    assert original["x"][0] > max(x for line in lines for x in line["x"])
    zero, tolerance = (shape["y0"] for shape in figure["layout"]["shapes"])
    assert [shape["line"]["dash"] for shape in figure["layout"]["shapes"]] == [
        lowest["line"]["dash"],
        highest["line"]["dash"],
    ]
    assert lowest["line"]["dash"] != highest["line"]["dash"]
    assert "annotations" not in figure["layout"]
    assert original["y"][0] == zero == 0
    assert tolerance > zero
    assert [line["marker"]["symbol"].endswith("-open") for line in lines] == [True, False] * 3
    plotly.graph_objects.Figure(painted(figure))


@pytest.mark.parametrize("make", MAKERS)
def test_no_two_lines_of_a_figure_look_the_same(make: Callable[[], ConversionResults]) -> None:
    figures = page_context(make())["figures"]
    for name in ("positions", "layers", "decode"):
        lines = [line for line in (figures[name] or {"data": []})["data"] if line["name"]]
        looks = [(line["line"]["color"], line["line"]["dash"], line["marker"]["symbol"]) for line in lines]
        assert len(set(looks)) == len(looks), name


@pytest.mark.parametrize("make", MAKERS)
def test_figures_are_what_plotly_knows(make: Callable[[], ConversionResults]) -> None:
    for figure in page_context(make())["figures"].values():
        if figure is not None:
            plotly.graph_objects.Figure(painted(figure))


def painted(figure: Figure) -> Any:
    """The figure with colors in place of the names of the page's."""
    return json.loads(re.sub(r'("\w*color":\s*)"[\w-]+"', r'\1"#123456"', json.dumps(figure, allow_nan=False)))


def test_many_models_have_tables_in_place_of_lines() -> None:
    context = page_context(sweep())
    figures = context["figures"]
    assert (figures["positions"], figures["layers"], figures["decode"] is None) == (None, None, False)
    assert len(context["position_table"].rows) == len(sweep().models)
    assert sweep_figure(single()) is None


def test_styles_tell_methods_and_stages_apart() -> None:
    whole = sweep()
    styles = model_styles(whole)
    by_method = {(each.method, each.stage): styles[each.name] for each in whole.models}
    assert len(set(by_method.values())) == len(by_method) == 7
    assert len({style.color for style in by_method.values()}) == 4


def test_a_stretched_axis_has_round_ticks_apart_from_each_other() -> None:
    axis = stretched_axis(-0.01, 2.0, 0.01)
    low, high = axis["range"]
    assert "0" in axis["ticktext"]
    places = sorted(axis["tickvals"])
    assert low <= places[0] < places[-1] <= high
    assert all(b - a >= 0.09 * (high - low) for a, b in pairwise(places))


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    path = write_conversion_page(single(), tmp_path)
    assert path.name == "convert.html"
    assert path.read_text(encoding="utf-8") == conversion_page(single())
