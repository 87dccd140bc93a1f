"""Right answers against a count by hand."""

import numpy as np
import pytest
import torch

from heddle.data.recall import open_recall
from heddle.model.decoder import Decoder, build
from heddle.training.evaluation import recall
from heddle.training.evaluation.recall import right_answers
from tests import small

PRACTICE = open_recall("recall:mqar,pairs=3,keys=4,length=12")


def by_hand(model: Decoder) -> list[tuple[int, int]]:
    counts = []
    inputs, targets = PRACTICE.task.rows(-1, np.arange(7))
    for row, target in zip(inputs, targets, strict=True):
        with torch.no_grad():
            hidden, _ = model(torch.from_numpy(row)[None])
        best = [int((hidden[0, place] @ model.head.weight.T).argmax()) for place in range(len(row))]
        right = sum(best[place] == wanted for place, wanted in enumerate(target.tolist()) if wanted >= 0)
        counts.append((right, 3))
    return counts


def trained() -> Decoder:
    """A model whose weights are large enough to be right now and then, wider in vocabulary than the task."""
    model = build(small.config(small.design(vocab_size=11, initialisation={"std": 0.5})), dtype=torch.float64, seed=1)
    return model.train()


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_right_answers_are_counted(batch_size: int) -> None:
    model = trained()
    found = right_answers(model, PRACTICE.held_out(7, batch_size))
    assert found == by_hand(model)
    assert 0 < sum(right for right, _ in found) < 21
    assert model.training


def test_rows_cut_into_documents_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained()
    right = recall.Layout.packed
    monkeypatch.setattr(
        recall.Layout, "packed", lambda lengths, device: right([[1] * 12] * len(lengths), device=device)
    )
    assert right_answers(model, PRACTICE.held_out(7, 7)) != by_hand(model)
