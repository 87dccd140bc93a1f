"""Attention to a quarter of the keys, selected by an indexer, against all keys and against the nearest quarter."""

from collections.abc import Sequence
from typing import Any

from evidence.row import Finding, Results, Row, Training, attention, differences, stack

TEXT = {"steps": 400, "batch_size": 8, "sequence_length": 96, "learning_rate": 4e-3}
RECALL = {"steps": 300, "batch_size": 32, "sequence_length": 24, "learning_rate": 4e-3}
TASK = "recall:mqar_mixture,pairs=8,smallest=4"


def choices(keys: int) -> dict[str, dict[str, Any]]:
    """Mixers that attend to all keys, to so many by an indexer, and to so many nearest ones."""
    return {
        "all": attention(),
        "indexer": attention(indexer={"top_k": keys, "heads": 2, "head_dim": 16}),
        "nearest": attention(window=keys),
    }


def findings(results: Results) -> Sequence[Finding]:
    """Losses of text, and answers of recall."""
    answers = "of all answers"
    return [
        Finding(
            "A quarter of the keys by an indexer loses against all", differences(results, "indexer", "all", "loss")
        ),
        Finding("The nearest quarter loses against the indexer's", differences(results, "nearest", "indexer", "loss")),
        Finding(
            "The indexer's quarter recalls no more than 2 points less than all keys",
            differences(results, "recall, indexer", "recall, all", "accuracy"),
            answers,
            -0.02,
        ),
        Finding(
            "It recalls more than the nearest quarter",
            differences(results, "recall, indexer", "recall, nearest", "accuracy"),
            answers,
        ),
    ]


ROW = Row(
    title="A quarter of the keys by an indexer",
    papers=["DeepSeek-AI 2025 (V3.2): 2,048 keys of up to 128 k, and no substantial loss against dense attention."],
    trainings=[
        *(Training(key, stack(*[mixer] * 3, hidden=176), "stdlib", TEXT) for key, mixer in choices(24).items()),
        *(Training(f"recall, {key}", stack(*[mixer] * 3), TASK, RECALL) for key, mixer in choices(6).items()),
    ],
    findings=findings,
    remark="Sparse from the first step on, without the paper's dense warm-up. Three layers, 24 of 96 keys, and 6 of 24 "
    "in recall, where guessing is right in 19 %.",
)
