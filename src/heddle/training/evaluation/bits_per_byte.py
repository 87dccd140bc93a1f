"""Bits per byte: `Σ loss / ln 2 / Σ bytes` over the tokens of a text. End tokens add neither bits nor bytes."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import token_losses
from heddle.numerics.dispatch.transfer import to_device
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


_Evaluated = TypeVar("_Evaluated", bound=EvaluationBatch)


class TokenScores(NamedTuple):
    """Of every target of a batch: its loss in nats, float64 [B, T], and its bytes, int64 [B, T].

    Both are 0 where nothing is scored. An end token has no loss, and 0 or −1 bytes. correct: bool [B, T], whether the
    target is the most likely token of the whole vocabulary; None unless it was asked for.
    """

    nats: Tensor
    sizes: Tensor
    correct: Tensor | None = None


# Called with each batch of an evaluation and the scores of its tokens.
TokenObserver = Callable[[EvaluationBatch, TokenScores], None]


def bits_and_bytes(
    model: Decoder,
    batches: Iterable[EvaluationBatch],
    byte_lengths: np.ndarray,
    autocast: torch.dtype | None = None,
    observer: TokenObserver | None = None,
) -> Scores:
    """Return (bits, bytes) of each row. Runs in eval mode and restores the model's mode.

    byte_lengths: int [vocab], the bytes of each token. Tokens of 0 or −1 bytes (end tokens) add no bits.
    """
    scores: Scores = []
    for batch, tokens in token_scores(model, batches, byte_lengths, autocast):
        sums = torch.stack((tokens.nats.sum(1) / math.log(2), tokens.sizes.sum(1).double()), dim=1)
        scores += [(row_bits, int(row_bytes)) for row_bits, row_bytes in sums.tolist()]
        if observer is not None:
            observer(batch, tokens)
    return scores


def token_scores(
    model: Decoder,
    batches: Iterable[_Evaluated],
    byte_lengths: np.ndarray,
    autocast: torch.dtype | None = None,
    *,
    with_correct: bool = False,
) -> Iterator[tuple[_Evaluated, TokenScores]]:
    """Yield each batch and the scores of its tokens, which `bits_and_bytes` adds up. with_correct: with `correct`."""
    device = model.embed.weight.device
    token_bytes = to_device(torch.from_numpy(np.asarray(byte_lengths, dtype=np.int64)), device)
    was_training = model.training
    model.eval()
    try:
        for batch in batches:
            # Copies, since the arrays may be read-only. Scored targets are counted on the host, which has them.
            on_host = (batch.tokens, batch.targets, np.flatnonzero(np.asarray(batch.targets) >= 0))
            tokens, targets, scored = (to_device(torch.tensor(array, device="cpu"), device) for array in on_host)
            layout = Layout.packed(batch.doc_lengths, targets.shape[1], device)
            correct = torch.zeros_like(targets, dtype=torch.bool) if with_correct else None
            with torch.no_grad(), torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                hidden, _ = model(tokens[:, :-1], layout)
                hidden, target_tokens = hidden.flatten(0, 1)[scored], targets.flatten()[scored]
                nats = torch.zeros(targets.shape, dtype=torch.float64, device=device)
                nats.view(-1)[scored] = token_losses(hidden, model.head.output_head, target_tokens).double()
                if correct is not None:
                    correct.view(-1)[scored] = model.head(hidden).argmax(-1) == target_tokens
            sizes = token_bytes[targets.clamp(min=0)] * (targets >= 0)
            yield batch, TokenScores(nats * (sizes > 0), sizes, correct)
    finally:
        model.train(was_training)


def token_bits(scores: TokenScores) -> np.ndarray:
    """Return the loss of each token in bits, float64 [B, T]."""
    bits: np.ndarray = scores.nats.cpu().numpy() / math.log(2)
    return bits
