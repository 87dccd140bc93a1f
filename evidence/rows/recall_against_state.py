"""Recall against the size of the state: windows, linear attention and the gated delta rule, three sizes each."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

SIZES = (2, 4, 8)
TASK = "recall:mqar_mixture,pairs=16,smallest=4"
SETTINGS = {"steps": 400, "batch_size": 16, "sequence_length": 48, "learning_rate": 4e-3}


def recurrence(kind: str, head_dim: int) -> dict[str, Any]:
    """A mixer whose four heads have keys of `head_dim` dims."""
    return {"kind": kind, "heads": 4, "head_dim": head_dim, "value_dim": 16}


DESIGNS = {
    **{f"window {4 * size}": stack(*[attention(window=4 * size)] * 2) for size in SIZES},
    **{f"linear {size}": stack(attention(window=4), recurrence("linear_attention", size)) for size in SIZES},
    **{f"gated delta {size}": stack(*[recurrence("gated_delta", size)] * 2) for size in SIZES},
}


def findings(results: Results) -> Sequence[Finding]:
    """The largest state of each kind against its smallest."""
    unit = "of all answers"
    return [
        Finding(
            f"{name}: {high} recall more than {low}",
            differences(results, f"{kind} {high}", f"{kind} {low}", "accuracy"),
            unit,
        )
        for kind, name, low, high in (
            ("window", "Tokens of a window", 8, 32),
            ("linear", "Dims of a key in linear attention", 2, 8),
            ("gated delta", "Dims of a key in the gated delta rule", 2, 8),
        )
    ]


ROW = Row(
    title="Recall of 4, 8 and 16 pairs against the size of the state",
    papers=[
        "Arora et al. 2024 (Based): recall grows with the state, for windows and for linear attention; at equal "
        "perplexity their mixture is 6.22 points ahead of Mamba on tasks that need recall.",
    ],
    trainings=[Training(key, design, TASK, SETTINGS) for key, design in DESIGNS.items()],
    findings=findings,
    remark="Guessing is right in 15 %. The first layer of linear attention is a window of 4.",
)
