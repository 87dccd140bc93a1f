"""Task accuracy: the fraction of scored targets that are the model's most likely token of the whole vocabulary."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout
from heddle.training.evaluation.bits_per_byte import EvaluationBatch
from heddle.training.evaluation.scores import Scores


class TaskBatch(EvaluationBatch, Protocol):
    """Rows with targets. coordinates: [B, T, 2], x and y of each input, or None."""

    @property
    def coordinates(self) -> np.ndarray | None: ...


def correct_predictions(model: Decoder, batches: Iterable[TaskBatch], autocast: torch.dtype | None = None) -> Scores:
    """Return (right answers, scored targets) of each row. Runs in eval mode and restores the model's mode."""
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    scores: Scores = []
    try:
        for batch in batches:
            tokens = torch.tensor(batch.tokens, device=device)
            targets = torch.tensor(batch.targets, device=device)
            layout = Layout.packed(batch.doc_lengths, device=device)
            if batch.coordinates is not None:
                layout = layout.with_coordinates(torch.tensor(batch.coordinates, device=device))
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                correct = torch.zeros_like(targets, dtype=torch.bool)
                scored = targets >= 0
                correct[scored] = model.head(hidden[scored]).argmax(-1) == targets[scored]
            sums = zip(correct.sum(1), scored.sum(1), strict=True)
            scores += [(float(num_correct), int(num_scored)) for num_correct, num_scored in sums]
    finally:
        model.train(was_training)
    return scores
