"""Plants: each kind of change, what it refuses, and that it ends with the test."""

import ast
from functools import cache
from typing import Any

import pytest

from tests.laws.planting import (
    Plant,
    assigned,
    calls,
    condition,
    constant,
    operand_dropped,
    operator,
    reads,
    replaced,
    result,
    wrapped,
)


def share(numbers: list[float], index: int, scale: float = 1.0) -> float:
    total = sum(numbers)
    if total == 0.0 and scale > 0.0:
        return 0.0
    return scale * numbers[index] / total


class Counter:
    def __init__(self, start: int) -> None:
        super().__init__()
        self.count = start

    @property
    def double(self) -> int:
        return 2 * self.count

    @classmethod
    def of(cls, text: str) -> "Counter":
        return cls(len(text))


@cache
def stored(number: int) -> int:
    return number + 1


def opposite(number: float) -> float:
    return -number


PLANTS: list[tuple[Plant, float]] = [
    (replaced(share, lambda numbers, index: 7.0), 7.0),
    (wrapped(share, lambda original, numbers, index: original(numbers, index, scale=2.0)), 1.5),
    (result(share, lambda value: -value), -0.75),
    (calls(share, "sum", lambda original, numbers: original(numbers) + 2), 0.5),
    (calls(share, "sum", lambda _, numbers, *, index: index + 5), 0.5),
    (reads(share, "numbers", lambda numbers: numbers[:1], nth=0), 3.0),
    (assigned(share, "total", lambda total: total + 2), 0.5),
    (condition(share, "total", True), 0.0),
    (operator(share, ast.Div, ast.Mult), 12.0),
    (operand_dropped(share, "total"), 3.0),
    (constant(share, 0.0, 4.0, nth=0), 0.0),
]


@pytest.mark.parametrize("number", range(len(PLANTS)))
def test_each_kind_of_plant_changes_a_function_and_ends(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, expected = PLANTS[number]
    before = share.__globals__.copy()
    with monkeypatch.context() as patch:
        plant(patch)
        assert share([1.0, 3.0], 1) == expected
    assert share([1.0, 3.0], 1) == 0.75
    assert share.__globals__ == before
    assert plant.module == __name__


def test_methods_properties_and_decorated_functions_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned(Counter.__init__, "count", lambda start: start + 1)(monkeypatch)  # it closes over its class
    result(Counter.double, lambda double: double + 100)(monkeypatch)
    wrapped(Counter.of, lambda of, cls, text: of(cls, text * 2))(monkeypatch)
    result(stored, lambda number: number * 10)(monkeypatch)
    assert Counter.of("ab").double == 110
    assert stored(1) == 20
    stored.cache_clear()


def test_a_sign_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    operator(opposite, ast.USub, ast.UAdd)(monkeypatch)
    assert opposite(2.0) == 2.0


def test_two_plants_of_one_function_are_both_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned(share, "total", lambda total: total + 2)(monkeypatch)
    operator(share, ast.Div, ast.Mult)(monkeypatch)
    result(share, lambda value: value + 1)(monkeypatch)
    assert share([1.0, 3.0], 1) == 19.0


@pytest.mark.parametrize(
    "plant",
    [
        calls(share, "max", lambda *_: 0),
        condition(share, "missing", True),
        condition(share, "scale", True, nth=3),
        reads(share, "numbers", lambda numbers: numbers),  # it is read twice
    ],
    ids=["no call", "no condition", "no fourth one", "several"],
)
def test_a_place_that_is_not_there_or_not_alone_is_an_error(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    unchanged: Any = share.__code__
    with pytest.raises(AssertionError):
        plant(monkeypatch)
    assert share.__code__ is unchanged
