"""Recall as a curve: accuracy over the number of pairs in MQAR, and over the bytes of state.

Arora et al. (2024, Based) show recall against the size of the state as one frontier. Here the small copy of each design
is trained once, on a mixture of 4, 8, 16, 32 and 64 pairs, and its answers are counted for each number of pairs. The
state is that of the copy after it has read all pairs, in bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from heddle.data.recall import MqarMixture
from heddle.errors import ConfigError
from heddle.lab.compare.abilities import solved_accuracy
from heddle.lab.compare.probes import CURVE_PROBE, RecallProbe
from heddle.lab.compare.tables import NO_VALUE, TextTable, format_bytes, format_number, format_percent, join_names
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import flops_per_token, state_bytes
from heddle.training.evaluation.scores import Scores, finite_ratio


def mixture_of(probe: RecallProbe) -> MqarMixture:
    """The task of the curve's probe."""
    task = probe.task_stream.task
    assert isinstance(task, MqarMixture)
    return task


def accuracy_by_pairs(scores: Scores) -> list[tuple[int, float | None, int]]:
    """(pairs, accuracy, scored targets) from the scores of the first validation rows, in their order."""
    counts = mixture_of(CURVE_PROBE).pair_counts
    rows = [scores[first :: len(counts)] for first in range(len(counts))]
    return [(n, finite_ratio(of), sum(size for _, size in of)) for n, of in zip(counts, rows, strict=True)]


def curve_points(config: ModelConfig, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A design's points for the report: pairs, accuracy, scored and state_bytes (None where it cannot be asked)."""
    rows = result.get("by_pairs") or [(n, None, 0) for n in mixture_of(CURVE_PROBE).pair_counts]
    return [
        {"pairs": pairs, "accuracy": accuracy, "scored": scored, "state_bytes": _state_after(config, pairs)}
        for pairs, accuracy, scored in rows
    ]


def _state_after(config: ModelConfig, pairs: int) -> int | None:
    try:
        return state_bytes(CURVE_PROBE.small_copy(config), 2 * pairs, dtype=torch.float32)
    except ConfigError:
        return None


def curve_summary() -> dict[str, Any]:
    """The probe as plain data for the report, with the accuracy of guessing for each number of pairs."""
    counts = mixture_of(CURVE_PROBE).pair_counts
    return CURVE_PROBE.summary() | {"pairs": list(counts), "chance_by_pairs": [1 / count for count in counts]}


def describe_curve_cost(designs: Mapping[str, ModelConfig], train_flops: float) -> str:
    """What the curve costs at most, for the user to read before it runs. train_flops: of all trainings together."""
    tokens = CURVE_PROBE.steps * CURVE_PROBE.batch_size * CURVE_PROBE.task_stream.length
    length = CURVE_PROBE.task_stream.length
    # a backward pass costs twice a forward pass
    flops = sum(
        3 * tokens * flops_per_token(build(CURVE_PROBE.small_copy(config), device="meta"), length)
        for config in designs.values()
    )
    return (
        f"recall curve: {len(designs)} small copies read up to {format_number(tokens)} tokens each, "
        f"{format_percent(flops / train_flops)} of the FLOPs of all trainings; less where they learn it early"
    )


def most_pairs(points: Sequence[Mapping[str, Any]], chance_by_pairs: Sequence[float]) -> int | None:
    """The largest number of pairs up to which a design learned every number, or 0; None where it was not measured."""
    if points[0]["accuracy"] is None:
        return None
    learned = 0
    for point, chance in zip(points, chance_by_pairs, strict=True):
        if point["accuracy"] is None or point["accuracy"] < solved_accuracy(chance):
            break
        learned = point["pairs"]
    return learned


def curve_table(report: Mapping[str, Any]) -> TextTable:
    """Right answers by design and number of pairs, and the state after the most pairs."""
    summary = report["recall_curve"]
    rows = [
        [
            design["name"],
            *(format_percent(point["accuracy"]) for point in design["recall_curve"]),
            _count_text(most_pairs(design["recall_curve"], summary["chance_by_pairs"])),
            format_bytes(design["recall_curve"][-1]["state_bytes"]),
        ]
        for design in report["designs"]
    ]
    chances = [format_percent(chance) for chance in summary["chance_by_pairs"]]
    header = ["right answers", *(f"{count} pairs" for count in summary["pairs"]), "recalls up to", "state at most"]
    return TextTable(header, [*rows, ["guessing", *chances, "", ""]], "Right answers by number of pairs")


def _count_text(count: int | None) -> str:
    return NO_VALUE if count is None else str(count or "none")


def curve_sentence(report: Mapping[str, Any]) -> str:
    """How many pairs each design recalls: "Pairs recalled, of up to 64: gqa 64, linear 8"; "" without a curve."""
    summary = report.get("recall_curve")
    if not summary:
        return ""
    counts = {
        design["name"]: most_pairs(design["recall_curve"], summary["chance_by_pairs"]) for design in report["designs"]
    }
    ranked = sorted(counts.items(), key=lambda pair: -(pair[1] or 0))
    texts = [f"{name} {_count_text(count)}" for name, count in ranked if count is not None]
    return f"Pairs recalled, of up to {summary['pairs'][-1]}: {join_names(texts, 8)}."
