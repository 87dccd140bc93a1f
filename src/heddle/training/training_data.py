"""The data of a training run: its batches and its metric. Text and chats give bits per byte, tasks an accuracy."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from heddle.data.chat import CHAT_TEMPLATE_FILE, ChatDataset
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch, CorpusLoader, evaluation_windows
from heddle.errors import ConfigError
from heddle.model.decoder import Decoder
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.evaluation.scores import Scores, TokenObserver, bits_and_bytes, correct_predictions
from heddle.training.settings import Settings


class TrainingData(ABC):
    """What the training loop needs from text, conversations or a task. metric: its name in the log."""

    metric: ClassVar[str]

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer | None:
        """Return the tokenizer that is saved with the model."""

    @property
    def documents(self) -> dict[str, str]:
        """Return other text files that are saved with the model, by name."""
        return {}

    def check(self, model: Decoder) -> None:
        """Raise ConfigError for a design that cannot learn from this data because it sees its targets."""
        if not model.causal:
            raise ConfigError("causal: a mixer sees later tokens, so the design cannot learn to predict them")

    @abstractmethod
    def train_batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Return a function from a step to its batch. Raises DataError if there is too little data."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what identifies the data: a continued run must have the same."""

    def report(self) -> dict[str, Any]:
        """Describe the data as plain values, for run.json."""
        return self.identity()

    @abstractmethod
    def step_metrics(self, batch: Batch, loss: float) -> dict[str, float]:
        """Return the metrics of a training step, besides its loss, for the log."""

    @abstractmethod
    def validation_batches(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Return batches of about `tokens` tokens that no step trains on."""

    @abstractmethod
    def evaluate(
        self,
        model: Decoder,
        batches: Iterable[Batch],
        autocast: torch.dtype | None,
        observer: TokenObserver | None = None,
    ) -> Scores:
        """Return the metric's numerator and denominator for each window or row.

        observer: receives the token losses of each batch of text; a task has none.
        """


class WrittenData(TrainingData):
    """Text or conversations, whose loss is counted in bits per byte."""

    metric: ClassVar[str] = "bits_per_byte"

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the text."""

    @property
    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of each token."""
        return self.tokenizer.byte_lengths

    def step_metrics(self, batch: Batch, loss: float) -> dict[str, float]:
        """Return the batch's bits per byte. End tokens count in it, so it is slightly higher than in an evaluation."""
        scored_targets = batch.targets[batch.targets >= 0]
        scored_bytes = max(1, int(self.byte_lengths[scored_targets].sum()))
        return {"bits_per_byte": loss * scored_targets.size / math.log(2) / scored_bytes}

    def evaluate(
        self,
        model: Decoder,
        batches: Iterable[Batch],
        autocast: torch.dtype | None,
        observer: TokenObserver | None = None,
    ) -> Scores:
        """Return the bits and bytes of each window of a text, or of the assistant's text in each row."""
        return bits_and_bytes(model, batches, self.byte_lengths, autocast, observer)


@dataclass(frozen=True)
class TextData(WrittenData):
    """A text corpus."""

    corpus: Corpus

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the corpus's tokenizer."""
        return self.corpus.tokenizer

    def train_batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Return a function from a step to a batch of windows of the training files."""
        files, weights, eod_id = self.corpus.train, self.corpus.weights, self.corpus.tokenizer.eod_id
        length, batch_size = settings.sequence_length, settings.batch_size
        loader = CorpusLoader(files, weights, length, batch_size, settings.seed, eod_id, self.corpus.rows)
        return lambda step: loader.batch_from(settings.samples_before(step))

    def identity(self) -> dict[str, Any]:
        """Return the content's hash, the tokens of each file, which determine the order of samples, and the rows."""
        tokens = [len(file) for file in self.corpus.train]
        return {"hash": self.corpus.hash, "tokens": tokens, **self.corpus.rows.record()}

    def report(self) -> dict[str, Any]:
        """Return the corpus's counts of bytes, documents and tokens."""
        return self.corpus.report

    def validation_batches(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Return validation windows that are spread evenly over the text."""
        validation, batch_tokens = self.corpus.validation, settings.tokens_per_step
        validation_tokens = -(-len(validation) // batch_tokens) * batch_tokens  # in whole batches
        every = max(1, validation_tokens // tokens)
        return evaluation_windows(validation, settings.sequence_length, settings.batch_size, self.corpus.rows, every)


@dataclass(frozen=True)
class ChatData(WrittenData):
    """Conversations. Only the assistant's text is trained and evaluated."""

    chat: ChatDataset

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the conversations' tokenizer."""
        return self.chat.tokenizer

    @property
    def documents(self) -> dict[str, str]:
        """Return the chat template, which a chat with the model needs."""
        return {CHAT_TEMPLATE_FILE: self.chat.chat_format.template}

    def train_batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Return a function from a step to its batch of rows.

        Raises ConfigError if the conversations were packed for another length.
        """
        rows, packed_length = settings.batch_size, self.chat.sequence_length
        if settings.sequence_length != packed_length:
            raise ConfigError(
                f"sequence_length {settings.sequence_length}: these conversations are packed for {packed_length} "
                "tokens; set that length"
            )
        return lambda step: self.chat.batch(settings.seed, settings.samples_before(step), rows)

    def identity(self) -> dict[str, Any]:
        """Return a hash of all tokenized conversations."""
        return {"hash": self.chat.hash}

    def report(self) -> dict[str, Any]:
        """Return counts of conversations, rows and tokens."""
        return self.chat.report

    def step_metrics(self, batch: Batch, loss: float) -> dict[str, float]:
        """Return the batch's bits per byte of the assistant's text; the bits include end-of-turn tokens.

        scored_fraction: the assistant's share of all targets.
        """
        return super().step_metrics(batch, loss) | {"scored_fraction": float((batch.targets >= 0).mean())}

    def validation_batches(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Return rows of held-out conversations."""
        return self.chat.validation_batches(tokens // settings.sequence_length, settings.batch_size)

    @property
    def byte_lengths(self) -> np.ndarray:
        """Return the bytes of each token. The end token of a turn counts 0 bytes instead of a negative number."""
        return np.maximum(self.tokenizer.byte_lengths, 0)


class TaskSource(Protocol):
    """Rows with answers: a recall task (`heddle.data.recall`) or labeled data (`heddle.data.labeled`)."""

    @property
    def causal(self) -> bool:
        """Whether the model must be causal, because later tokens of a row contain answers."""

    @property
    def length(self) -> int:
        """Return the tokens per row."""

    @property
    def vocab_size(self) -> int:
        """Return the number of different tokens, answers included."""

    def batch(self, seed: int, first_row: int, num_rows: int) -> Batch:
        """Return rows `first_row` to `first_row + num_rows − 1` in the order of a seed."""

    def validation_batches(self, num_rows: int, batch_size: int) -> Iterable[Batch]:
        """Return batches of up to `num_rows` rows that no step trains on."""

    def describe(self) -> dict[str, Any]:
        """Return plain values that identify the task."""


@dataclass(frozen=True)
class TaskData(TrainingData):
    """A task. Its held-out rows are the same for every run."""

    source: TaskSource
    tokenizer: Tokenizer | None = None
    metric: ClassVar[str] = "accuracy"

    def check(self, model: Decoder) -> None:
        """Raise ConfigError if the vocabulary is too small, or the task needs a causal model and it is not."""
        if self.source.causal:
            super().check(model)
        vocab_size, required = model.embed.weight.shape[0], self.source.vocab_size
        if vocab_size < required:
            raise ConfigError(
                f"vocab_size: {vocab_size} is too small for data of {required} tokens; set at least {required}"
            )

    def train_batches(self, settings: Settings) -> Callable[[int], Batch]:
        """Return a function from a step to its batch of rows. Raises ConfigError if sequence_length differs."""
        rows, length = settings.batch_size, self.source.length
        if settings.sequence_length != length:
            raise ConfigError(
                f"sequence_length {settings.sequence_length}: rows of this data have {length} tokens; set {length}"
            )
        return lambda step: self.source.batch(settings.seed, settings.samples_before(step), rows)

    def identity(self) -> dict[str, Any]:
        """Return the task's description."""
        return self.source.describe()

    def step_metrics(self, batch: Batch, loss: float) -> dict[str, float]:
        """Return the fraction of targets that are scored."""
        return {"scored_fraction": float((batch.targets >= 0).mean())}

    def validation_batches(self, settings: Settings, tokens: int) -> Iterable[Batch]:
        """Return the first held-out rows."""
        return self.source.validation_batches(max(1, tokens // settings.sequence_length), settings.batch_size)

    def evaluate(
        self,
        model: Decoder,
        batches: Iterable[Batch],
        autocast: torch.dtype | None,
        observer: TokenObserver | None = None,
    ) -> Scores:
        """Return the correct answers and scored targets of each row."""
        return correct_predictions(model, batches, autocast)
