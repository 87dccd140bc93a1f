"""β up to 2 and several corrections a token: which states does the gated delta rule track?"""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, stack

DELTA: dict[str, dict[str, Any]] = {
    "β ≤ 1": {},
    "β ≤ 2": {"negative_eigenvalues": True},
    "β ≤ 2, two steps": {"negative_eigenvalues": True, "steps": 2},
}
PARITY, S5 = "parity of 22", "s5"
TASKS = {PARITY: "recall:parity,length=22", S5: "recall:s5,length=16"}
SETTINGS = {"steps": 400, "batch_size": 32, "learning_rate": 3e-3}


def findings(results: Results) -> Sequence[Finding]:
    """Accuracies apart, by seed."""

    def gains(task: str, less: str, more: str) -> list[float]:
        return [
            results[f"{task}, {more}"][seed]["accuracy"] - results[f"{task}, {less}"][seed]["accuracy"]
            for seed in results[f"{task}, {less}"]
        ]

    one, two, steps = DELTA
    return [
        Finding("β up to 2 raises the accuracy of parity", gains(PARITY, one, two), "of the answers"),
        Finding("β up to 2 raises that of permutations", gains(S5, one, two), "of the answers"),
        Finding("A second step a token raises it further", gains(S5, two, steps), "of the answers"),
    ]


ROW = Row(
    title="Negative eigenvalues and several steps in the delta rule",
    papers=[
        "Grazzi et al. 2024: with eigenvalues down to −1 a linear recurrence learns parity, without it does not.",
        "Siems et al. 2025 (DeltaProduct): n steps a token track permutations that fewer do not.",
    ],
    trainings=[
        Training(
            f"{task}, {key}",
            stack(*[{"kind": "gated_delta", "heads": 4, "head_dim": 16, **fields}] * 2, hidden=128),
            data,
            SETTINGS | {"sequence_length": int(data.rpartition("=")[2])},
        )
        for task, data in TASKS.items()
        for key, fields in DELTA.items()
    ],
    findings=findings,
    remark="Two layers each; no design learns the permutations in 400 steps.",
)
