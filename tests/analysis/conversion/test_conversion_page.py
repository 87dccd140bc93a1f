"""The page of a conversion: one file, no network, no script, every number of the results in it."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from heddle.lab.conversion.results import CONVERTED, ORIGINAL, ConversionResults, conversion_verdict
from heddle.lab.pages.conversion import conversion_page, model_styles, page_context, sweep_chart, write_conversion_page
from heddle.lab.pages.figures.svg import Scale, linear_ticks, symlog_ticks
from heddle.training.evaluation.scores import finite_ratio
from tests.analysis.conversion.conversions import broken, model, results, single, sweep
from tests.html_page import Page

ATTACK = '<script>alert("1")</script>'
MAKERS = [single, sweep, broken]


@pytest.mark.parametrize("make", MAKERS)
def test_the_page_is_one_file_without_scripts(make: Callable[[], ConversionResults]) -> None:
    text = conversion_page(make())
    page = Page(text)
    assert page.scripts == []
    assert page.loads == []
    assert not re.search(r"https?://|url\(|@import", text)
    assert text == conversion_page(make())
    for tag in ("h1", "main", "table", "figure", "svg", "dl"):
        assert tag in page.tags


@pytest.mark.parametrize("make", MAKERS)
def test_the_page_says_everything(make: Callable[[], ConversionResults]) -> None:
    whole = make()
    page = Page(conversion_page(whole)).text()
    for sentence in (*conversion_verdict(whole), whole.command, whole.text.sha256, whole.hardware["cpu"]):
        assert sentence in page
    for each in whole.models:
        loss = finite_ratio(each.windows)
        assert each.name in page
        assert each.summary in page
        assert loss is None or f"{loss:.3f}" in page


def test_the_table_says_numbers_and_judgements() -> None:
    page = Page(conversion_page(single())).text()
    for words in ("+0.120 ± 0.004 +6.0 % worse", "2.30 kB", "576 B", "594 tok/s", "healed, 91 % of the loss removed"):
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
    assert Page(text).scripts == []
    assert ATTACK in Page(text).text()


def test_the_sweep_is_drawn_where_its_numbers_are() -> None:
    chart = sweep_chart(sweep())
    assert chart is not None
    original, *lines = chart.lines
    assert [len(line.points) for line in lines] == [3] * 6
    for line in lines:
        xs = [point.x for point in line.points]
        assert xs == sorted(xs)
        # a smaller state costs more: further to the left is higher, and y counts from above
        assert [point.y for point in line.points] == sorted(point.y for point in line.points)
        for point in line.points:
            assert point.low is not None
            assert point.high is not None
            assert 0 <= point.high <= point.y <= point.low <= 100
    assert original.points[0].x > max(point.x for line in lines for point in line.points)
    zero, tolerance = (percent for percent, _ in chart.dotted)
    assert original.points[0].y == pytest.approx(zero)
    assert tolerance < zero
    assert [line.filled for line in lines] == [False, True] * 3


def test_many_models_have_tables_in_place_of_lines() -> None:
    context = page_context(sweep())
    assert (context["positions"], context["layers"], context["decode"] is None) == (None, None, False)
    assert len(context["position_table"].rows) == len(sweep().models)
    assert sweep_chart(single()) is None


def test_styles_tell_methods_and_stages_apart() -> None:
    whole = sweep()
    styles = model_styles(whole)
    by_method = {(each.method, each.stage): styles[each.name] for each in whole.models}
    assert len(set(by_method.values())) == len(by_method) == 7
    assert len({style.color for style in by_method.values()}) == 4


def test_ticks_are_round_and_within_the_scale() -> None:
    ticks = linear_ticks(Scale(0.13, 0.87))
    assert [text for _, text in ticks] == ["0.2", "0.4", "0.6", "0.8"]
    assert [round(percent, 1) for percent, _ in ticks] == [90.5, 63.5, 36.5, 9.5]
    stretched = symlog_ticks(Scale(-0.01, 2.0))
    assert "0" in [text for _, text in stretched]
    distances = sorted(percent for percent, _ in stretched)
    assert all(b - a >= 9 for a, b in pairwise(distances))


def test_the_page_is_written_whole(tmp_path: Path) -> None:
    path = write_conversion_page(single(), tmp_path)
    assert path.name == "convert.html"
    assert path.read_text(encoding="utf-8") == conversion_page(single())
