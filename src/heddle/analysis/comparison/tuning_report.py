"""What the report says of tuning: the curves, the chosen values, and whether one shared value answers otherwise."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from heddle.analysis.comparison.formatting import format_difference, half_width, join_names, judgment
from heddle.analysis.comparison.grid_search import TUNING_SEED, Trial, best_shared
from heddle.analysis.comparison.statistics import Run, paired_difference
from heddle.analysis.comparison.tuning import Tuning
from heddle.analysis.comparison.tuning_fields import Candidate, describe_candidate, format_value

Runs = Mapping[str, Sequence[Run]]
MAX_PAIRS = 4  # in a sentence


def tuning_report(tuning: Tuning, runs: Runs, shared_runs: Runs | None) -> dict[str, Any]:
    """Everything of the tuning as plain data. runs: of the comparison, at each design's own best values.

    shared_runs: of the same seeds at the best shared values, by design; empty where the trials gave no reason to run
    them, None while that is not known.
    """
    state, names = tuning.state, tuning.field_names
    shared = best_shared(tuning.search, state, tuning.losses())
    report: dict[str, Any] = {
        "fields": [
            {
                "name": field.name,
                "is_number": field.is_number,
                "values": list(values),
                "added": [value for value in values if value not in field.values],
            }
            for field, values in zip(tuning.plan.fields, state.values, strict=True)
        ],
        "budget": {
            "kind": tuning.plan.budget_kind,
            "value": tuning.plan.budget_value,
            "runs": len(tuning.results),
            "whole_runs": sum(tuning.search.fraction for _ in tuning.results),
            "seconds": sum(result["seconds"] for result in tuning.results.values() if result["status"] == "done"),
        },
        "rungs": [
            {"fraction": tuning.search.fraction, "seed": TUNING_SEED, "candidates": list(map(list, state.candidates))}
        ],
        "designs": [_design_report(tuning, name) for name in tuning.search.designs],
        "shared_values": {
            "values": list(shared),
            "text": describe_candidate(names, shared),
            "runs": None if shared_runs is None else _scores(shared_runs),
            "pairs": _pairs(runs, shared_runs) if shared_runs else [],
        },
    }
    return report | {"sentences": _sentences(report)}


def _design_report(tuning: Tuning, name: str) -> dict[str, Any]:
    state = tuning.state
    best = state.best[name]
    results = {candidate: tuning.results[Trial(name, candidate)] for candidate in state.candidates}
    return {
        "name": name,
        "best": list(best),
        "text": describe_candidate(tuning.field_names, best),
        "bits_per_byte": results[best].get("bits_per_byte"),
        "open_ends": list(state.open_ends.get(name, ())),
        "trials": [
            {
                "rung": 0,
                "values": list(candidate),
                "status": result["status"],
                "bits_per_byte": result["bits_per_byte"] if result["status"] == "done" else None,
                "train_tokens": result.get("train_tokens"),
            }
            for candidate, result in results.items()
        ],
    }


def shared_value_matters(tuning: Tuning, runs: Runs) -> bool:
    """Whether the trials suggest that a shared value gives another answer, so that it is worth running.

    That is where the difference between two designs has another sign at the best shared values than
    at each one's own best, or another size by more than the half-width of the comparison's interval.
    """
    losses = tuning.losses()
    shared = best_shared(tuning.search, tuning.state, losses)

    def loss(name: str, values: Candidate) -> float:
        return losses[Trial(name, values)]

    for first, second in combinations(tuning.search.designs, 2):
        at_shared = loss(first, shared) - loss(second, shared)
        own = loss(first, tuning.state.best[first]) - loss(second, tuning.state.best[second])
        half = half_width(paired_difference(runs[first], runs[second]))
        if not math.isfinite(at_shared) or at_shared * own < 0 or abs(at_shared - own) > (half or 0.0):
            return True
    return False


def needs_shared_run(tuning: Tuning, name: str) -> bool:
    """Whether the best shared values differ from a design's own."""
    return best_shared(tuning.search, tuning.state, tuning.losses()) != tuning.state.best[name]


def _scores(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """Of each run its seed, how it ended and its bits per byte."""
    keys = ("seed", "status", "bits_per_byte")
    return {name: [{key: run[key] for key in keys} for run in of_design] for name, of_design in runs.items()}


def _pairs(runs: Runs, shared_runs: Runs) -> list[dict[str, Any]]:
    """Of each two designs the difference at each one's own best and at the shared values, on the same seeds."""
    return [
        {
            "designs": [first, second],
            "own": paired_difference(runs[first], runs[second]),
            "at_shared_values": paired_difference(shared_runs[first], shared_runs[second]),
        }
        for first, second in combinations(runs, 2)
    ]


def _sentences(report: Mapping[str, Any]) -> list[str]:
    budget = report["budget"]
    chosen: dict[str, list[str]] = {}
    for design in report["designs"]:
        chosen.setdefault(design["text"], []).append(design["name"])
    parts = [f"{text} ({join_names(names, 8)})" for text, names in chosen.items()]
    cost = f"{budget['runs']} runs, together as long as {budget['whole_runs']:.1f} of the comparison's"
    sentences = [f"Each design was trained at its own best values, found by {cost}: {join_names(parts, 8)}."]
    for field in report["fields"]:
        if field["added"]:
            added = join_names([format_value(value) for value in field["added"]], 8)
            sentences.append(f"A best {field['name']} was at an edge of its range, which was widened by {added}.")
    open_ends = {design["name"]: design["open_ends"] for design in report["designs"] if design["open_ends"]}
    if open_ends:
        parts = [f"{name} ({' and '.join(ends)})" for name, ends in open_ends.items()]
        sentences.append(
            f"Not tried next to the best value: {join_names(parts, 8)}. A larger budget may find a better one."
        )
    return sentences if report["shared_values"]["runs"] is None else [*sentences, _shared_sentence(report)]


def _shared_sentence(report: Mapping[str, Any]) -> str:
    """Whether one shared value would have given another answer."""
    shared = report["shared_values"]
    if len(report["designs"]) == 1:
        return "There is no second design that could share its values."
    if all(design["best"] == shared["values"] for design in report["designs"]):
        return "All designs have the same best values, so a shared choice of them gives the same answer."
    if not shared["runs"]:
        return (
            f"With the best shared values, {shared['text']}, this comparison would likely answer the same: in the "
            "trials, on one seed, they change no order, and no difference by more than its interval here."
        )
    changed = [pair for pair in shared["pairs"] if judgment(pair["own"]) != judgment(pair["at_shared_values"])]
    start = f"All designs were run at the best shared values too, {shared['text']}, on the same seeds"
    if not changed:
        return f"{start}: no answer changes."
    parts = [
        f"{pair['designs'][0]} − {pair['designs'][1]} is {format_difference(pair['at_shared_values'])} "
        f"({judgment(pair['at_shared_values'])}) there and {format_difference(pair['own'])} "
        f"({judgment(pair['own'])}) with each at its best"
        for pair in changed[:MAX_PAIRS]
    ]
    more = f"; and {len(changed) - MAX_PAIRS} more pairs" if len(changed) > MAX_PAIRS else ""
    return f"{start}, and would have answered otherwise: {'; '.join(parts)}{more}."
