"""Local attention with one full layer of three: does it recall pairs beyond its windows?"""

from collections.abc import Sequence

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

LOCAL, FULL = attention(window=4), attention()
DESIGNS = {
    "full": stack(FULL, FULL, FULL),
    "local": stack(LOCAL, LOCAL, LOCAL),
    "one full of three": stack(LOCAL, LOCAL, FULL),
}
TASK = "recall:mqar_mixture,pairs=8,smallest=4"
SETTINGS = {"steps": 300, "batch_size": 32, "sequence_length": 24, "learning_rate": 4e-3}


def findings(results: Results) -> Sequence[Finding]:
    """Accuracies apart."""
    return [
        Finding(
            "Full attention recalls more than windows of 4",
            differences(results, "full", "local", "accuracy"),
            "of all answers",
        ),
        Finding(
            "One full layer of three loses no more than 2 points against full attention",
            differences(results, "one full of three", "full", "accuracy"),
            "of all answers",
            -0.02,
        ),
    ]


ROW = Row(
    title="Windows with a few full layers keep recall",
    papers=[
        "Gemma Team 2025 (Gemma 3): one full layer of six, and windows of 1,024, change the perplexity little.",
    ],
    trainings=[Training(key, design, TASK, SETTINGS) for key, design in DESIGNS.items()],
    findings=findings,
    remark="The task is recall of 4 and 8 pairs, where guessing is right in 19 %.",
)
