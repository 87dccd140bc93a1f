"""Task accuracy: the fraction of scored targets that are the model's most likely token of the whole vocabulary."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from heddle.model.decoder import Decoder
from heddle.numerics.dispatch.transfer import to_device
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
            on_host = (batch.tokens, batch.targets, np.flatnonzero(np.asarray(batch.targets) >= 0))
            tokens, targets, scored = (to_device(torch.tensor(array, device="cpu"), device) for array in on_host)
            layout = Layout.packed(batch.doc_lengths, device=device)
            if batch.coordinates is not None:
                layout = layout.with_coordinates(to_device(torch.tensor(batch.coordinates, device="cpu"), device))
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                correct = torch.zeros_like(targets, dtype=torch.bool)
                predictions = model.head(hidden.flatten(0, 1)[scored]).argmax(-1)
                correct.view(-1)[scored] = predictions == targets.flatten()[scored]
            sums = torch.stack((correct.sum(1), (targets >= 0).sum(1)), dim=1)
            scores += [(float(num_correct), num_scored) for num_correct, num_scored in sums.tolist()]
    finally:
        model.train(was_training)
    return scores
