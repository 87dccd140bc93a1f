"""Groups of equal size: exact where it says so, near the best beyond."""

from collections.abc import Iterator

import numpy as np
import pytest

from heddle.conversion import merge_heads as head_groups
from heddle.conversion.merge_heads import Groups, best_groups, contiguous_groups, grouping_cost, pair_rounds


def groupings(heads: list[int], size: int) -> Iterator[Groups]:
    """Every way to part heads into groups of equal size, by plain recursion."""
    if not heads:
        yield []
        return
    for group in groups_with_first(heads, size):
        for rest in groupings([head for head in heads if head not in group], size):
            yield [group, *rest]


def groups_with_first(heads: list[int], size: int) -> Iterator[list[int]]:
    """Every group of this size that holds the first head."""
    for mask in range(2 ** (len(heads) - 1)):
        others = [head for bit, head in enumerate(heads[1:]) if mask >> bit & 1]
        if len(others) == size - 1:
            yield [heads[0], *others]


def random_costs(heads: int, seed: int) -> np.ndarray:
    costs = np.random.default_rng(seed).uniform(size=(heads, heads))
    symmetric: np.ndarray = costs + costs.T
    return symmetric


@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (8, 2), (8, 4), (6, 2), (4, 1), (5, 5), (9, 3)])
def test_groups_cost_least(heads: int, groups: int) -> None:
    for seed in range(3):
        costs = random_costs(heads, seed)
        cheapest = best_groups(costs, groups)
        assert sorted(head for group in cheapest for head in group) == list(range(heads))
        assert {len(group) for group in cheapest} == {heads // groups}
        best = min(grouping_cost(costs, each) for each in groupings(list(range(heads)), heads // groups))
        assert grouping_cost(costs, cheapest) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (8, 4), (9, 3)])
def test_the_heuristic_is_near_the_best(heads: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        costs = random_costs(heads, seed)
        best = grouping_cost(costs, best_groups(costs, groups))
        with monkeypatch.context() as patch:
            patch.setattr(head_groups, "EXACT_HEADS", 0)
            heuristic = best_groups(costs, groups)
        assert {len(group) for group in heuristic} == {heads // groups}
        assert best <= grouping_cost(costs, heuristic) + 1e-12 <= 1.2 * best


def test_the_heuristic_finds_groups_that_are_far_apart() -> None:
    order = np.random.default_rng(0).permutation(32)
    expected = sorted(sorted(order[start : start + 4].tolist()) for start in range(0, 32, 4))
    label = np.argsort(order) // 4
    assert best_groups((label[:, None] != label) * 1.0, 8) == expected


def test_contiguous_groups_are_neighbors() -> None:
    assert contiguous_groups(6, 2) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("heads", [2, 5, 8])
def test_every_two_heads_are_paired_once(heads: int) -> None:
    rounds = pair_rounds(heads)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(heads) for b in range(a + 1, heads)]
    assert all(len({head for pair in each for head in pair}) == 2 * len(each) for each in rounds)
