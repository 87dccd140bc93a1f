"""Which heads share one: groups of equal size with the least sum of costs of two heads in the same group.

Exact for up to EXACT_HEADS heads, by dynamic programming over sets of heads: the first head that has no group yet is
joined with every choice of others. Beyond, a heuristic: groups are filled one after the other, from the cheapest free
pair on, then two heads of different groups are swapped while that lowers the sum.
"""

from functools import cache
from itertools import combinations

import numpy as np

EXACT_HEADS = 16

Groups = list[list[int]]


def contiguous_groups(heads: int, groups: int) -> Groups:
    """Neighboring heads."""
    size = heads // groups
    return [list(range(start, start + size)) for start in range(0, heads, size)]


def best_groups(costs: np.ndarray, groups: int) -> Groups:
    """The groups of equal size with the least cost. costs: symmetric [heads, heads]; a group costs its pairs' sum."""
    heads = len(costs)
    if heads == groups:
        return [[head] for head in range(heads)]
    if groups == 1:
        return [list(range(heads))]
    return _exact(costs, groups) if heads <= EXACT_HEADS else _swapped(costs, _greedy(costs, groups))


def grouping_cost(costs: np.ndarray, groups: Groups) -> float:
    """The sum over all pairs within a group."""
    return float(sum(costs[a, b] for group in groups for a, b in combinations(group, 2)))


def _ordered(groups: Groups) -> Groups:
    """Heads within a group, and groups by their first heads, in ascending order."""
    return sorted(sorted(group) for group in groups)


def _exact(costs: np.ndarray, groups: int) -> Groups:
    heads = len(costs)
    size = heads // groups

    @cache
    def group_cost(group: tuple[int, ...]) -> float:
        return grouping_cost(costs, [list(group)])

    @cache
    def best(free: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not free:
            return 0.0, ()
        first, *others = free
        options = []
        for rest in combinations(others, size - 1):
            cost, groups_of_rest = best(tuple(head for head in others if head not in rest))
            options.append((cost + group_cost((first, *rest)), ((first, *rest), *groups_of_rest)))
        return min(options)

    return [list(group) for group in best(tuple(range(heads)))[1]]


def _greedy(costs: np.ndarray, groups: int) -> Groups:
    """Fill one group after the other: the cheapest free pair, then the head that costs least with the group."""
    size, result = len(costs) // groups, []
    of_free_pairs = costs + np.diag(np.full(len(costs), np.inf))
    while np.isfinite(of_free_pairs).any():
        group = [int(head) for head in np.unravel_index(of_free_pairs.argmin(), costs.shape)]
        free = np.isfinite(of_free_pairs).any(1)
        while len(group) < size:
            free[group] = False
            group.append(int(np.where(free, costs[:, group].sum(1), np.inf).argmin()))
        of_free_pairs[group] = of_free_pairs[:, group] = np.inf
        result.append(group)
    return _ordered(result)


def _swapped(costs: np.ndarray, groups: Groups) -> Groups:
    """Swap the two heads of different groups whose swap saves most, until no swap saves anything."""
    label = np.empty(len(costs), dtype=int)
    for number, group in enumerate(groups):
        label[group] = number
    costs = costs - np.diag(np.diag(costs))
    while True:
        member = np.eye(len(groups))[label]
        to_group = costs @ member  # [heads, groups]: with all heads of a group
        own = to_group[np.arange(len(costs)), label]
        change = to_group[:, label] + to_group[:, label].T - own[:, None] - own - 2 * costs
        change[label[:, None] == label] = 0.0
        a, b = np.unravel_index(change.argmin(), change.shape)
        if change[a, b] >= -1e-12 * max(1.0, float(np.abs(costs).max())):
            return _ordered([np.flatnonzero(label == number).tolist() for number in range(len(groups))])
        label[a], label[b] = label[b], label[a]
