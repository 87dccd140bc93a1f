"""Attention residuals, full and in blocks, against pre-norm."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences

RESIDUALS: dict[str, dict[str, Any]] = {
    "pre-norm": {"kind": "pre_norm"},
    "full": {"kind": "attention_residuals"},
    "blocks of 4": {"kind": "attention_residuals", "block_size": 4},
}
WIDTH = 48
SETTINGS = {"steps": 400, "batch_size": 8, "sequence_length": 96, "learning_rate": 4e-3}


def findings(results: Results) -> Sequence[Finding]:
    """Losses against pre-norm's, and the forms against each other."""
    loss = "loss"
    return [
        Finding("Attention residuals end below pre-norm", differences(results, "pre-norm", "full", loss)),
        Finding("Blocks of 4 layers end below pre-norm", differences(results, "pre-norm", "blocks of 4", loss)),
        Finding("Blocks lose against the full form", differences(results, "blocks of 4", "full", loss)),
    ]


ROW = Row(
    title="Attention residuals",
    papers=[
        "Kimi Team 2026: lower loss at every size of a scaling law, as much as 1.25 times the compute; blocks keep "
        "most of it.",
        "Marin 2026 (one seed): −0.022 nats at width 768, the largest gain of thirteen changes.",
    ],
    trainings=[
        Training(
            key,
            {
                "width": WIDTH,
                "residual": residual,
                "initialization": {"std": WIDTH**-0.5},
                "layers": [{"repeat": 12, "mixer": attention(), "feedforward": {"kind": "gated", "hidden": 128}}],
            },
            "stdlib",
            SETTINGS,
        )
        for key, residual in RESIDUALS.items()
    ],
    findings=findings,
    remark="Twelve layers. Parameters are equal but for 25 queries and the last norm.",
)
