"""The table of the parts of 2026: its rows have cases and oracles, its page is whole, and a wrong formula is seen."""

import ast
import importlib
import re

import pytest

from heddle.numerics.attention.householder import HouseholderProducts
from tests.cases import CASES
from tests.laws.planting import operator
from tools import part_table

PAGE = part_table.PAGE.read_text(encoding="utf-8")
ERROR = re.compile(r"^\d+e-\d+$")


@pytest.mark.parametrize("row", part_table.ROWS, ids=lambda row: row.part)
def test_a_row_has_a_case_an_oracle_and_small_errors(row: part_table.Row) -> None:
    module, _, function = row.test.partition(":")
    assert row.name in CASES
    assert callable(getattr(importlib.import_module(f"tests.{module}"), function))
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {row.part} (`{row.name}`)")]
    assert "violated" not in line
    assert "differ" not in line
    errors = [float(cell) for cell in line.split(" | ") if ERROR.match(cell)]
    assert all(error <= 1e-9 for error in errors)


def first_designs(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[part_table.Row, part_table.Errors]:
    """A row, and its errors over three designs."""
    monkeypatch.setattr(part_table, "DESIGNS", 3)
    [row] = [row for row in part_table.ROWS if row.name == name]
    designs, found = part_table.measured(row)
    assert designs == 3
    return row, found


def test_a_wrong_formula_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    row, found = first_designs(monkeypatch, "path-forget")
    assert found.values is not None
    assert found.values < 1e-10
    operator(HouseholderProducts.bias, ast.Sub, ast.Add, 3)(monkeypatch)
    _, wrong = part_table.measured(row)
    assert wrong.values is not None
    assert wrong.values > 1e-3


def test_comparisons_within_a_test_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = first_designs(monkeypatch, "attention-exclusive")
    assert found.values is not None
    assert found.gradients is not None
