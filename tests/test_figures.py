"""Every row of the table of figures has a benchmark, and the finite check's case answers its row."""

import runpy

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
