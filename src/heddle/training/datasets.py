"""What a run learns from, and how it is measured: text and chats in bits per byte, answers by how many are right."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from heddle.data.chat import Chat
from heddle.data.chat_format import TEMPLATE
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch, Samples, evaluation_windows
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.evaluation.bits_per_byte import window_bits
from heddle.training.evaluation.recall import right_answers
from heddle.training.settings import Settings

Measured = list[tuple[float, int]]  # amount and size of each window or row; the score is the ratio of their sums


class Material(Protocol):
    """What the loop asks of a text or of rows with answers."""

    @property
    def score(self) -> str:
        """The name of what is measured."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Saved beside the model."""

    @property
    def documents(self) -> dict[str, str]:
        """Other texts to save there, by file name."""

    def check(self, model: Decoder) -> None:
        """Raises ConfigError for a design that cannot learn from it."""

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

    @property
    def documents(self) -> dict[str, str]:
        """None."""
        return {}

    def check(self, model: Decoder) -> None:
        """Each next token must be hidden."""
        _hides_what_follows(model)

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
        return {"bits_per_byte": _bits(self.tokenizer.byte_lengths, batch, loss)}

    def held_out(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Validation windows that lie evenly over the text."""
        validation, size = self.corpus.validation, settings.tokens_per_step
        windows = evaluation_windows(validation, settings.context, settings.batch_size)
        return itertools.islice(windows, 0, None, max(1, -(-len(validation) // size) * size // tokens))

    def measure(self, model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None) -> Measured:
        """Bits and bytes of each window."""
        return window_bits(model, batches, self.tokenizer.byte_lengths, autocast)


@dataclass(frozen=True)
class Turns:
    """Conversations, of which what the assistant says is learned and measured."""

    chat: Chat
    score: str = "bits_per_byte"

    @property
    def tokenizer(self) -> Tokenizer:
        """That which the conversations are written with."""
        return self.chat.tokenizer

    @property
    def documents(self) -> dict[str, str]:
        """The template, for whoever talks to the model."""
        return {TEMPLATE: self.chat.form.template}

    def check(self, model: Decoder) -> None:
        """Each next token must be hidden."""
        _hides_what_follows(model)

    def batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Rows one after another. Raises ConfigError where `context` is not that they were packed for."""
        rows = settings.batch_size
        if settings.context != self.chat.context:
            raise ConfigError(f"--context {settings.context}: these conversations are packed for {self.chat.context}")
        return lambda step: self.chat.batch(settings.seed, step * rows, rows)

    def identity(self) -> dict[str, Any]:
        """Every conversation, and how it is written."""
        return {"hash": self.chat.hash}

    def report(self) -> dict[str, Any]:
        """Conversations, rows and tokens."""
        return self.chat.report

    def told(self, batch: Batch, loss: float) -> dict[str, float]:
        """Bits per byte of what the assistant says, the end of its turns in the bits; the share of targets it says."""
        return {"bits_per_byte": _bits(self._sizes, batch, loss), "scored": float((batch.targets >= 0).mean())}

    def held_out(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Rows of conversations that are held out."""
        return self.chat.held_out(tokens // settings.context, settings.batch_size)

    def measure(self, model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None) -> Measured:
        """Bits and bytes of what the assistant says in each row."""
        return window_bits(model, batches, self._sizes, autocast)

    @property
    def _sizes(self) -> np.ndarray:
        """Bytes of each token; the end of a turn takes none back, since no text begins after it."""
        return np.maximum(self.tokenizer.byte_lengths, 0)


class Source(Protocol):
    """Rows with answers: a recall task, or labelled data (`heddle.data.labelled`)."""

    @property
    def causal(self) -> bool:
        """Whether a design must hide later tokens, since answers stand among them."""

    @property
    def length(self) -> int:
        """Tokens of a row."""

    @property
    def vocab_size(self) -> int:
        """How many different tokens there are, answers included."""

    def batch(self, seed: int, first: int, rows: int) -> Batch:
        """Rows `first` to `first + rows − 1` of the order that belongs to a seed."""

    def held_out(self, rows: int, batch_size: int) -> Iterable[Batch]:
        """Up to `rows` rows that no step trains on."""

    def describe(self) -> dict[str, Any]:
        """Plain data that says which it is."""


@dataclass(frozen=True)
class Answers:
    """Rows of a source; those that measure are the same for every run."""

    source: Source
    score: str = "accuracy"
    tokenizer: Tokenizer | None = None

    @property
    def documents(self) -> dict[str, str]:
        """None."""
        return {}

    def check(self, model: Decoder) -> None:
        """The vocabulary must hold every token and answer; some sources need later tokens hidden."""
        if self.source.causal:
            _hides_what_follows(model)
        known, needed = model.embed.weight.shape[0], self.source.vocab_size
        if known < needed:
            raise ConfigError(f"vocab_size: {known} is too small for data of {needed} tokens; set at least {needed}")

    def batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Rows one after another. Raises ConfigError where `context` is not their length."""
        rows, length = settings.batch_size, self.source.length
        if settings.context != length:
            raise ConfigError(f"--context {settings.context}: rows of this data have {length} tokens; say {length}")
        return lambda step: self.source.batch(settings.seed, step * rows, rows)

    def identity(self) -> dict[str, Any]:
        """Which source it is."""
        return self.source.describe()

    def report(self) -> dict[str, Any]:
        """The same."""
        return self.source.describe()

    def told(self, batch: Batch, loss: float) -> dict[str, float]:
        """The share of targets that are scored."""
        return {"scored": float((batch.targets >= 0).mean())}

    def held_out(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """The first of the rows that measure."""
        return self.source.held_out(max(1, tokens // settings.context), settings.batch_size)

    def measure(self, model: Decoder, batches: Iterable[Batch], autocast: torch.dtype | None) -> Measured:
        """Right answers and scored targets of each row."""
        return right_answers(model, batches, autocast)


def _bits(byte_lengths: np.ndarray, batch: Batch, loss: float) -> float:
    """Bits per byte of a batch's scored targets, from their mean loss in nats."""
    asked = batch.targets[batch.targets >= 0]
    return loss * asked.size / math.log(2) / max(1, int(byte_lengths[asked].sum()))


def _hides_what_follows(model: Decoder) -> None:
    if not model.causal:
        raise ConfigError("causal: a mixer sees later tokens, so the design cannot learn to predict them")
