"""Canon layers: short convolutions before mixers and feed-forwards, with RoPE and without positions."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences

SETTINGS = {"steps": 500, "batch_size": 8, "sequence_length": 96, "learning_rate": 4e-3}
WIDTH = 64


def design(
    position: dict[str, Any] | None, mixer: Sequence[str] = (), feedforward: Sequence[str] = ()
) -> dict[str, Any]:
    """Four layers whose mixers and feed-forwards convolve what is named."""
    branches: list[dict[str, Any]] = [attention(position=position), {"kind": "gated", "hidden": 176}]
    for branch, names in zip(branches, (mixer, feedforward), strict=True):
        if names:
            branch["short_convolution"] = {"of": list(names)}
    layer = {"repeat": 4, "mixer": branches[0], "feedforward": branches[1]}
    return {"width": WIDTH, "layers": [layer], "initialization": {"std": WIDTH**-0.5}}


ROPE = {"kind": "rope"}
ALL = (["input", "q", "k", "v"], ["input", "hidden"])
DESIGNS = {
    "RoPE": design(ROPE),
    "RoPE, k and v": design(ROPE, ["k", "v"]),
    "RoPE, ABCD": design(ROPE, *ALL),
    "NoPE": design(None),
    "NoPE, ABCD": design(None, *ALL),
}


def findings(results: Results) -> Sequence[Finding]:
    """Losses with and without convolutions."""

    def gain(plain: str, other: str) -> list[float]:
        return differences(results, plain, other, "loss")

    return [
        Finding("Convolutions of k and v alone end lower", gain("RoPE", "RoPE, k and v")),
        Finding("Canon ABCD ends lower", gain("RoPE", "RoPE, ABCD")),
        Finding("ABCD ends below k and v alone", gain("RoPE, k and v", "RoPE, ABCD")),
        Finding("Without positions, ABCD ends below RoPE without it", gain("RoPE", "NoPE, ABCD")),
    ]


ROW = Row(
    title="Canon layers",
    papers=[
        "Allen-Zhu 2025 (Physics of language models 4.1): deeper reasoning, and NoPE with them matches RoPE.",
        "Inkling 2026 convolves k and v.",
    ],
    trainings=[Training(key, design_, "stdlib", SETTINGS) for key, design_ in DESIGNS.items()],
    findings=findings,
)
