"""A grid of training fields that is tried on every design with the same seed, as pure functions.

Every candidate is trained once on each design, for the same fraction of the design's own run, with its own complete
schedule. A best value needs results at both neighbors of the grid: a missing neighbor is run, beyond the ends of the
grid too, and on all designs, so that any two can be compared at one value. A run that diverged counts as worse than any
other. The search is a function of the losses so far, so that it resumes after an interrupt.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle.errors import ConfigError
from heddle.lab.compare.plan import Candidate, TunedField, Value, all_candidates, format_value

MAX_ADDED_VALUES = 4  # new values of a field's grid
TUNING_SEED = 1_000_000  # of every trial; the comparison's own seeds are smaller


@dataclass(frozen=True)
class Trial:
    """One run of the search."""

    design: str
    candidate: Candidate


Losses = Mapping[Trial, float]  # of finished runs; infinite where one diverged


@dataclass(frozen=True)
class Search:
    """A search to run.

    run_costs: cost of a full run of each design, in the unit of the budget. budget: the most that the search may cost.
    min_fraction: of a run; no trial is shorter. Raises BudgetTooSmall if the budget does not allow such trials.
    """

    fields: tuple[TunedField, ...]
    run_costs: Mapping[str, float]
    budget: float
    min_fraction: float

    def __post_init__(self) -> None:
        if self.fraction < self.min_fraction * (1 - 1e-9):
            raise BudgetTooSmall(self.min_fraction * self._runs * self.round_cost)

    @property
    def designs(self) -> tuple[str, ...]:
        """The designs' names."""
        return tuple(self.run_costs)

    @property
    def round_cost(self) -> float:
        """The cost of one whole run of every design."""
        return sum(self.run_costs.values())

    @property
    def fraction(self) -> float:
        """Length of a trial as a fraction of the design's own run: the longest that the budget allows, up to 1."""
        return min(1.0, self.budget / (self.round_cost * self._runs))

    @property
    def _runs(self) -> int:
        """The candidates, and one more for each numeric field."""
        return len(all_candidates(self.fields)) + sum(field.is_number for field in self.fields)

    def trials(self, candidates: Sequence[Candidate]) -> list[Trial]:
        """The runs of these candidates, candidate by candidate."""
        return [Trial(name, candidate) for candidate in candidates for name in self.designs]


class BudgetTooSmall(ConfigError):
    """The budget is too small for the search. least_budget: the smallest that does."""

    def __init__(self, least_budget: float) -> None:
        super().__init__(f"the budget is too small; the smallest is {least_budget:g}")
        self.least_budget = least_budget


@dataclass(frozen=True)
class SearchState:
    """A search after some losses.

    candidates: all that are tried, added ones last. pending: the runs needed next; empty once the search is over.
    best: candidate by design. values: the grid of each field, with added values. open_ends: by design, the fields whose
    best value has no neighbor that was run.
    """

    candidates: tuple[Candidate, ...]
    pending: tuple[Trial, ...]
    best: Mapping[str, Candidate]
    values: tuple[tuple[Value, ...], ...]
    open_ends: Mapping[str, tuple[str, ...]]
    cost: float


def search_state(search: Search, losses: Losses) -> SearchState:
    """Replay the search on the losses so far: what to run next, or what is best."""
    candidates = tuple(all_candidates(search.fields))
    values = tuple(field.values for field in search.fields)
    cost_of_one = search.round_cost * search.fraction
    state = SearchState(candidates, (), {}, values, {}, cost_of_one * len(candidates))
    while True:
        pending = tuple(trial for trial in search.trials(state.candidates) if trial not in losses)
        if pending:
            return replace(state, pending=pending)
        state = replace(state, best={name: _best(state, name, losses) for name in search.designs})
        values, additions, open_ends = _missing_neighbors(search, state)
        additions = additions[: max(0, math.floor((search.budget - state.cost) / cost_of_one + 1e-9))]
        if not additions:
            return replace(state, open_ends=open_ends)
        values = tuple(
            tuple(value for value in grid if value in before or any(value == row[axis] for row in additions))
            for axis, (grid, before) in enumerate(zip(values, state.values, strict=True))
        )
        cost = state.cost + cost_of_one * len(additions)
        state = replace(state, candidates=(*state.candidates, *additions), values=values, cost=cost)


def _best(state: SearchState, design: str, losses: Losses) -> Candidate:
    """A design's candidate with the lowest loss; of several the first."""
    return min(state.candidates, key=lambda candidate: losses[Trial(design, candidate)])


def _missing_neighbors(
    search: Search, state: SearchState
) -> tuple[tuple[tuple[Value, ...], ...], list[Candidate], dict[str, tuple[str, ...]]]:
    """The grids with new ends, the untried neighbors of the best candidates, and where these lie."""
    grids = list(state.values)
    additions: list[Candidate] = []
    open_ends: dict[str, tuple[str, ...]] = {}
    for name, best in state.best.items():
        for side, neighbor in _neighbors(search, grids, best):
            if neighbor in state.candidates:
                continue
            open_ends[name] = (*open_ends.get(name, ()), side)
            new = [(axis, value) for axis, value in enumerate(neighbor) if value not in grids[axis]]
            if any(len(grids[axis]) >= len(search.fields[axis].values) + MAX_ADDED_VALUES for axis, _ in new):
                continue
            for axis, value in new:
                grids[axis] = tuple(sorted([*grids[axis], value], key=float))
            additions += [neighbor] if neighbor not in additions else []
    return tuple(grids), additions, open_ends


def _neighbors(
    search: Search, grids: Sequence[Sequence[Value]], candidate: Candidate
) -> Iterator[tuple[str, Candidate]]:
    """(where, candidate) of the next values of each grid, or of values that continue it: "lr above"."""
    for axis, field in enumerate(search.fields):
        for direction, word in ((-1, "below"), (1, "above")) if field.is_number else ():
            grid = grids[axis]
            index = grid.index(candidate[axis]) + direction
            value = grid[index] if 0 <= index < len(grid) else field.next_value(grid, direction)
            if value is not None:
                yield (
                    f"{field.name} {word} {format_value(candidate[axis])}",
                    (*candidate[:axis], value, *candidate[axis + 1 :]),
                )


def best_shared(search: Search, state: SearchState, losses: Losses) -> Candidate:
    """The candidate with the lowest mean loss over all designs."""
    return min(state.candidates, key=lambda values: sum(losses[Trial(name, values)] for name in search.designs))
