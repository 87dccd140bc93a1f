"""Seeds until resolved: what is bought and why it stops, and that no look misses the truth more often than claimed."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from heddle.lab.compare.results import Run
from heddle.lab.compare.run import UntilResolved
from heddle.lab.compare.statistics import seed_statistics
from heddle.lab.compare.verdict import Spending, StoppingRule, anytime_level
from tests.analysis.comparison import simulation
from tests.analysis.comparison.plain import typed
from tests.analysis.comparison.simulation import draw, run_until_resolved, stopped_miss_rate
from tests.analysis.comparison.test_statistics import finished_run
from tests.cases import in_turn


def losses_of(offsets: Sequence[float], seeds: int = 4, spread: float = 0.004) -> np.ndarray:
    rng = np.random.default_rng(3)
    return np.asarray(offsets)[:, None] + rng.normal(0, 0.05, seeds) + rng.normal(0, spread, (len(offsets), seeds))


def decide(losses: np.ndarray, rule: StoppingRule, text: float | None = None, seconds: float = 1.0) -> Any:
    designs = len(losses)
    names = tuple("abcdefgh"[:designs])
    error = None if text is None else np.full((designs, designs), text)
    statistics = seed_statistics(names, losses, error, math.nan if text is None else 20.0)
    tried = np.isfinite(losses).sum(1).tolist()
    return rule.decide(statistics, Spending(tried, [seconds] * designs, seconds * sum(tried)))


def test_clear_losers_are_dropped_and_open_designs_get_the_next_seed() -> None:
    decision = decide(losses_of([0.0, 0.001, 0.5]), StoppingRule(0.004))
    assert decision.standings == ("leader", "open", "behind")
    assert decision.runs == ((0, 4), (1, 4))
    assert decision.reason is None


def test_it_stops_when_each_design_is_behind_or_tied() -> None:
    decision = decide(losses_of([0.0, 0.001, 0.5], seeds=8), StoppingRule(0.05))
    assert decision.standings == ("leader", "tied", "behind")
    assert decision.runs == ()
    assert decision.reason == ("Each design is resolved from a or a tie within ± 0.05, so no more seeds were bought.")


def test_designs_with_fewer_seeds_catch_up_first() -> None:
    losses = losses_of([0.0, 0.001, 0.002], seeds=6)
    losses[2, 3:] = np.nan
    decision = decide(losses, StoppingRule(0.004))
    assert decision.standings[2] == "open"
    assert set(decision.runs) == {(2, 3), (2, 4), (2, 5)}


def test_a_budget_goes_to_the_design_that_is_nearest_to_a_decision() -> None:
    losses = losses_of([0.0, 0.012, 0.0005], seeds=4)
    rule = StoppingRule(0.003)
    assert decide(losses, rule).standings == ("leader", "open", "open")
    assert {design for design, _ in decide(losses, rule).runs} == {0, 1, 2}
    # 12 seconds are spent; few more decide the second design and not the third
    limited = decide(losses, StoppingRule(0.003, budget_seconds=18.0))
    assert {design for design, _ in limited.runs} == {0, 1}
    nothing = decide(losses, StoppingRule(0.003, budget_seconds=13.0))
    assert nothing.runs == ()
    assert nothing.reason == "The rest of the budget of 13 s buys no further seed; not decided from a: b and c."


def test_seeds_are_not_bought_where_the_text_is_what_hides_the_difference() -> None:
    decision = decide(losses_of([0.0, 0.001]), StoppingRule(0.004), text=0.05)
    assert decision.standings == ("leader", "text-limited")
    assert decision.runs == ()
    assert "give more held-out text" in decision.reason


def test_designs_without_results_are_not_bought() -> None:
    losses = losses_of([0.0, 0.001, 0.0])
    losses[2] = np.nan
    assert decide(losses, StoppingRule(0.004)).standings[2] == "failed"
    decision = decide(np.full((2, 3), np.nan), StoppingRule(0.004))
    assert (decision.runs, decision.standings) == ((), ("failed", "failed"))
    often = losses_of([0.0, 0.001, 0.0])
    statistics = seed_statistics(tuple("abc"), np.where(np.arange(4) < np.array([[4], [4], [1]]), often, np.nan))
    decision = StoppingRule(0.004).decide(statistics, Spending([4, 4, 4], [1.0] * 3, 12.0))
    assert decision.standings == ("leader", "open", "failed")


def test_all_seeds_may_be_used() -> None:
    losses = losses_of([0.0, 0.0], seeds=100)
    losses[1] = losses[0] + np.where(np.arange(100) % 2, 0.011, -0.01)
    decision = decide(losses, StoppingRule(1e-5))
    assert decision.runs == ()
    assert decision.reason == "All 100 seeds are used; not decided from a: b."


def text_run(seed: int, loss: float, seconds: float) -> Run:
    run: Run = typed(Run, finished_run(seed, np.full(8, loss)) | {"seconds": seconds})
    return run


class World:
    """Runs whose results are fixed in advance."""

    def __init__(self, offsets: Mapping[str, float]) -> None:
        self.losses = dict(zip(offsets, losses_of(list(offsets.values()), seeds=100), strict=True))
        self.results: dict[tuple[str, int], Run] = {}

    def do(self, pairs: Sequence[tuple[str, int]]) -> None:
        for name, seed in pairs:
            self.results[name, seed] = text_run(seed, float(self.losses[name][seed]), 2.0 + seed % 3)

    def runs(self) -> dict[str, list[Run]]:
        return {name: [run for (of, _), run in self.results.items() if of == name] for name in self.losses}


def schedule(world: World, budget: float | None = 60.0, saved: Any = ()) -> UntilResolved:
    return UntilResolved(tuple(world.losses), (0, 1, 2), StoppingRule(0.006, budget), 1, saved)


OFFSETS = {"a": 0.0, "b": 0.002, "c": 0.3}


def bought_by(world: World, plan: UntilResolved, most: int = 100) -> list[list[tuple[str, int]]]:
    batches = []
    while pairs := plan.next_runs(world.runs()):
        batches.append(pairs)
        world.do(pairs)
        assert len(batches) < most
    return batches


def test_a_schedule_buys_until_its_budget_and_says_why_it_stops() -> None:
    world = World(OFFSETS)
    plan = schedule(world)
    batches = bought_by(world, plan)
    assert batches[0] == [(name, seed) for seed in range(3) for name in "abc"]
    assert len(batches) > 3
    # the loser is dropped after the first seeds, or soon
    assert sum(name == "c" for batch in batches for name, _ in batch) <= 5
    assert plan.reason is not None
    total = sum(run.seconds_in_all for run in world.results.values())
    assert total <= 60.0


def test_an_ended_schedule_continues_with_the_same_decisions() -> None:
    whole = World(OFFSETS)
    batches = bought_by(whole, schedule(whole))
    everything = [pair for batch in batches for pair in batch]
    for stop in range(0, len(everything), 3):
        world = World(OFFSETS)
        world.do(everything[:stop])
        plan = schedule(world)
        bought_by(world, plan)
        assert set(world.results) == set(whole.results)
    # the same results in another order give the same decisions
    shuffled = World(OFFSETS)
    shuffled.do(everything[::-1][len(everything) // 2 :])
    assert set(itertools.chain(*bought_by(shuffled, schedule(shuffled)))) <= set(everything)


def test_saved_runs_of_another_budget_are_used() -> None:
    world = World(OFFSETS)
    bought_by(world, schedule(world, None))
    every = set(world.results)
    plan = schedule(world, 30.0, saved=every)
    again = World(OFFSETS)
    assert set(itertools.chain(*bought_by(again, plan))) == every


def test_looks_at_few_seeds_spend_little() -> None:
    levels = [anytime_level(seeds) for seeds in range(2, 101)]
    assert max(levels) == anytime_level(8) == 0.006
    assert levels[:7] == sorted(levels[:7])
    assert levels[6:] == sorted(levels[6:], reverse=True)


def looked_at(designs: int, seeds: int, trials: int) -> float:
    """How often any look at 2, 3, … seeds of equal designs misses."""
    rng = np.random.default_rng(6)
    missed = 0
    for _ in range(trials):
        losses, _ = draw(rng, [1.0] * designs, seeds)
        missed += any(
            simulation.misses(simulation.statistics_of(losses[:, :count], None), simulation.anytime_level)
            for count in range(2, seeds + 1)
        )
    return missed / trials


def test_all_looks_together_cover() -> None:
    assert looked_at(2, 12, 300) < 0.07
    assert looked_at(4, 12, 100) < 0.1


@pytest.mark.soak
@pytest.mark.parametrize(("designs", "seeds"), [(2, 100), (4, 40), (8, 40)])
def test_all_looks_together_cover_in_full(designs: int, seeds: int) -> None:
    assert looked_at(designs, seeds, 2000) <= 0.05 + 0.012


STOPPED = [(2, 20.0), (4, 40.0), (8, 64.0)]


@pytest.mark.parametrize(("designs", "budget"), in_turn(STOPPED, 1))
def test_stopping_and_dropping_resolve_equal_designs_rarely(designs: int, budget: float) -> None:
    trials = 240 // designs
    rate, runs = stopped_miss_rate([1.0] * designs, 0.8, budget, trials)
    assert rate < 0.05 + 2.5 * math.sqrt(0.05 / trials)
    assert 3 * designs < runs <= budget


@pytest.mark.soak
@pytest.mark.parametrize("text", [0.0, 0.3])
@pytest.mark.parametrize(("designs", "budget"), STOPPED)
def test_stopping_in_full(designs: int, budget: float, text: float) -> None:
    rate, _ = stopped_miss_rate([1.0] * designs, 0.8, budget, 2000, text)
    assert rate <= 0.062


def test_peeking_with_fixed_intervals_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "anytime_level", lambda seeds: 0.05)
    assert looked_at(2, 12, 300) > 0.1


def test_a_true_difference_is_found_with_fewer_runs_than_fixed_seeds() -> None:
    losses = losses_of([0.0, 0.02, 0.5, 0.6], seeds=100)
    bought, _, reason = run_until_resolved(losses, None, StoppingRule(0.01))
    assert "no more seeds were bought" in reason
    counts = np.isfinite(bought).sum(1)
    assert counts[0] == counts[1] > counts[2]


def test_added_designs_end_no_pair_that_was_open() -> None:
    """Calmer designs make the spread of all look smaller; the two that were there first are compared as before."""
    found = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        losses = rng.normal(size=(6, 3)) * np.array([1.0, 1.0, 0.1, 0.1, 0.1, 0.1])[:, None]
        losses += np.array([0.0, rng.uniform(2, 40), 90.0, 90.0, 90.0, 90.0])[:, None]
        alone, later = simulation.statistics_of(losses[:2], None), simulation.statistics_of(losses, None)
        spending, rule = Spending([3] * 6, [1.0] * 6, 18.0), StoppingRule(0.01)
        standings = [rule.decide(later, spending, earlier).standings[1] for earlier in ((), (alone,))]
        if later.half_width(0, 1, anytime_level) < abs(alone.mean[0, 1]) < alone.half_width(0, 1, anytime_level):
            found += 1
            assert standings == ["behind", "open"]
        else:
            assert standings[0] == standings[1]
    assert found
