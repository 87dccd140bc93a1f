"""Exclusive self-attention and value residuals: two changes of what attention adds to a token."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the first layer, and of the others
    "plain": ({}, {}),
    "exclusive": ({"exclusive": True}, {"exclusive": True}),
    "value residual": ({}, {"value_residual": "learned"}),
}
LENGTHS = {64: 12, 192: 4}  # tokens, and sequences of a step
SETTINGS = {"steps": 400, "learning_rate": 4e-3}


def findings(results: Results) -> Sequence[Finding]:
    """Losses at both lengths, and whether the longer one gains more."""

    def gains(change: str, length: int) -> list[float]:
        return differences(results, f"plain {length}", f"{change} {length}", "loss")

    short, long = LENGTHS
    more = [far - near for near, far in zip(gains("exclusive", short), gains("exclusive", long), strict=True)]
    return [
        *(
            Finding(f"Exclusive attention ends lower, {length} tokens", gains("exclusive", length))
            for length in LENGTHS
        ),
        Finding("It gains more with longer sequences", more),
        *(
            Finding(f"A value residual ends lower, {length} tokens", gains("value residual", length))
            for length in LENGTHS
        ),
    ]


ROW = Row(
    title="Exclusive attention and value residuals",
    papers=[
        "Exclusive self-attention (arXiv 2603.09078): lower loss up to 2.7 B parameters, the more the longer sequences "
        "are. nanochat and Marin saw no gain in time.",
        "Zhou et al. 2024 (ResFormer): the loss of a transformer with 16 % fewer parameters.",
    ],
    trainings=[
        Training(
            f"{key} {length}",
            stack(attention(**first), *[attention(**later)] * 3, hidden=176),
            "stdlib",
            SETTINGS | {"sequence_length": length, "batch_size": sequences},
        )
        for key, (first, later) in CHANGES.items()
        for length, sequences in LENGTHS.items()
    ],
    findings=findings,
    remark="Four layers; as many tokens a step at both lengths. Losses of different lengths are not compared.",
)
