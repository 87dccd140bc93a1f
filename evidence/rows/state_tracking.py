"""Parity and products of permutations of five items: who tracks a state?"""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, stack

MIXERS: dict[str, dict[str, Any]] = {
    "attention": attention(),
    "gated delta": {"kind": "gated_delta", "heads": 4, "head_dim": 16},
    "mamba2": {"kind": "mamba2", "heads": 4, "head_dim": 16, "state_size": 16},
}
ATTENTION, *RECURRENT = MIXERS
SHORT_PARITY, PARITY, S5 = "parity of 2", "parity of 22", "s5"
TASKS = {SHORT_PARITY: "recall:parity,length=2", PARITY: "recall:parity,length=22", S5: "recall:s5,length=16"}
SETTINGS = {"steps": 300, "batch_size": 32, "learning_rate": 3e-3}
SOLVED = 0.99  # the first answers of a row are easy, so a mean of 0.9 is no solution


def findings(results: Results) -> Sequence[Finding]:
    """How far each accuracy is above or below 99 %."""

    def accuracies(task: str, mixer: str) -> list[float]:
        return [numbers["accuracy"] for numbers in results[f"{task} {mixer}"].values()]

    learned = [
        Finding(
            f"{mixer} learns the parity of 2 bits", [a - SOLVED for a in accuracies(SHORT_PARITY, mixer)], "above 0.99"
        )
        for mixer in RECURRENT
    ]
    missed = [
        (SHORT_PARITY, "the parity of 2 bits", (ATTENTION,)),
        (PARITY, "the parity of 22 bits", MIXERS),
        (S5, "products of 16 permutations of five", MIXERS),
    ]
    return learned + [
        Finding(f"{mixer} does not learn {name}", [SOLVED - a for a in accuracies(task, mixer)], "below 0.99")
        for task, name, mixers in missed
        for mixer in mixers
    ]


ROW = Row(
    title="State tracking: parity and S5",
    papers=[
        "Merrill et al. 2024 (The illusion of state): neither attention nor Mamba tracks permutations of five items "
        "beyond lengths that grow with the depth.",
        "Grazzi et al. 2024: recurrences without negative eigenvalues do not learn parity, with them they do.",
    ],
    trainings=[
        Training(
            f"{task} {mixer}",
            stack(*[config] * 2, hidden=128),
            data,
            SETTINGS | {"sequence_length": int(data.rpartition("=")[2])},
        )
        for task, data in TASKS.items()
        for mixer, config in MIXERS.items()
    ],
    findings=findings,
    remark="Two layers each. β of the gated delta rule is below 1, as published: its states have no negative "
    "eigenvalues. Attention takes means of values, and these texts have no first token: after 1 1 a mean is "
    "what it is after 1, so at most (1 + 3/4) / 2 of the answers about two bits can be right, and 0.877 are. "
    "Other things that are not learned here are not learned in this budget.",
)
