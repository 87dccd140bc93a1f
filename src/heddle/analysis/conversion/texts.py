"""The held-out text that is read before and after a conversion: windows, repeated spans and needles.

Spans and needles are those of `heddle.training.evaluation.text_recall`. Nothing is trained.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.training.evaluation.loss_profile import position_edges
from heddle.training.evaluation.text_recall import TextRecall
from heddle.training.settings import Settings
from heddle.training.training_data import TextData


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
        return list(TextData(self.corpus, self.corpus.rows).validation_batches(training, tokens))

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
        return list(pairwise(position_edges(self.settings.sequence_length)))

    @cached_property
    def recall(self) -> TextRecall:
        """The rows of the recall tests."""
        settings = self.settings
        rows = (settings.span_rows, settings.needle_rows)
        return TextRecall(self.corpus, settings.sequence_length, *rows, settings.batch_size)

    @property
    def layer_rows(self) -> list[Batch]:
        """A few windows, on which layers are compared."""
        batch = self.windows[0]
        rows = min(self.settings.layer_rows, len(batch.tokens))
        return [Batch(batch.tokens[:rows], batch.doc_lengths[:rows], batch.sample_indices[:rows])]
