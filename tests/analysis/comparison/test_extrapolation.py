"""What longer texts do to designs: the paired changes, the sentence, the section of the page and its figure."""

import copy
import json
import math
import re
from typing import Any

import plotly.graph_objects
import pytest

from heddle.analysis.comparison import report as report_module
from heddle.analysis.comparison.extrapolation import changes, told
from heddle.analysis.comparison.extrapolation_section import extrapolation_figure, extrapolation_section
from heddle.analysis.comparison.report import page, write_report
from heddle.analysis.comparison.statistics import STRETCHES, paired_difference, seed_half_width
from heddle.analysis.comparison.style import CSS
from heddle.analysis.comparison.trades import longer_verdict
from heddle.training.evaluation.length_extrapolation import Reading
from tests.analysis.comparison import reports
from tests.html_page import Page


def runs(values: dict[int, list[list[float]]], size: int = 1000) -> list[dict[str, Any]]:
    """Finished runs from bits per byte of each stretch, by multiple and seed."""
    made = []
    for seed in range(len(values[1])):
        readings = [
            told(Reading(multiple, [(value * size, size) for value in every[seed]], None))
            for multiple, every in values.items()
        ]
        made.append({"seed": seed, "status": "done", "bits_per_byte": 2.0, "extrapolation": readings})
    return made


def test_changes_are_paired_by_seed() -> None:
    made = runs({1: [[2.0] * 2, [3.0] * 2, [2.5] * 2], 2: [[2.1] * 2, [3.12] * 2, [2.61] * 2]})
    one, two = changes(made, [1, 2])
    assert one == {"multiple": 1, "bits_per_byte": 2.5, "change": None, "not_finite": 0, "refusal": None}
    assert two["bits_per_byte"] == pytest.approx(2.61)
    half = seed_half_width([0.1, 0.12, 0.11])
    assert two["change"]["mean"] == pytest.approx(0.11)
    assert two["change"]["high"] == pytest.approx(0.11 + half)
    assert two["change"]["resolved"]
    assert "on this text only" in two["change"]["method"]
    # planted bug: seeds that are not paired hide the change
    shuffled = [
        {**run, "extrapolation": [run["extrapolation"][0], made[(place + 1) % 3]["extrapolation"][1]]}
        for place, run in enumerate(made)
    ]
    assert not changes(shuffled, [1, 2])[1]["change"]["resolved"]


def test_four_stretches_give_a_part_to_the_text() -> None:
    spread = [[2.0 + 0.01 * (place + seed) for place in range(5)] for seed in range(2)]
    level = [[2.0] * 5, [2.0] * 5]
    found = changes(runs({1: level, 2: spread}), [1, 2])[1]["change"]
    seeds = seed_half_width([0.02, 0.03])
    assert found["high"] - found["mean"] > seeds * 1.001
    assert "a bootstrap over stretches of text" in found["method"]
    alone = changes(runs({1: level[:1], 2: spread[:1]}), [1, 2])[1]["change"]
    assert alone["pairs"] == 1
    assert "not the luck of training" in alone["method"]
    # of five apart values: t(4) · s / √5, which a bootstrap of single ones must come near to
    assert alone["high"] - alone["mean"] == pytest.approx(2.776 * 0.0158 / math.sqrt(5), rel=0.1)


def test_stretches_are_not_taken_for_neighbours() -> None:
    left, right = runs({1: [[2.0, 2.4] * 3]})[0], runs({1: [[2.0] * 6]})[0]
    one, other = ([{**run["extrapolation"][0], "seed": 0}] for run in (left, right))
    apart, together = paired_difference(one, other, STRETCHES), paired_difference(one, other)
    assert apart["high"] - apart["mean"] > 2 * (together["high"] - together["mean"])


def test_what_is_missing_is_counted_and_left_out() -> None:
    nan = math.nan
    made = runs({1: [[2.0], [2.2]], 2: [[2.1], [nan]], 4: [[math.inf], [nan]]})
    made.append({"seed": 2, "status": "diverged", "bits_per_byte": None, "extrapolation": []})
    _, two, four = changes(made, [1, 2, 4])
    assert (two["bits_per_byte"], two["not_finite"], two["change"]["pairs"]) == (2.1, 1, 1)
    assert two["change"]["mean"] == pytest.approx(0.1)
    assert "gave no number: seed 1" in two["change"]["method"]
    assert (four["bits_per_byte"], four["not_finite"], four["change"]["mean"]) == (None, 2, None)
    refused = [{**run, "extrapolation": [*run["extrapolation"][:1], told(Reading(2, [], "why"))]} for run in made[:2]]
    row = changes(refused, [1, 2])[1]
    assert (row["bits_per_byte"], row["change"]["mean"], row["not_finite"], row["refusal"]) == (None, None, 0, "why")


def lost(made: dict[str, Any]) -> dict[str, Any]:
    """The first design gives no finite number at 8 ×."""
    for run in made["designs"][0]["runs"]:
        run["extrapolation"][-1] = told(Reading(8, [(math.nan, 100)] * 6, None))
    return reports.finish(made)


def test_the_sentence_tells_of_every_design() -> None:
    assert longer_verdict(lost(reports.report())) == [
        "At 8 × the trained context bits per byte change, on the same text: gqa-tiny 0.000 (not resolved), "
        "window-tiny +0.601 (worse), mha-tiny not finite and hybrid-delta-tiny refused."
    ]
    assert longer_verdict(without(reports.report(), None)) == []


def without(made: dict[str, Any], note: str | None) -> dict[str, Any]:
    """A report in which no longer text was read."""
    made["extrapolation"] = {**dict.fromkeys(made["extrapolation"], 0), "multiples": [], "note": note}
    for row in made["designs"]:
        for run in row["runs"]:
            run["extrapolation"] = []
    return reports.finish(made)


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "get_plotlyjs", lambda: "/* plotly */")


@pytest.mark.usefixtures("light")
def test_the_page_tells_what_was_read_and_found() -> None:
    parsed = Page(page(lost(reports.report())))
    text = parsed.text()
    assert "plot-extrapolation" in parsed.ids
    for words in (
        "same 6 stretches of held-out text, of 2048 tokens each (of 5 documents)",
        "cut into pieces of 256 tokens as in training",
        "A rising line it gets lost",
        "+0.202 ± 0.009 worse",
        "0.000 ± 0.005 not resolved",
        "not finite",
        "hybrid-delta-tiny refuses 4 ×: embedding.position: position 1023 is beyond the 512 learned ones.",
        "is told under longer texts",
    ):
        assert words in text
    assert "Not as long as asked for" not in text
    shorter = reports.report()
    shorter["extrapolation"]["note"] = "the longest held-out document has 3000 tokens"
    assert "Not as long as asked for: the longest held-out document has 3000 tokens." in Page(page(shorter)).text()


@pytest.mark.usefixtures("light")
def test_what_was_not_read_has_no_section() -> None:
    off, short = (without(reports.report(), note) for note in (None, "the longest held-out document has 9 tokens"))
    for made in (off, short):
        assert extrapolation_section(made) == ""
        assert extrapolation_figure(made) is None
        assert "Longer texts than" not in page(made)
        assert "longer context is not measured here" in Page(page(made)).text()
    assert "Not measured: the longest held-out document has 9 tokens." in Page(page(short)).text()
    assert "Not measured" not in page(off)


@pytest.mark.usefixtures("light")
def test_a_refusal_stays_words() -> None:
    attack = '<script>alert("1")</script>'
    made = reports.report()
    for run in made["designs"][3]["runs"]:
        for row in run["extrapolation"][2:]:
            row["message"] = attack
    text = page(reports.finish(made))
    assert attack not in text
    assert attack in Page(text).text()


@pytest.mark.parametrize("make", [reports.report, reports.single, reports.crowd])
def test_the_figure_shows_the_changes(make: Any) -> None:
    made = make()
    figure = extrapolation_figure(made)
    assert figure is not None
    painted = copy.deepcopy(figure)
    for trace in painted["data"]:
        trace["line"]["color"] = trace["marker"]["color"] = "#123456"
        trace.get("error_y", {})["color"] = "#123456"
    plotly.graph_objects.Figure({"data": painted["data"]})
    lines = {trace["meta"]: trace for trace in figure["data"] if trace["mode"] == "lines+markers"}
    crosses = {trace["meta"]: trace for trace in figure["data"] if trace["mode"] == "markers"}
    for place, design in enumerate(made["designs"]):
        rows = [row for row in design["extrapolation"] if row["bits_per_byte"] is not None]
        assert (place in lines) == bool(rows)
        if rows:
            assert lines[place]["x"] == [256 * row["multiple"] for row in rows]
            assert lines[place]["y"] == pytest.approx([row["bits_per_byte"] for row in rows])
            assert (place in crosses) == (len(rows) < 4)
    for trace in crosses.values():
        assert (trace["x"], trace["text"]) == ([512], ["at 4 × refused"])
    assert figure["layout"]["shapes"][0]["x0"] == figure["layout"]["shapes"][0]["x1"] == 256


def test_every_colour_is_one_of_the_page() -> None:
    figure = json.dumps(extrapolation_figure(reports.crowd()))
    names = set(re.findall(r'"\w*color": "([\w-]+)"', figure))
    assert {"series-0", "series-6", "soft", "grid"} <= names
    assert all(name == "clear" or f"--{name}: " in CSS for name in names)


def test_nothing_finished_draws_nothing(tmp_path: Any, light: None) -> None:
    made = reports.hollow()
    assert extrapolation_figure(made) is None
    write_report(made, tmp_path)
    assert "not measured" in (tmp_path / "report.html").read_text(encoding="utf-8")
