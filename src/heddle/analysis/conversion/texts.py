"""The held-out text that is read before and after a conversion: windows, repeated spans and needles.

Repeated spans: a row of text in which one span stands a second time, in the place of other text. A model that can look
back predicts the second occurrence better than the first. Needles: a line of another text is inserted into a row, and
its beginning is repeated at the end of the row; the model has to recall how the line went on. Nothing is trained. All
rows are drawn from one seed, so that every model reads the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.training.settings import Settings
from heddle.training.training_data import TextData

SEED = 20_261_122
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE_TOKENS = 16  # the first half is repeated as the query, the second half is scored
LEADING_TOKENS = 4  # of a span, by which a model can know that it is repeated; they are not scored
MIN_ROW_TOKENS = 64
IGNORED = -1


@dataclass(frozen=True)
class MeasurementSettings:
    """How much is read. windows, span_rows, needle_rows: at most so many. speed_contexts: empty measures no speed."""

    sequence_length: int = 256
    windows: int = 256
    batch_size: int = 8
    span_rows: int = 64
    needle_rows: int = 32
    layer_rows: int = 8
    speed_contexts: tuple[int, ...] = (512, 2048, 8192)
    state_contexts: tuple[int, ...] = (2048, 8192, 32768)


@dataclass(frozen=True)
class RepeatedSpanRows:
    """Rows with a repeated span. first, second: [rows], where the scored tokens of the two occurrences begin."""

    batches: Sequence[Batch]
    first: np.ndarray
    second: np.ndarray
    length: int


@dataclass(frozen=True)
class MeasurementText:
    """The held-out text of a corpus, cut into what is measured."""

    corpus: Corpus
    settings: MeasurementSettings

    @cached_property
    def windows(self) -> list[Batch]:
        """Windows in order, spread evenly over the text."""
        rows, length = self.settings.batch_size, self.settings.sequence_length
        training = Settings(steps=1, batch_size=rows, sequence_length=length, learning_rate=1e-3)
        tokens = self.settings.windows * length
        return list(TextData(self.corpus).validation_batches(training, tokens))

    @property
    def window_count(self) -> int:
        """The number of windows."""
        return sum(len(batch.tokens) for batch in self.windows)

    @property
    def text_bytes(self) -> int:
        """The bytes of all scored tokens."""
        lengths = self.corpus.tokenizer.byte_lengths
        return sum(int(lengths[batch.targets].sum()) for batch in self.windows)

    @property
    def position_ranges(self) -> list[tuple[int, int]]:
        """Ranges [first, end) of positions, each twice as long as the one before it."""
        length = self.settings.sequence_length
        edges = sorted({0, *(length // divisor for divisor in (16, 8, 4, 2)), length})
        return list(pairwise(edges))

    @cached_property
    def row_length(self) -> int:
        """The inputs of a row of the recall tests: no longer than a window or the longest document; 0 if too short."""
        longest = int(self._document_lengths.max(initial=0)) - 2  # the end token and the last target
        length = min(self.settings.sequence_length, longest)
        return length if length >= MIN_ROW_TOKENS else 0

    @property
    def span_length(self) -> int:
        """The tokens of a repeated span."""
        return self.row_length // 8

    @cached_property
    def span_rows(self) -> RepeatedSpanRows:
        """Rows in which a span of the first half stands again in the second half."""
        rng = np.random.default_rng(SEED)
        rows = self._rows(rng, self.settings.span_rows, self.row_length + 1)
        length, half = self.span_length, self.row_length // 2
        first = rng.integers(1, half - length, len(rows))
        second = rng.integers(half, self.row_length + 1 - length, len(rows))
        for row, start, copy in zip(rows, first, second, strict=True):
            row[copy : copy + length] = row[start : start + length]
        scored = length - LEADING_TOKENS
        return RepeatedSpanRows(self._batches(rows), first + LEADING_TOKENS - 1, second + LEADING_TOKENS - 1, scored)

    @cached_property
    def needle_rows(self) -> list[tuple[float | None, list[Batch]]]:
        """(depth, rows) for each depth, and (None, rows) without the needles. Row i has the same needle everywhere."""
        rng = np.random.default_rng(SEED + 1)
        half = NEEDLE_TOKENS // 2
        count = self.settings.needle_rows
        text = self._rows(rng, count, self.row_length + 1 - NEEDLE_TOKENS)
        needles = _unseen(self._needles(rng, 4 * count), text)
        result: list[tuple[float | None, list[Batch]]] = []
        for depth in (*DEPTHS, None):
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
    def layer_rows(self) -> list[Batch]:
        """A few windows, on which layers are compared."""
        batch = self.windows[0]
        rows = min(self.settings.layer_rows, len(batch.tokens))
        return [Batch(batch.tokens[:rows], batch.doc_lengths[:rows], batch.sample_indices[:rows])]

    @property
    def note(self) -> str:
        """Why recall is not measured, or ""."""
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

    def _needles(self, rng: np.random.Generator, count: int) -> np.ndarray:
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
        size, length = self.settings.batch_size, rows.shape[1] - 1
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
    """For each row of the text the first needle, not yet taken, whose query it does not hold; else any."""
    left, half, chosen = list(needles), NEEDLE_TOKENS // 2, []
    for row in text:
        windows = np.lib.stride_tricks.sliding_window_view(row, half)
        fits = [not (windows == needle[:half]).all(1).any() for needle in left]
        chosen.append(left.pop(fits.index(True) if True in fits else 0))
    return np.stack(chosen)
