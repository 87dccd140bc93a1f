"""Value embeddings: tables of token embeddings whose rows are added to the values of every second layer."""

from collections.abc import Sequence

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

PLAIN, EMBEDDED = attention(), attention(value_embedding={})


def findings(results: Results) -> Sequence[Finding]:
    """Whether the loss ends lower."""
    gains = differences(results, "plain", "value embeddings", "loss")
    return [Finding("Value embeddings in every second layer end lower", gains)]


ROW = Row(
    title="Value embeddings",
    papers=[
        "modded-nanogpt 2024 and nanochat 2026: lower loss in equal time, in records of small trainings.",
    ],
    trainings=[
        Training(
            key,
            stack(PLAIN, other, PLAIN, other, hidden=176),
            "stdlib",
            {"steps": 400, "learning_rate": 4e-3, "sequence_length": 64, "batch_size": 12},
        )
        for key, other in (("plain", PLAIN), ("value embeddings", EMBEDDED))
    ],
    findings=findings,
    remark="Four layers, the second and the last with a table of their own and a gate, as in nanochat; equal steps. "
    "The two tables are 65,536 parameters more, of which a token reads 128.",
)
