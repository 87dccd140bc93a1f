"""Invented tunings of realistic shape, for tests and for looking at."""

import math
import random
from collections.abc import Mapping
from typing import Any

from heddle.lab.compare.plan import TuningPlan, parse_tuned_fields
from heddle.lab.compare.tuning import Search, Trial, Tuning, best_shared
from tests.analysis.comparison.plain import shared_value_matters, tuning_report


def make_tuning(optima: Mapping[str, float], *fields: str, budget: float = 3.0, diverges: float = 0.02) -> Tuning:
    """A finished search over the rate: each design has a parabola around its optimum, and diverges at high rates."""
    plan = TuningPlan(parse_tuned_fields(fields or ("lr=0.0005..0.032",)), "share", budget)
    search = Search(plan.fields, dict.fromkeys(optima, 1.0), budget * len(optima), 0.02)
    tuning = Tuning(plan, search, dict.fromkeys(optima, 400))
    while pending := tuning.state.pending:
        for trial in pending:
            tuning.results[trial] = trial_result(trial, optima[trial.design], diverges, search.fraction)
    return tuning


def trial_result(trial: Trial, optimum: float, diverges: float, fraction: float) -> dict[str, Any]:
    rate = float(trial.candidate[0])
    if rate > diverges:
        return {"status": "diverged", "message": "10 steps in a row"}
    luck = random.Random(repr(trial)).gauss(0, 0.003)
    loss = 2.3 + 0.04 * math.log2(rate / optimum) ** 2 - 0.2 * math.log(fraction) + luck
    tokens = int(500_000 * fraction)
    return {"status": "done", "bits_per_byte": loss, "train_tokens": tokens, "seconds": tokens / 20_000}


def with_tuning(report: dict[str, Any], optima: Mapping[str, float] | None = None, *fields: str) -> dict[str, Any]:
    """A report whose designs were tuned; by default they differ in their best rates, by factors of 2."""
    names = [design["name"] for design in report["designs"]]
    tuning = make_tuning(optima or {name: 0.002 * 2 ** (index % 3) for index, name in enumerate(names)}, *fields)
    runs = {design["name"]: design["runs"] for design in report["designs"]}
    matters = shared_value_matters(tuning, runs)
    shared_runs = {name: [at_shared(tuning, name, run) for run in of_design] for name, of_design in runs.items()}
    return report | {"tuning": tuning_report(tuning, runs, shared_runs if matters else {})}


def at_shared(tuning: Tuning, name: str, run: dict[str, Any]) -> dict[str, Any]:
    """A run at the shared values: as much worse as it was in the trials."""
    losses = tuning.losses()
    shared = best_shared(tuning.search, tuning.state, losses)
    own, common = (losses[Trial(name, v)] for v in (tuning.state.best[name], shared))
    windows = [[bits + (common - own) * size, size] for bits, size in run["windows"]]
    return run | {"bits_per_byte": run["bits_per_byte"] + common - own, "windows": windows}
