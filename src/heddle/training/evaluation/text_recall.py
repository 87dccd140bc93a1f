"""Recall in held-out text, without training for it: repeated spans and needles.

Repeated spans: in each sequence, one span occurs a second time in place of other text. A model that can look back
predicts the second occurrence better than the first. Needles (after Kamradt 2023): a line of another text is inserted
into a sequence, and its beginning is repeated at the end; the model has to recall how the line continued. The same
sequences without the line are the control: what can be guessed from the beginning alone. All sequences are drawn from
one seed, so that every model reads the same ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.training.evaluation.scores import FiniteScores, finite_scores, row_sums, token_bits, token_scores

SEED = 20_261_122
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE_TOKENS = 16  # the first half is repeated as the query, the second half is scored
LEADING_TOKENS = 4  # at the start of a span, where a model cannot know yet that it is repeated; they are not scored
MIN_ROW_TOKENS = 64
IGNORED = -1


@dataclass(frozen=True)
class NeedleScores:
    """Recall of the needles at one depth of the context. depth: 0 to 1; None: the control without needles.

    losses: (bits, bytes) of each row; correct: (correct answers, scored tokens).
    """

    depth: float | None
    losses: FiniteScores
    correct: FiniteScores


@dataclass(frozen=True)
class TextRecallScores:
    """The scores of a model: (bits, bytes) of both occurrences of the span of each row, and its needles by depth."""

    first_spans: FiniteScores
    repeated_spans: FiniteScores
    needles: list[NeedleScores]


@dataclass(frozen=True)
class RepeatedSpanRows:
    """Rows with a repeated span. first, second: [rows], where the scored tokens of the two occurrences begin."""

    batches: Sequence[Batch]
    first: np.ndarray
    second: np.ndarray
    length: int


@dataclass(frozen=True)
class TextRecall:
    """Rows of the held-out text of a corpus, no longer than `sequence_length`.

    spans: rows with a repeated span. needles: rows with a needle at each of the depths, and as many without.
    """

    corpus: Corpus
    sequence_length: int
    spans: int
    needles: int
    batch_size: int = 8
    depths: tuple[float, ...] = DEPTHS

    @cached_property
    def row_length(self) -> int:
        """Return the input tokens of a row, at most the longest document's; 0 if that is too short."""
        longest = int(self._document_lengths.max(initial=0)) - 2  # the end token and the last target
        length = min(self.sequence_length, longest)
        return length if length >= MIN_ROW_TOKENS else 0

    @property
    def row_count(self) -> int:
        """Return the number of all rows; 0 where documents are too short."""
        return self.spans + (len(self.depths) + 1) * self.needles if self.row_length else 0

    @property
    def span_length(self) -> int:
        """Return the tokens of a repeated span."""
        return self.row_length // 8

    @cached_property
    def span_rows(self) -> RepeatedSpanRows:
        """Return rows in which a span of the first half is repeated in the second half."""
        rng = np.random.default_rng(SEED)
        rows = self._rows(rng, self.spans, self.row_length + 1)
        length, half = self.span_length, self.row_length // 2
        first = rng.integers(1, half - length, len(rows))
        second = rng.integers(half, self.row_length + 1 - length, len(rows))
        for row, start, copy in zip(rows, first, second, strict=True):
            row[copy : copy + length] = row[start : start + length]
        scored = length - LEADING_TOKENS
        return RepeatedSpanRows(self._batches(rows), first + LEADING_TOKENS - 1, second + LEADING_TOKENS - 1, scored)

    @cached_property
    def needle_rows(self) -> list[tuple[float | None, list[Batch]]]:
        """Return (depth, rows) for each depth, and (None, rows) without needles. Row i always has the same needle."""
        rng = np.random.default_rng(SEED + 1)
        half = NEEDLE_TOKENS // 2
        text = self._rows(rng, self.needles, self.row_length + 1 - NEEDLE_TOKENS)
        needles = _unseen(self._draw_needles(rng, 4 * self.needles), text)
        result: list[tuple[float | None, list[Batch]]] = []
        for depth in (*self.depths, None):
            rows = text.copy()
            if depth is not None:
                remaining = rows.shape[1] - NEEDLE_TOKENS
                start = round(depth * remaining)
                rows = np.concatenate([rows[:, :start], needles, rows[:, start:remaining]], axis=1)
            rows = np.concatenate([rows, needles], axis=1)
            targets = np.full((len(rows), rows.shape[1] - 1), IGNORED)
            targets[:, -half:] = rows[:, -half:]
            result.append((depth, self._batches(rows, targets)))
        return result

    @property
    def note(self) -> str:
        """Return why recall is not measured, or ""."""
        if self.row_length:
            return ""
        longest, least = int(self._document_lengths.max(initial=0)), MIN_ROW_TOKENS + 2
        needed = f"a held-out document of {least} tokens, and windows of {MIN_ROW_TOKENS}"
        return f"Recall was not measured: it needs {needed}. The longest document has {longest} tokens."

    @property
    def _document_lengths(self) -> np.ndarray:
        text = self.corpus.validation
        return np.diff(np.append(np.asarray(text.offsets, dtype=np.int64), len(text)))

    def _rows(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """int64 [count, length]: pieces of documents, without their end tokens."""
        text, lengths = self.corpus.validation, self._document_lengths
        choices = lengths - length  # the first token of a document is its end token
        starts = rng.integers(1, choices.clip(min=0).sum() + 1, count)
        ends = np.cumsum(choices.clip(min=0))
        documents = np.searchsorted(ends, starts)
        offsets = np.asarray(text.offsets, dtype=np.int64)[documents] + choices[documents] - (ends[documents] - starts)
        return np.stack([text.read(int(offset), int(offset) + length) for offset in offsets])

    def _draw_needles(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """int64 [count, NEEDLE_TOKENS]: beginnings of lines, or any text where no line begins."""
        tokenizer = self.corpus.tokenizer
        ends_line = np.array([b"\n" in tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)])
        needles = []
        for row in self._rows(rng, count, self.row_length + 1):
            starts = np.flatnonzero(ends_line[row[:-NEEDLE_TOKENS]]) + 1
            start = int(rng.choice(starts)) if len(starts) else 0
            needles.append(row[start : start + NEEDLE_TOKENS])
        return np.stack(needles)

    def _batches(self, rows: np.ndarray, targets: np.ndarray | None = None) -> list[Batch]:
        """Batches of rows that are one document each."""
        rows = self.corpus.rows.begin(rows)
        size, length = self.batch_size, rows.shape[1] - 1
        return [
            Batch(
                rows[first : first + size],
                ((length,),) * len(rows[first : first + size]),
                np.arange(first, min(first + size, len(rows))),
                labels=None if targets is None else targets[first : first + size],
            )
            for first in range(0, len(rows), size)
        ]


def _unseen(needles: np.ndarray, text: np.ndarray) -> np.ndarray:
    """Choose for each row the first unused needle whose query does not occur in the row; else any unused one."""
    left, half, chosen = list(needles), NEEDLE_TOKENS // 2, []
    for row in text:
        windows = np.lib.stride_tricks.sliding_window_view(row, half)
        fits = [not (windows == needle[:half]).all(1).any() for needle in left]
        chosen.append(left.pop(fits.index(True) if True in fits else 0))
    return np.stack(chosen)


def unread(batches: Sequence[Batch], scores: FiniteScores) -> list[Batch]:
    """Return the batches whose rows have no scores yet. scores: of the rows of the first batches, of any sizes."""
    ends = np.cumsum([len(batch.tokens) for batch in batches])
    return [batch for batch, end in zip(batches, ends, strict=True) if end > len(scores)]


def score_text_recall(
    model: Decoder,
    text: TextRecall,
    autocast: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda rows: None,
    begun: TextRecallScores | None = None,
) -> TextRecallScores:
    """Return the scores of a model; empty ones where documents are too short. Each row is read once.

    advance: called with the number of rows of each batch that was read. begun: scores of the first batches from an
    earlier call; the rest is added to them.
    """
    scores = begun or TextRecallScores([], [], [])
    if not text.row_length:
        return scores
    byte_lengths, spans = text.corpus.tokenizer.byte_lengths, text.span_rows
    advance(len(scores.first_spans))
    for batch, tokens in token_scores(model, unread(spans.batches, scores.first_spans), byte_lengths, autocast):
        rows, bits, sizes = batch.sample_indices, token_bits(tokens), tokens.sizes.cpu().numpy()
        for starts, own in ((spans.first[rows], scores.first_spans), (spans.second[rows], scores.repeated_spans)):
            columns = starts[:, None] + np.arange(spans.length)
            bits_and_sizes = np.take_along_axis(bits, columns, 1), np.take_along_axis(sizes, columns, 1)
            own.extend(finite_scores(row_sums(*bits_and_sizes)))
        advance(len(rows))
    for number, (depth, batches) in enumerate(text.needle_rows):
        if number == len(scores.needles):
            scores.needles.append(NeedleScores(depth, [], []))
        losses, correct = scores.needles[number].losses, scores.needles[number].correct
        advance(len(losses))
        for batch, tokens in token_scores(model, unread(batches, losses), byte_lengths, autocast, with_correct=True):
            assert tokens.correct is not None
            losses.extend(finite_scores(row_sums(token_bits(tokens), tokens.sizes.cpu().numpy())))
            correct.extend(finite_scores(row_sums(tokens.correct.double().cpu().numpy(), batch.targets >= 0)))
            advance(len(batch.tokens))
    return scores
