"""Bits per byte: `Σ loss / ln 2 / Σ bytes` over the tokens of a text. End tokens add neither bits nor bytes."""

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

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
    scores: Scores = []
    for nats, sizes in token_nats_and_bytes(model, batches, byte_lengths, autocast):
        sums = zip(nats.sum(1) / math.log(2), sizes.sum(1), strict=True)
        scores += [(float(row_bits), int(row_bytes)) for row_bits, row_bytes in sums]
    return scores


def token_nats_and_bytes(
    model: Decoder, batches: Iterable[EvaluationBatch], byte_lengths: np.ndarray, autocast: torch.dtype | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (loss in nats, float64 [B, T]; bytes, int64 [B, T]) of every target of a batch, as `bits_and_bytes` does.

    Both are 0 where nothing is scored. An end token has no loss, and 0 or −1 bytes.
    """
    device = model.embed.weight.device
    token_bytes = torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64)).to(device)
    was_training = model.training
    model.eval()
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
            yield nats * (scored_bytes > 0), scored_bytes
    finally:
        model.train(was_training)
