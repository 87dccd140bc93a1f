"""Query-key norms: how many octaves of learning rates train."""

import math
from collections.abc import Sequence

from evidence.row import SEEDS, Finding, Results, Row, Training, attention, differences, stack

RATES = (0.004, 0.016, 0.064, 0.256)
TOLERANCE = 0.15  # bits per byte above the best rate's loss
NORMS = {"plain": None, "normed": "head"}
SETTINGS = {"steps": 240, "batch_size": 8, "sequence_length": 96}


def octaves(results: Results, name: str, seed: int) -> float:
    """log₂ of the largest rate that trains over the smallest one."""
    losses = {rate: results[f"{name} {rate:g}"][seed]["loss"] for rate in RATES}
    trains = [rate for rate, loss in losses.items() if loss <= min(losses.values()) + TOLERANCE]
    return math.log2(max(trains) / min(trains))


def findings(results: Results) -> Sequence[Finding]:
    """The range with norms against that without, and losses at the largest rates."""
    wider = [octaves(results, "normed", seed) - octaves(results, "plain", seed) for seed in SEEDS]
    at_large_rates = [
        Finding(
            f"At a rate of {rate:g}, query-key norms end lower",
            differences(results, f"plain {rate:g}", f"normed {rate:g}", "loss"),
        )
        for rate in RATES[-2:]
    ]
    return [
        Finding(f"The rates within {TOLERANCE} bits per byte of the best span more", wider, "octaves"),
        *at_large_rates,
    ]


ROW = Row(
    title="Query-key norms widen the range of learning rates that train",
    papers=[
        "Dehghani et al. 2023 (ViT-22B): at 8 B parameters attention logits grew and training diverged after some "
        "thousand steps; with query-key norms it did not.",
        "Wortsman et al. 2023: the same appears in small models at high rates; with query-key norms the final loss "
        "changes little over orders of magnitude of the rate.",
    ],
    trainings=[
        Training(
            f"{name} {rate:g}",
            stack(*[attention(qk_norm=norm)] * 2, hidden=176),
            "stdlib",
            SETTINGS | {"learning_rate": rate},
        )
        for name, norm in NORMS.items()
        for rate in RATES
    ],
    findings=findings,
    remark="Gradients are clipped to a norm of 1, which widens the range of both.",
)
