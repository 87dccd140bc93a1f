"""Length extrapolation: bits per byte of the same text at 1, 2, 4 … times the training sequence length.

Measured as in Press et al. (2021), on sequences that do not overlap. A span is `sequence_length · multiples[-1]` tokens
to predict, all within one document. For each multiple the span is cut into equal sequences. Each starts at position 0
with an empty state, and the bits of all tokens are summed: between multiples only a token's context differs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from heddle.data.samples import Batch
from heddle.errors import ConfigError, is_out_of_memory
from heddle.model.decoder import Decoder
from heddle.training.evaluation.scores import Scores, bits_and_bytes

# All multiples together read at most this fraction of the tokens that a run trains on. Reading a token costs about half
# as much as training on it, so this is about 8 % of a run's time.
MAX_TOKEN_SHARE = 1 / 6
MIN_SPANS, MAX_SPANS = 2, 16


class TokenizedText(Protocol):
    """The tokens of documents one after another, and the offset where each document begins."""

    @property
    def offsets(self) -> np.ndarray: ...

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class ExtrapolationPlan:
    """Which spans of a text are evaluated, at which multiples of the sequence length.

    starts: token offsets in the text. document_count: how many documents the spans come from. note: why multiples
    are missing, or None. Without multiples nothing is evaluated.
    """

    sequence_length: int
    multiples: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    document_count: int = 0
    note: str | None = None

    @property
    def span_length(self) -> int:
        """Return the tokens per span."""
        return self.sequence_length * max(self.multiples, default=0)


class ExtrapolationResult(NamedTuple):
    """(bits, bytes) of each span in rows of `multiple` sequence lengths; empty if there is a `refusal`."""

    multiple: int
    scores: Scores
    refusal: str | None


def plan_extrapolation(
    text: TokenizedText, sequence_length: int, max_multiple: int, train_tokens: int
) -> ExtrapolationPlan:
    """Choose spans for the multiples 1, 2, 4 … `max_multiple`, or as many as the longest document allows.

    Takes one span from each of the longest documents, then a second one, and so on; the spans of a document are spread
    evenly over it. train_tokens: the run's training tokens, which limit the number of spans. Deterministic.
    """
    if max_multiple < 2:
        return ExtrapolationPlan(sequence_length)
    offsets = np.asarray(text.offsets, dtype=np.int64)
    doc_lengths = np.diff(np.append(offsets, len(text)))
    longest = int(doc_lengths.max(initial=0))
    multiples = [2**power for power in range(max_multiple.bit_length()) if 2**power * sequence_length < longest]
    limit = f"the longest held-out document has {longest} tokens"
    if len(multiples) < 2:
        too_short = f"{limit}, fewer than two contexts of {sequence_length} and one more"
        return ExtrapolationPlan(sequence_length, note=too_short)
    note = None if multiples[-1] == max_multiple else f"{limit}, so {multiples[-1]} times the context is the largest"
    span_length = multiples[-1] * sequence_length
    affordable = int(MAX_TOKEN_SHARE * train_tokens) // (span_length * len(multiples))
    target_count = min(MAX_SPANS, max(MIN_SPANS, affordable))
    spans_that_fit = (doc_lengths - 1) // span_length  # a document's first token is not predicted
    span_counts = np.zeros_like(spans_that_fit)
    order = np.argsort(-doc_lengths, kind="stable")
    while span_counts.sum() < min(target_count, spans_that_fit.sum()):
        with_space = order[span_counts[order] < spans_that_fit[order]]
        span_counts[with_space[: target_count - span_counts.sum()]] += 1
    starts = []
    for document in np.flatnonzero(span_counts):
        slots = (2 * np.arange(span_counts[document]) + 1) * spans_that_fit[document] // (2 * span_counts[document])
        starts += (offsets[document] + slots * span_length).tolist()
    return ExtrapolationPlan(sequence_length, tuple(multiples), tuple(starts), int((span_counts > 0).sum()), note)


def span_batches(text: TokenizedText, plan: ExtrapolationPlan, multiple: int) -> Iterator[Batch]:
    """Yield one batch per span, in rows of `multiple` sequence lengths. Each token of the span is a target once."""
    length = multiple * plan.sequence_length
    for start in plan.starts:
        tokens = text.read(start, start + plan.span_length + 1)
        rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        yield Batch(rows, ((length,),) * len(rows), np.arange(len(rows)))


def evaluate_extrapolation(
    model: Decoder,
    text: TokenizedText,
    plan: ExtrapolationPlan,
    byte_lengths: np.ndarray,
    autocast: torch.dtype | None = None,
) -> list[ExtrapolationResult]:
    """Evaluate every multiple of a plan. If the model refuses a length (its learned positions end), `refusal` says so.

    byte_lengths: int [vocab], the bytes of each token.
    """
    results = []
    for multiple in plan.multiples:
        scores: Scores = []
        refusal = None
        try:
            for batch in span_batches(text, plan, multiple):
                rows = bits_and_bytes(model, [batch], byte_lengths, autocast)
                scores.append((sum(bits for bits, _ in rows), sum(size for _, size in rows)))
        except ConfigError as error:
            scores, refusal = [], str(error)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            scores, refusal = [], "out of memory"
        results.append(ExtrapolationResult(multiple, scores, refusal))
    return results
