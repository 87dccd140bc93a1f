"""Right answers against a count by hand."""

import numpy as np
import pytest
import torch

from heddle.data.recall import parse_recall
from heddle.model.decoder import Decoder, build
from heddle.parts.layout import Layout
from heddle.training.evaluation.scores import correct_predictions
from tests import small

PRACTICE = parse_recall("recall:mqar,pairs=3,keys=4,length=12")


def by_hand(model: Decoder) -> list[tuple[int, int]]:
    counts = []
    inputs, targets = PRACTICE.task.draw_rows(-1, np.arange(7))
    for row, target in zip(inputs, targets, strict=True):
        with torch.no_grad():
            hidden, _ = model(torch.from_numpy(row)[None])
        best = [int((hidden[0, position] @ model.head.weight.T).argmax()) for position in range(len(row))]
        right = sum(best[position] == expected for position, expected in enumerate(target.tolist()) if expected >= 0)
        counts.append((right, 3))
    return counts


def trained() -> Decoder:
    """A model whose weights are large enough to be right now and then, wider in vocabulary than the task."""
    model = build(small.config(small.design(vocab_size=11, initialization={"std": 0.5})), dtype=torch.float64, seed=1)
    return model.train()


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_right_answers_are_counted(batch_size: int) -> None:
    model = trained()
    scores = correct_predictions(model, PRACTICE.validation_batches(7, batch_size))
    assert scores == by_hand(model)
    assert 0 < sum(right for right, _ in scores) < 21
    assert model.training


def test_rows_cut_into_documents_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    right = Layout.packed
    monkeypatch.setattr(Layout, "packed", lambda lengths, device: right([[1] * 12] * len(lengths), device=device))
    assert correct_predictions(model, PRACTICE.validation_batches(7, 7)) != by_hand(model)
