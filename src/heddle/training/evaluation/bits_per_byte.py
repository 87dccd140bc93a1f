"""Bits per byte: `Σ loss / ln 2 / Σ bytes` over the tokens of a text. End tokens add neither bits nor bytes."""

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch

from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import token_losses
from heddle.parts.context.layout import Layout
from heddle.training.evaluation.scores import Scores


class EvaluationBatch(Protocol):
    """Rows of a text.

    tokens: int64 [B, T + 1]. doc_lengths: of the documents in each row's T inputs. targets: int64 [B, T], −1 where
    nothing is scored.
    """

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def doc_lengths(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def targets(self) -> np.ndarray: ...


def bits_and_bytes(
    model: Decoder, batches: Iterable[EvaluationBatch], byte_lengths: np.ndarray, autocast: torch.dtype | None = None
) -> Scores:
    """Return (bits, bytes) of each row. Runs in eval mode and restores the model's mode.

    byte_lengths: int [vocab], the bytes of each token. Tokens of 0 or −1 bytes (end tokens) add no bits.
    """
    device = model.embed.weight.device
    token_bytes = torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64)).to(device)
    was_training = model.training
    model.eval()
    scores: Scores = []
    try:
        for batch in batches:
            tokens = torch.tensor(batch.tokens, device=device)  # a copy, since the array may be read-only
            targets = torch.tensor(batch.targets, device=device)
            layout = Layout.packed(batch.doc_lengths, targets.shape[1], device)
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                scored = targets >= 0
                nats = torch.zeros(targets.shape, dtype=torch.float64, device=device)
                nats[scored] = token_losses(hidden[scored], model.head.output_head, targets[scored]).double()
            scored_bytes = token_bytes[targets.clamp(min=0)] * scored
            bits = (nats * (scored_bytes > 0)).sum(1) / math.log(2)
            sums = zip(bits, scored_bytes.sum(1), strict=True)
            scores += [(float(row_bits), int(row_bytes)) for row_bits, row_bytes in sums]
    finally:
        model.train(was_training)
    return scores
