"""Experts against dense feed-forwards of as many active parameters, over three sizes."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

HIDDEN = {32: 88, 48: 128, 72: 200}  # by width


def dense(width: int) -> dict[str, Any]:
    """Two layers with gated feed-forwards."""
    return stack(*[attention()] * 2, width=width, hidden=HIDDEN[width])


def experts(width: int) -> dict[str, Any]:
    """The same with 2 of 8 experts, each half as wide."""
    design = dense(width)
    moe = {"kind": "moe", "experts": 8, "top_k": 2, "hidden": HIDDEN[width] // 2, "bias_update": 0.001}
    return design | {"layers": [layer | {"feedforward": moe} for layer in design["layers"]]}


def findings(results: Results) -> Sequence[Finding]:
    """The dense loss minus that of the experts, by size."""
    return [
        Finding(f"Width {width}: experts end lower", differences(results, f"dense {width}", f"experts {width}", "loss"))
        for width in HIDDEN
    ]


ROW = Row(
    title="Experts against dense at equal active parameters, over sizes",
    papers=[
        "Fedus et al. 2021 (Switch): the loss of a dense model in up to a seventh of the time, for equal FLOPs.",
        "Clark et al. 2022: experts gain at every size, and less the larger the model is.",
    ],
    trainings=[
        Training(
            f"{name} {width}",
            design(width),
            "stdlib",
            {"steps": 12 * width, "batch_size": 8, "sequence_length": 96, "learning_rate": 5e-3},
        )
        for name, design in (("dense", dense), ("experts", experts))
        for width in HIDDEN
    ],
    findings=findings,
    remark="Steps grow with the width.",
)
