"""Successive halving (Jamieson & Talwalkar 2016, the inner loop of Hyperband), paired over designs, as pure functions.

A rung trains every candidate once on each design, on one seed, for a fraction of the design's own run, each with a
whole schedule of its own. The better third of each design goes on to the next rung, which is up to three times as long
and has another seed; what one design keeps, all designs run, so that any two can be compared at one value. On the first
and on the last rung a design's best value needs both neighbors of the grid: where one is missing it is run, beyond the
ends of the grid too. A run that diverged counts as worse than any other. Everything follows from the losses so far, so
that an interrupted search continues.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from heddle.errors import ConfigError
from heddle.lab.compare.plan import Candidate, TunedField, Value, all_candidates, format_value

REDUCTION = 3  # of the candidates, and growth of the runs' length, from rung to rung
MIN_CANDIDATES = 3  # of a rung, where there are so many
MIN_GROWTH = 1.5  # a rung that is not this much longer than the one before is left out
MAX_ADDED_VALUES = 4  # new values of a field's grid
FIRST_SEED = 1_000_000  # of the first rung; the comparison's own seeds are below


@dataclass(frozen=True)
class Trial:
    """One run of the search. fraction: of the design's own run."""

    design: str
    candidate: Candidate
    fraction: float
    seed: int


@dataclass(frozen=True)
class SearchRung:
    """Candidates that every design runs for the same fraction of its own run, on one seed."""

    fraction: float
    seed: int
    candidates: tuple[Candidate, ...]

    def trials(self, designs: Sequence[str]) -> list[Trial]:
        """The rung's runs, candidate by candidate."""
        return [Trial(name, values, self.fraction, self.seed) for values in self.candidates for name in designs]


Losses = Mapping[Trial, float]  # of finished runs; infinite where one diverged


@dataclass(frozen=True)
class Search:
    """What is searched.

    run_costs: of a whole run of each design, in the unit of the budget. budget: the search never costs more.
    min_fraction: of a run; no rung is shorter.
    """

    fields: tuple[TunedField, ...]
    run_costs: Mapping[str, float]
    budget: float
    min_fraction: float

    @property
    def designs(self) -> tuple[str, ...]:
        """The designs' names."""
        return tuple(self.run_costs)

    @property
    def round_cost(self) -> float:
        """The cost of one whole run of every design."""
        return sum(self.run_costs.values())

    @property
    def reserve(self) -> int:
        """Candidates that the first and the last rung may gain within the budget."""
        return sum(field.is_number for field in self.fields)


@dataclass(frozen=True)
class SearchState:
    """A search after some losses.

    pending: runs that are needed next; none: the search is over. best: of each design, on the last whole rung.
    values: of each field's grid, with those that were added. open_ends: of each design, the fields whose best value has
    no neighbor that was run on the last rung.
    """

    rungs: tuple[SearchRung, ...]
    pending: tuple[Trial, ...]
    best: Mapping[str, Candidate]
    values: tuple[tuple[Value, ...], ...]
    open_ends: Mapping[str, tuple[str, ...]]
    cost: float


def plan_fractions(search: Search) -> tuple[float, ...]:
    """The fraction of a run for each rung, ascending: the longest last rung that the budget allows.

    One more candidate on the first and on the last rung is counted in, for each numeric field. Raises ConfigError for a
    budget that allows no rung, saying which does.
    """
    count = len(all_candidates(search.fields))
    plans: list[tuple[float, ...]] = []
    least_budget = math.inf
    for rung_count in range(1, len(_rung_sizes(count)) + 1):
        sizes = _rung_sizes(count)[:rung_count]
        shares = [REDUCTION ** -(rung_count - 1 - index) for index in range(rung_count)]
        runs = sum(size * share for size, share in zip(sizes, shares, strict=True))
        runs += search.reserve * (shares[0] + (shares[-1] if rung_count > 1 else 0))
        last = min(1.0, search.budget / (search.round_cost * runs))
        least_budget = min(least_budget, search.min_fraction / shares[0] * runs * search.round_cost)
        if last * shares[0] >= search.min_fraction * (1 - 1e-9):
            plans.append(tuple(last * share for share in shares))
    if search.min_fraction > 1 or not plans:
        raise BudgetTooSmall(least_budget)
    return max(plans, key=lambda fractions: (round(fractions[-1], 9), -len(fractions)))


class BudgetTooSmall(ConfigError):
    """The budget allows no search. least_budget: the smallest that does, infinite where no budget does."""

    def __init__(self, least_budget: float) -> None:
        super().__init__(f"the budget is too small; the smallest is {least_budget:g}")
        self.least_budget = least_budget


def _rung_sizes(count: int) -> list[int]:
    """Candidates of each rung, down to MIN_CANDIDATES."""
    sizes = [count]
    while sizes[-1] > MIN_CANDIDATES:
        sizes.append(max(math.ceil(sizes[-1] / REDUCTION), MIN_CANDIDATES))
    return sizes


def search_state(search: Search, losses: Losses) -> SearchState:
    """Replay the search on the losses so far: what is run next, or what is best."""
    fractions = plan_fractions(search)
    sizes = _rung_sizes(len(all_candidates(search.fields)))
    state = SearchState((), (), {}, tuple(field.values for field in search.fields), {}, 0.0)
    for index, planned in enumerate(fractions):
        candidates = all_candidates(search.fields)
        fraction = planned
        later_runs = sum(sizes[later] * fractions[later] for later in range(index + 1, len(fractions)))
        if index:
            candidates = _promoted(search, state, losses, sizes[index], is_last=not later_runs)
            affordable = (search.budget - state.cost) / search.round_cost
            count = len(candidates) + (0 if later_runs else search.reserve)
            fraction = planned * min(1.0, affordable / (count * planned + later_runs))
            if fraction < MIN_GROWTH * state.rungs[-1].fraction:
                return _finish_rung(search, state, losses, 0.0, is_last=True)
        rung = SearchRung(fraction, FIRST_SEED + index, tuple(candidates))
        state = replace(state, rungs=(*state.rungs, rung), cost=state.cost + _cost(search, rung))
        state = _finish_rung(search, state, losses, later_runs * search.round_cost, is_last=not later_runs)
        if state.pending:
            break
    return state


def _finish_rung(
    search: Search, state: SearchState, losses: Losses, later_cost: float, *, is_last: bool
) -> SearchState:
    """Add neighbors to the newest rung until each design's best has all of them, or a run is missing."""
    while True:
        rung = state.rungs[-1]
        pending = tuple(trial for trial in rung.trials(search.designs) if trial not in losses)
        if pending:
            return replace(state, pending=pending)
        best = {name: _ranking(rung, name, losses)[0] for name in search.designs}
        state = replace(state, best=best)
        if not (is_last or len(state.rungs) == 1):
            return state
        values, additions, open_ends = _missing_neighbors(search, state)
        affordable = (search.budget - state.cost - later_cost) / (search.round_cost * rung.fraction)
        additions = additions[: max(0, math.floor(affordable + 1e-9))]
        if not additions:
            return replace(state, open_ends=open_ends)
        values = tuple(
            tuple(value for value in grid if value in before or any(value == row[axis] for row in additions))
            for axis, (grid, before) in enumerate(zip(values, state.values, strict=True))
        )
        grown = replace(rung, candidates=(*rung.candidates, *additions))
        added_cost = search.round_cost * rung.fraction * len(additions)
        state = replace(state, rungs=(*state.rungs[:-1], grown), values=values, cost=state.cost + added_cost)


def _missing_neighbors(
    search: Search, state: SearchState
) -> tuple[tuple[tuple[Value, ...], ...], list[Candidate], dict[str, tuple[str, ...]]]:
    """The grids with new ends, the neighbors of the best candidates that the newest rung lacks, and where."""
    grids = list(state.values)
    additions: list[Candidate] = []
    open_ends: dict[str, tuple[str, ...]] = {}
    for name, best in state.best.items():
        for side, neighbor in _neighbors(search, grids, best):
            if neighbor in state.rungs[-1].candidates:
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
    """(where, candidate) of the next values of each grid, or of those that continue it: "lr above"."""
    for axis, field in enumerate(search.fields):
        for direction, word in ((-1, "below"), (1, "above")) if field.is_number else ():
            grid = grids[axis]
            index = grid.index(candidate[axis]) + direction
            value = grid[index] if 0 <= index < len(grid) else field.next_value(grid, direction)
            if value is not None:
                yield (
                    f"{field.name} {word} {format_value(candidate[axis])}",
                    (
                        *candidate[:axis],
                        value,
                        *candidate[axis + 1 :],
                    ),
                )


def _ranking(rung: SearchRung, design: str, losses: Losses) -> list[Candidate]:
    """A design's candidates on a rung, lowest loss first; ties in the order of the candidates."""
    return sorted(rung.candidates, key=lambda values: losses[Trial(design, values, rung.fraction, rung.seed)])


def _promoted(search: Search, state: SearchState, losses: Losses, size: int, *, is_last: bool) -> list[Candidate]:
    """The candidates of the next rung: each design's best, then each design's second, until there are `size`.

    On the last rung the neighbors of each design's best come first.
    """
    rankings = [_ranking(state.rungs[-1], name, losses) for name in search.designs]
    required = list(dict.fromkeys(ranking[0] for ranking in rankings))
    if is_last:
        grids = state.values
        neighbors = (neighbor for best in required for _, neighbor in _neighbors(search, grids, best))
        required += [values for values in dict.fromkeys(neighbors) if values not in required]
        required = [
            values for values in required if all(value in grid for value, grid in zip(values, grids, strict=True))
        ]
    ranked = (ranking[index] for index in range(len(rankings[0])) for ranking in rankings)
    chosen = list(dict.fromkeys([*required, *ranked]))[: max(size, len(required))]
    return sorted(
        chosen, key=lambda values: [grid.index(value) for grid, value in zip(state.values, values, strict=True)]
    )


def _cost(search: Search, rung: SearchRung) -> float:
    return search.round_cost * rung.fraction * len(rung.candidates)


def best_shared(search: Search, state: SearchState, losses: Losses) -> Candidate:
    """The candidate of the last rung with the lowest mean loss over all designs."""
    rung = state.rungs[-1]

    def total(values: Candidate) -> float:
        return sum(losses[Trial(name, values, rung.fraction, rung.seed)] for name in search.designs)

    return min(rung.candidates, key=total)
