"""Every row of the table of figures has a benchmark, and the finite check's case answers its row."""

import functools
import math
import runpy
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.figures import FIGURES
from benchmarks.harness import Case
from benchmarks.machine import ROOT


def test_every_row_has_a_file_that_the_readme_lists() -> None:
    readme = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    for module in {figure.module for figure in FIGURES} - {""}:
        assert (ROOT / f"benchmarks/{module}.py").is_file()
        assert f"| `{module}.py` |" in readme


def test_the_finite_check_costs_at_most_1_percent_in_30_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[Case] = []
    monkeypatch.setattr(harness, "main", lambda module, question, sides, given: cases.extend(given))
    runpy.run_module("benchmarks.finite_check", run_name="__main__")
    assert [(case.figure, case.goal, case.pairs) for case in cases] == [("finite check", 0.99, 30)]
    assert [figure.module for figure in FIGURES if figure.name == cases[0].figure] == ["finite_check"]


def test_what_computes_something_else_is_not_timed() -> None:
    values = {"heddle": [2.0, -1.0], "peer": [2.0, -1.0 + 1e-9], "no values": []}
    assert harness.largest_difference("case", values, harness.EQUAL) == pytest.approx(1e-9 / 1.5)
    assert harness.largest_difference("case", {"heddle": [1.0], "no values": []}, harness.EQUAL) is None
    small = {"heddle": [1000.0, 1.0, 1.0], "peer": [1000.0, 1.0, 1.0 + 1e-8]}  # a large value hides no small one
    with pytest.raises(ValueError, match="something else"):
        harness.largest_difference("case", small, harness.EQUAL)
    for wrong in ([2.0, -1.0 + 1e-8], [math.nan, -1.0]):
        with pytest.raises(ValueError, match=r"case: peer computes something else, .* apart; nothing was timed"):
            harness.largest_difference("case", values | {"peer": wrong}, harness.EQUAL)
    with pytest.raises(ValueError, match="zip"):
        harness.largest_difference("case", values | {"peer": [2.0]}, harness.EQUAL)


@pytest.mark.parametrize("way", ["eager", pytest.param("compiled", marks=pytest.mark.nightly)])
def test_both_sides_of_the_tiny_training_are_equal(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, in either way of heddle's steps; a plain model with another eps is caught."""
    monkeypatch.setenv("HEDDLE_MACHINE", "default")  # measuring takes longer than the test
    module = runpy.run_module("benchmarks.tiny_training")
    sides = {"heddle": module["heddle_side"], "plain": functools.partial(module["plain_side"], False)}
    design = module["load_config"]("preset:gqa-tiny", ["vocab_size=97", "layers.0.repeat=2"])
    steps = module["heddle_steps"]
    # Few layers, tokens and steps, and one way: compiling the layers took most of the time.
    module["heddle_side"].__globals__.update(
        STEPS=2,
        ROWS=2,
        LENGTH=24,
        VOCABULARY=97,
        DESIGN=design,
        heddle_steps=lambda model, _: steps(model, way == "compiled"),
    )
    values = {name: side({"precision": "fp64"}).values() for name, side in sides.items()}
    assert harness.largest_difference("tiny", values, harness.EQUAL) is not None
    plain = module["plain_side"].__globals__["PlainModel"]

    def other_eps(ours: Any, length: int) -> Any:
        model = plain(ours, length)
        model.norm.eps = 1e-6
        return model

    module["plain_side"].__globals__["PlainModel"] = other_eps
    with pytest.raises(ValueError, match="plain computes something else"):
        harness.largest_difference("tiny", values | {"plain": sides["plain"]({"precision": "fp64"}).values()}, 1e-9)
