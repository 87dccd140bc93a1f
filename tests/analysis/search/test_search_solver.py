"""The solver of a search against every assignment of random tables, and its frontier."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from heddle.lab.search import solve as solver
from heddle.lab.search.solve import (
    Choice,
    ScoreTable,
    Solution,
    frontier,
    greedy,
    random_choice,
    single_kind,
    solve,
)

DEPTH, KINDS = 4, ("half", "quarter", "window")
SEEDS = range(4)


def random_table(seed: int) -> ScoreTable:
    """Replacements with random changes of the logits, so that some pairs help each other; one needs its neighbor."""
    draw = np.random.default_rng(seed)
    layers = tuple(layer for layer in range(DEPTH) for _ in KINDS)
    changes = draw.normal(size=(len(layers), 5)) * draw.lognormal(size=(len(layers), 1))
    gram = changes @ changes.T
    saved = np.tile([0.5, 0.75, 1.0], DEPTH) * np.repeat(draw.uniform(0.5, 1.5, DEPTH), 3)
    costs = {"state": -saved, "flops": draw.normal(size=len(layers))}
    totals = {"state": float(saved[2::3].sum()), "flops": 20.0}
    names = tuple(KINDS * DEPTH)
    return ScoreTable(DEPTH, layers, names, np.diag(gram) / 2, gram, costs, totals, {5: (0,), 11: (2, 1)})


def every_choice(table: ScoreTable) -> Iterator[Choice]:
    """All assignments, whether they are allowed or not."""
    for chosen in itertools.product(*([-1, *table.of_layer(layer)] for layer in range(table.depth))):
        yield tuple(item for item in chosen if item >= 0)


def best_of_all(table: ScoreTable, limits: dict[str, float], pairs: bool, without: list[Choice] | None = None) -> Any:
    """The least value by trying all assignments; None if none is within the limits."""
    allowed = (c for c in every_choice(table) if table.is_allowed(c, limits) and c not in (without or []))
    return min((table.value(choice, pairs) for choice in allowed), default=None)


def limits_of(table: ScoreTable, share: float) -> dict[str, float]:
    return {"state": share * table.totals["state"], "flops": 1.02 * table.totals["flops"]}


def check_against_all(table: ScoreTable, pairs: bool) -> None:
    for share in (0.05, 0.3, 0.5, 0.9):
        limits, without = limits_of(table, share), list[Choice]()
        for _ in range(3):  # the best, the next and the one after it
            found, expected = solve(table, limits, pairs, without), best_of_all(table, limits, pairs, without)
            assert (found is None) == (expected is None)
            if found is None:
                break
            assert table.is_allowed(found.choice, limits)
            assert found.value == pytest.approx(expected, abs=1e-9)
            assert found.gap < 1e-6
            without.append(found.choice)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("pairs", [True, False])
def test_as_good_as_the_best_of_all_assignments(seed: int, pairs: bool) -> None:
    check_against_all(random_table(seed), pairs)


@pytest.mark.parametrize("fault", ["no_pairs", "no_needs"])
def test_a_wrong_program_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = solver.solve

    def wrong(table: ScoreTable, *arguments: Any) -> Solution | None:
        changed = replace(table, needs={}) if fault == "no_needs" else replace(table, gram=0 * table.gram)
        found = right(changed, *arguments)
        return found and Solution(found.choice, table.value(found.choice), found.gap)

    monkeypatch.setitem(globals(), "solve", wrong)
    with pytest.raises(AssertionError):
        check_against_all(random_table(0), True)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_frontier_is_monotone_and_optimal(seed: int) -> None:
    table, shares = random_table(seed), (0.25, 0.5, 0.75, 1.0)
    points = frontier(table, "state", shares, {})
    assert [share for share, _ in points] == sorted(shares, reverse=True)
    values = [solution.value for _, solution in points]
    assert values == sorted(values)
    for share, solution in points:
        limits = {"state": share * table.totals["state"]}
        assert solution.value == pytest.approx(best_of_all(table, limits, True), abs=1e-9)


def test_a_solver_out_of_time_leaves_the_frontier_monotone(monkeypatch: pytest.MonkeyPatch) -> None:
    table, right = random_table(0), solver.solve

    def late(table: ScoreTable, limits: dict[str, float]) -> Solution | None:
        found = right(table, limits)
        poor = limits["state"] > 0.6 * table.totals["state"]  # everything converted, which no budget asks for
        return Solution((0, 3, 6, 9), table.value((0, 3, 6, 9)) + 100, 1.0) if poor else found

    monkeypatch.setattr(solver, "solve", late)
    values = [solution.value for _, solution in frontier(table, "state", (0.25, 0.5, 0.75, 1.0), {})]
    assert values == sorted(values)
    assert max(values) < 100


@pytest.mark.parametrize("seed", SEEDS)
def test_baselines_stay_within_the_limits(seed: int) -> None:
    table = random_table(seed)
    limits = {"state": 0.5 * table.totals["state"]}
    best = best_of_all(table, limits, False)
    drawn = random_choice(table, limits, np.random.default_rng(seed))
    for choice in (greedy(table, limits), drawn, *(single_kind(table, limits, kind) for kind in KINDS)):
        if choice is not None:
            assert table.is_allowed(choice, limits)
            assert table.value(choice, False) >= best - 1e-12
    assert greedy(table, {"state": table.totals["state"]}) == ()
    assert greedy(table, {"state": -1.0}) is None
    last_first = single_kind(table, {"state": 0.9 * table.totals["state"]}, "quarter", (3, 2, 1, 0))
    assert last_first is not None
    assert [table.layers[item] for item in last_first][-1] == 3
