"""Which mixers recall: full attention, linear attention, the gated delta rule, and a hybrid."""

from collections.abc import Sequence

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

LINEAR = {"kind": "linear_attention", "heads": 4, "head_dim": 8, "value_dim": 16}
DELTA = {"kind": "gated_delta", "heads": 4, "head_dim": 8, "value_dim": 16}
DESIGNS = {
    "full attention": stack(attention(), attention()),
    "linear": stack(LINEAR, LINEAR),
    "linear behind a window": stack(attention(window=4), LINEAR),
    "gated delta": stack(DELTA, DELTA),
    "hybrid": stack(DELTA, attention()),
}
TASK = "recall:mqar_mixture,pairs=16,smallest=4"
SETTINGS = {"steps": 600, "batch_size": 16, "sequence_length": 48, "learning_rate": 4e-3}


def findings(results: Results) -> Sequence[Finding]:
    """Accuracies apart."""
    full_to_linear = differences(results, "full attention", "linear", "accuracy")
    delta_to_linear = differences(results, "gated delta", "linear", "accuracy")
    shares = [delta / full for delta, full in zip(delta_to_linear, full_to_linear, strict=True)]
    return [
        Finding("Full attention recalls more than linear attention", full_to_linear, "of all answers"),
        Finding("The gated delta rule recovers most of what linear attention loses", shares, "of the loss", 0.5),
        Finding(
            "A hybrid loses no more than 2 points against full attention",
            differences(results, "hybrid", "full attention", "accuracy"),
            "of all answers",
            -0.02,
        ),
        Finding(
            "Linear attention behind a window of 4 recalls more than linear attention alone",
            differences(results, "linear behind a window", "linear", "accuracy"),
            "of all answers",
        ),
    ]


ROW = Row(
    title="Recall of 4, 8 and 16 pairs with keys of 8 dims",
    papers=[
        "Arora et al. 2023 (Zoology): attention solves MQAR at any number of pairs, fixed states only up to their "
        "size; recall explains 82 % of the gap in perplexity on the Pile.",
        "Yang et al. 2024 (Gated DeltaNet): the gated delta rule recalls more than Mamba-2; with some layers of "
        "attention it recalls most.",
    ],
    trainings=[Training(key, design, TASK, SETTINGS) for key, design in DESIGNS.items()],
    findings=findings,
    remark="Guessing is right in 15 %. Linear attention has no short convolution, as published, so it sees no neighbor "
    "of a key unless a window of 4 tokens shows it. The gated delta rule has a convolution of its own.",
)
