"""Two layers visited three times, against as many layers (equal FLOPs) and as many weights (equal parameters)."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

SETTINGS = {"steps": 500, "batch_size": 8, "sequence_length": 96, "learning_rate": 4e-3}
WIDTH, HIDDEN = 64, 176


def looped(times: int) -> dict[str, Any]:
    """Two layers, visited so many times."""
    pair = [{"mixer": attention(), "feedforward": {"kind": "gated", "hidden": HIDDEN}}] * 2
    return stack(width=WIDTH) | {"layers": [{"repeat": times, "shared": True, "layers": pair}]}


DESIGNS = {
    "2 layers": stack(*[attention()] * 2, hidden=HIDDEN),
    "2 layers, 3 visits": looped(3),
    "6 layers": stack(*[attention()] * 6, hidden=HIDDEN),
}


def findings(results: Results) -> Sequence[Finding]:
    """Losses at equal parameters and at equal FLOPs."""
    once, visited, deep = DESIGNS
    return [
        Finding("Equal parameters: 3 visits end below one", differences(results, once, visited, "loss")),
        Finding("Equal FLOPs: 6 layers end below 3 visits of two", differences(results, visited, deep, "loss")),
    ]


ROW = Row(
    title="Looped layers",
    papers=[
        "Dehghani et al. 2018 (Universal transformers), Saunshi et al. 2025: k layers visited L times nearly reach kL "
        "layers in reasoning, and stay behind them in perplexity.",
    ],
    trainings=[Training(key, design, "stdlib", SETTINGS) for key, design in DESIGNS.items()],
    findings=findings,
)
