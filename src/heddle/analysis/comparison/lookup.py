"""Read values out of a comparison's report: means, differences, recall, and series over the context length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PREFERRED_CONTEXT = 8192
Report = Mapping[str, Any]
Design = Mapping[str, Any]


def value_at(series: Iterable[Sequence[Any]] | None, context: float | None) -> float | None:
    """The value of a series of [context, value, …] at one context, or None."""
    return next((row[1] for row in series or () if row[0] == context), None)


def range_at(series: Iterable[Sequence[Any]] | None, context: float | None) -> tuple[float, float] | None:
    """The range of a series of [context, value, low, high] at one context, or None. [context, value] has no range."""
    return next(((row[2], row[3]) for row in series or () if row[0] == context and len(row) > 2), None)


def shared_context(designs: Iterable[Design], key: str) -> int | None:
    """A context at which all designs with the series `key` were measured: 8192, or else the largest, or None."""
    series_of_designs = [design[key] for design in designs if design[key]]
    measured = [{row[0] for row in series if row[1] is not None} for series in series_of_designs]
    common = set.intersection(*measured) if measured else set()
    return PREFERRED_CONTEXT if PREFERRED_CONTEXT in common else max(common, default=None)


def mean_loss(design: Design) -> float | None:
    """The design's mean bits per byte, or None where no run finished."""
    interval = design.get("bits_per_byte")
    return None if interval is None else interval["mean"]


def ranked_designs(report: Report) -> list[Design]:
    """The designs, lowest bits per byte first, those without a finished run last.

    The leader is first: where seeds were bought of some designs only, their means are over different seeds.
    """

    def key(design: Design) -> tuple[bool, float]:
        mean = mean_loss(design)
        return design["name"] != report["leader"], math.inf if mean is None else mean

    return sorted(report["designs"], key=key)


def baseline_design(report: Report) -> Design:
    """The design that the others are compared with."""
    design: Design = next(design for design in report["designs"] if design["name"] == report["baseline"])
    return design


def difference_to_baseline(report: Report, name: str) -> Mapping[str, Any] | None:
    """The paired difference of a design to the baseline; None for the baseline itself."""
    return next((row for row in report["differences"] if row["design"] == name), None)


def differences_to_leader(report: Report) -> list[Mapping[str, Any]]:
    """The rows of the pairs of the leader (their `design`) and another (their `reference`), nearest first."""
    return [row for row in report["pairs"] if row["design"] == report["leader"]]


def recall_accuracy(design: Design, probe: str) -> float | None:
    """The share of right answers of a recall probe, or None where it was not measured."""
    result = design["recall"].get(probe)
    return None if result is None else result["accuracy"]


def first_probe(report: Report) -> tuple[str, Mapping[str, Any]] | None:
    """(name, description) of the first recall probe, which stands for all in summaries; None where there is none."""
    return next(iter(report["recall"].items()), None)


def missing_reason(row: Mapping[str, Any]) -> str:
    """Why a design has no number at a multiple of the trained length: "refused", "not finite" or "not measured"."""
    if row["refusal"] is not None:
        return "refused"
    return "not finite" if row["not_finite"] else "not measured"
