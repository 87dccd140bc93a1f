"""Right answers: over scored targets, the share of those the model finds most likely among its whole vocabulary."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from heddle.model.decoder import Decoder
from heddle.parts.context.layout import Layout


class Questions(Protocol):
    """Rows with targets: tokens int64 [B, T + 1], documents' lengths in the T inputs, targets int64 [B, T] or −1.

    places [B, T, 2]: x and y of each input, or None.
    """

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def targets(self) -> np.ndarray: ...

    @property
    def places(self) -> np.ndarray | None: ...


def right_answers(
    model: Decoder, batches: Iterable[Questions], autocast: torch.dtype | None = None
) -> list[tuple[float, int]]:
    """Right answers and scored targets of each row, the model in eval mode and its mode restored afterwards."""
    device = model.embed.weight.device
    was_training = model.training
    model.eval()
    result: list[tuple[float, int]] = []
    try:
        for batch in batches:
            tokens = torch.tensor(batch.tokens, device=device)
            targets = torch.tensor(batch.targets, device=device)
            layout = Layout.packed(batch.lengths, device=device)
            if batch.places is not None:
                layout = layout.with_places(torch.tensor(batch.places, device=device))
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                right = torch.zeros_like(targets, dtype=torch.bool)
                scored = targets >= 0
                right[scored] = model.head(hidden[scored]).argmax(-1) == targets[scored]
            result += [(float(r), int(n)) for r, n in zip(right.sum(1), scored.sum(1), strict=True)]
    finally:
        model.train(was_training)
    return result
