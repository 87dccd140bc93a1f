"""What a run learns from, and how it is measured: text in bits per byte, or a recall task in right answers."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from heddle.data.corpus import Corpus
from heddle.data.recall import Practice
from heddle.data.samples import Batch, Samples, evaluation_windows
from heddle.data.tokenizer import Tokenizer
from heddle.evaluation.bits import window_bits
from heddle.evaluation.recall import right_answers
from heddle.model.decoder import Decoder
from heddle.training.settings import Settings

Measured = list[tuple[float, int]]  # amount and size of each window or row; the score is the ratio of their sums


class Material(Protocol):
    """What the loop asks of a text or a task."""

    @property
    def score(self) -> str:
        """The name of what is measured."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Saved beside the model."""

    def batches(self, settings: Settings) -> Callable[[int], Batch]:
        """The batch of each step. Raises DataError where there is too little."""

    def identity(self) -> dict[str, Any]:
        """What a continued run must share."""

    def report(self) -> dict[str, Any]:
        """Plain data for run.json."""

    def told(self, batch: Batch, loss: float) -> dict[str, float]:
        """What a step's line of the log says besides its loss."""

    def held_out(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """About `tokens` tokens that no step trains on."""

    def measure(self, model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None) -> Measured:
        """The score's parts."""


@dataclass(frozen=True)
class Text:
    """A corpus."""

    corpus: Corpus
    score: str = "bits_per_byte"

    @property
    def tokenizer(self) -> Tokenizer:
        """The corpus's own."""
        return self.corpus.tokenizer

    def batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Windows of the training files."""
        corpus = self.corpus
        return Samples(
            corpus.train, corpus.weights, settings.context, settings.batch_size, settings.seed, corpus.tokenizer.end
        ).batch

    def identity(self) -> dict[str, Any]:
        """Content and how far it was encoded, which decides the order of samples too."""
        return {"hash": self.corpus.hash, "tokens": [len(file) for file in self.corpus.train]}

    def report(self) -> dict[str, Any]:
        """Bytes, documents and tokens."""
        return self.corpus.report

    def told(self, batch: Batch, loss: float) -> dict[str, float]:
        """Bits per byte; end tokens count in the loss, so it is a little above what an evaluation gives."""
        in_bytes = int(self.tokenizer.byte_lengths[batch.targets].sum())
        return {"bits_per_byte": loss * batch.targets.size / math.log(2) / max(1, in_bytes)}

    def held_out(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Validation windows that lie evenly over the text."""
        validation, size = self.corpus.validation, settings.tokens_per_step
        windows = evaluation_windows(validation, settings.context, settings.batch_size)
        return itertools.islice(windows, 0, None, max(1, -(-len(validation) // size) * size // tokens))

    def measure(self, model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None) -> Measured:
        """Bits and bytes of each window."""
        return window_bits(model, batches, self.tokenizer.byte_lengths, autocast)


@dataclass(frozen=True)
class Recall:
    """A task whose rows are drawn as they are needed; those that measure are the same for every run."""

    practice: Practice
    score: str = "accuracy"
    tokenizer: Tokenizer | None = None

    def batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Rows one after another, none twice."""
        rows = settings.batch_size
        return lambda step: self.practice.batch(settings.seed, step * rows, rows)

    def identity(self) -> dict[str, Any]:
        """The task and its options."""
        return self.practice.describe()

    def report(self) -> dict[str, Any]:
        """The same."""
        return self.practice.describe()

    def told(self, batch: Batch, loss: float) -> dict[str, float]:
        """The share of targets that are scored."""
        return {"scored": float((batch.targets >= 0).mean())}

    def held_out(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """The first rows of a seed no training has."""
        return self.practice.held_out(max(1, tokens // settings.context), settings.batch_size)

    def measure(self, model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None) -> Measured:
        """Right answers and scored targets of each row."""
        return right_answers(model, batches, autocast)
