"""The search for each design's best training fields, on invented losses: nothing is trained."""

import math
import random
from collections.abc import Callable, Mapping

import pytest

from heddle.lab.compare import tuning
from heddle.lab.compare.plan import parse_tuned_fields
from heddle.lab.compare.tuning import (
    MAX_ADDED_VALUES,
    BudgetTooSmall,
    Search,
    SearchState,
    Trial,
    best_shared,
    search_state,
)

Loss = Callable[[Trial], float]
RATES = "lr=0.0005..0.032"  # seven values, each twice the one before


def make_search(*fields: str, designs: int = 2, budget: float = 6.0, min_fraction: float = 0.02) -> Search:
    costs = {f"design{index}": 1.0 for index in range(designs)}
    return Search(parse_tuned_fields(fields or (RATES,)), costs, budget, min_fraction)


def run_all(search: Search, loss: Loss) -> tuple[SearchState, dict[Trial, float]]:
    """Run what the search asks for until it is over."""
    losses: dict[Trial, float] = {}
    for _ in range(100):
        state = search_state(search, losses)
        if not state.pending:
            return state, losses
        losses |= {trial: loss(trial) for trial in state.pending}
    raise AssertionError("the search does not end")


def bowls(optima: Mapping[str, float], noise: float = 0.0, diverges_above: float = math.inf, seed: int = 0) -> Loss:
    """A parabola over the logarithm of the rate, with noise that the trial and `seed` decide."""

    def loss(trial: Trial) -> float:
        rate = float(trial.candidate[0])
        if rate > diverges_above:
            return math.inf
        luck = random.Random(f"{trial}{seed}").gauss(0, noise)
        return 2.0 + 0.1 * math.log2(rate / optima[trial.design]) ** 2 + luck

    return loss


def test_each_design_gets_its_own_best_value() -> None:
    state, losses = run_all(make_search(), bowls({"design0": 0.001, "design1": 0.016}))
    assert state.best == {"design0": (0.001,), "design1": (0.016,)}
    assert state.open_ends == {}
    assert set(losses) == set(make_search().trials(state.candidates))


def test_every_design_runs_the_same() -> None:
    search = make_search("lr=0.0005..0.5", designs=3, budget=12)
    state, losses = run_all(search, bowls({"design0": 0.004, "design1": 0.008, "design2": 0.016}))
    by_design = [{trial.candidate for trial in losses if trial.design == name} for name in search.designs]
    assert by_design[0] == by_design[1] == by_design[2] == set(state.candidates)


@pytest.mark.parametrize(("optimum", "extreme"), [(0.00012, 0.000125), (0.25, 0.256)])
def test_a_best_value_at_the_edge_widens_the_grid(optimum: float, extreme: float) -> None:
    search = make_search(budget=40)
    state, _ = run_all(search, bowls(dict.fromkeys(search.designs, optimum)))
    assert set(state.best.values()) == {(extreme,)}
    assert extreme not in search.fields[0].values
    assert state.open_ends == {}
    assert len(state.values[0]) <= 7 + MAX_ADDED_VALUES


def test_a_grid_is_not_widened_for_ever_and_says_so() -> None:
    search = make_search(budget=1000)
    state, _ = run_all(search, bowls(dict.fromkeys(search.designs, 1e6)))
    assert len(state.values[0]) == 7 + MAX_ADDED_VALUES
    assert state.open_ends == dict.fromkeys(search.designs, ("lr above 0.512",))
    poor, _ = run_all(make_search(budget=3.0), bowls(dict.fromkeys(search.designs, 1e6)))
    assert poor.open_ends, "a budget that does not reach the optimum is not silent"


def test_what_diverged_is_worse_than_anything() -> None:
    search = make_search()
    state, losses = run_all(search, bowls(dict.fromkeys(search.designs, 0.03), diverges_above=0.009))
    assert set(state.best.values()) == {(0.008,)}
    assert math.inf in losses.values()
    nothing, _ = run_all(search, lambda trial: math.inf)
    assert float(nothing.values[0][0]) < 0.0005, "where everything diverged, lower values are tried"


def test_the_search_follows_from_the_losses_alone() -> None:
    """Whatever was finished before an interruption, in whatever order: the same runs, the same best."""
    search = make_search(designs=3)
    loss = bowls({"design0": 0.001, "design1": 0.004, "design2": 0.2}, noise=0.05)
    state, losses = run_all(search, loss)
    for seed in range(5):
        shuffled = random.Random(seed).sample(sorted(losses, key=repr), len(losses))
        partial: dict[Trial, float] = {}
        for trial in shuffled:
            pending = search_state(search, partial).pending
            partial |= {pending[-1]: losses[pending[-1]]} if pending else {}
            assert trial in losses
        assert search_state(search, partial) == state


@pytest.mark.parametrize("seed", range(40))
def test_the_budget_is_never_exceeded(seed: int) -> None:
    draw = random.Random(seed)
    fields = [draw.choice((RATES, "lr=0.001,0.003,0.01", "lr=0.001..0.1"))]
    fields += draw.choice(([], ["weight_decay=0,0.1,0.3"], ["batch_size=4..16", "optimizer=adamw,muon"]))
    costs = {f"design{index}": draw.uniform(0.5, 2) for index in range(draw.randint(1, 5))}
    search = Search(parse_tuned_fields(fields), costs, draw.uniform(1, 60) * sum(costs.values()), 0.02)
    optima = {name: 10 ** draw.uniform(-4.5, 0) for name in costs}
    state, losses = run_all(search, bowls(optima, noise=draw.choice((0.0, 0.1))))
    cost = sum(costs[trial.design] for trial in losses) * search.fraction
    assert cost == pytest.approx(state.cost)
    assert cost <= search.budget * (1 + 1e-9)
    assert search.min_fraction * (1 - 1e-9) <= search.fraction <= 1


def test_the_longest_trials_that_the_budget_allows() -> None:
    """Ample: whole runs. Less: shorter ones, with room for one more value. Too little: what would do."""
    assert make_search(budget=2 * 8).fraction == 1.0
    assert make_search(budget=8).fraction == pytest.approx(0.5)
    with pytest.raises(BudgetTooSmall) as caught:
        make_search(budget=0.1, min_fraction=0.1)
    enough = caught.value.least_budget
    assert make_search(budget=enough, min_fraction=0.1).fraction == pytest.approx(0.1)
    with pytest.raises(BudgetTooSmall):
        make_search(budget=enough * 0.999, min_fraction=0.1)


def test_fields_are_searched_together() -> None:
    search = make_search(RATES, "optimizer=adamw,muon", "weight_decay=0,0.1,0.3", budget=60)

    def loss(trial: Trial) -> float:
        rate, optimizer, decay = trial.candidate
        best = 0.002 if optimizer == "muon" else 0.008
        penalty = 0.05 * (optimizer == "adamw") if trial.design == "design0" else 0.05 * (optimizer == "muon")
        return penalty + math.log2(float(rate) / best) ** 2 + abs(float(decay) - 0.3)

    state, _ = run_all(search, loss)
    assert state.best == {"design0": (0.002, "muon", 0.3), "design1": (0.008, "adamw", 0.3)}
    assert state.values[2] == (0.0, 0.1, 0.3, 0.9)  # nothing continues a grid below 0


def test_noise_rarely_costs_more_than_a_step() -> None:
    """With noise of a fifth of a step's price, the chosen value's true loss stays near the best one's."""
    regrets = []
    for seed in range(60):
        optimum = 10 ** random.Random(seed).uniform(-3, -1.7)
        state, _ = run_all(make_search(designs=1), bowls({"design0": optimum}, noise=0.02, seed=seed))
        regrets.append(0.1 * math.log2(float(state.best["design0"][0]) / optimum) ** 2)
    assert sum(regret > 0.11 for regret in regrets) <= 3
    assert sum(regrets) / len(regrets) < 0.03


def test_the_best_shared_value() -> None:
    search = make_search(designs=3)
    state, losses = run_all(search, bowls({"design0": 0.001, "design1": 0.004, "design2": 0.004}))
    assert best_shared(search, state, losses) == (0.002,)
    diverged = {trial: math.inf if trial.candidate == (0.002,) and trial.design == "design0" else loss
                for trial, loss in losses.items()}  # fmt: skip
    assert best_shared(search, state, diverged) != (0.002,)


def test_the_worst_that_is_chosen_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_best", lambda state, name, losses: max(state.candidates))
    with pytest.raises(AssertionError):
        test_each_design_gets_its_own_best_value()


def test_an_edge_that_is_an_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_missing_neighbors", lambda search, state: (state.values, [], {}))
    with pytest.raises(AssertionError):
        test_a_best_value_at_the_edge_widens_the_grid(0.25, 0.256)
