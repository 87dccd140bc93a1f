"""A training job: what to train, on which data, how and where."""

import math
import os
import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from heddle.data.chat import CHAT_TEMPLATE_FILE, ChatDataset
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch, CorpusLoader, evaluation_windows
from heddle.distributed.ranks import ONE_PROCESS, ParallelDegrees, Ranks
from heddle.errors import ConfigError, MachineError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import cast_parameters
from heddle.model.lora import add_lora
from heddle.model.size import build_distinct_layers, parameter_counts
from heddle.progress import format_amount
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.distillation import Distillation, Teacher
from heddle.training.evaluation.scores import (
    EvaluationBudget,
    Scores,
    TokenObserver,
    bits_and_bytes,
    correct_predictions,
)
from heddle.training.init_checkpoint import InitCheckpoint, LoraSettings
from heddle.training.settings import Settings
from heddle.training.width_transfer import WidthTransfer, transfer_over_width

# The data of a training run: its batches and its metric. Text and chats give bits per byte, tasks an accuracy.


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


# The job.


@dataclass(frozen=True)
class TrainingJob:
    """What to train, on which data, how and where.

    source: the data. out: the run's folder. label: of the progress bar. environment: plain values for run.json.
    init_checkpoint: the weights to start from. lora: trains only adapters. distillation: trains to match a teacher.
    evaluation: how much text evaluations read, and whether a solved task ends training. observer: receives the token
    losses of the final evaluation. ranks: share the work, see `heddle.distributed.process_group.join_ranks`. degrees:
    how they share it. trackers: names of TRACKERS (`heddle.training.trackers`), which receive the log's lines.
    save_seconds: minimum seconds between checkpoints; one that is due earlier is left out. async_save: training
    continues while a checkpoint is written from a copy in host memory; None: only on an accelerator.
    """

    config: ModelConfig
    source: Corpus | ChatDataset | TaskSource
    settings: Settings
    out: Path
    device: str = "cpu"
    label: str = "training"
    environment: dict[str, Any] | None = None
    init_checkpoint: InitCheckpoint | None = None
    lora: LoraSettings | None = None
    distillation: Distillation | None = None
    evaluation: EvaluationBudget = field(default_factory=EvaluationBudget)
    observer: TokenObserver | None = None
    ranks: Ranks = ONE_PROCESS
    degrees: ParallelDegrees = field(default_factory=ParallelDegrees)
    async_save: bool | None = None
    trackers: tuple[str, ...] = ()
    save_seconds: float = 0.0

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of autocast, or None for float32."""
        return None if self.settings.precision == "fp32" else torch.bfloat16

    @property
    def is_save_async(self) -> bool:
        """Return whether training continues while a checkpoint is written; always False on several ranks."""
        is_async = torch.device(self.device).type != "cpu" if self.async_save is None else self.async_save
        return is_async and self.ranks.count == 1

    @property
    def training_data(self) -> TrainingData:
        """Return the source as training data."""
        if isinstance(self.source, Corpus):
            return TextData(self.source)
        return ChatData(self.source) if isinstance(self.source, ChatDataset) else TaskData(self.source)

    @property
    def documents(self) -> dict[str, str]:
        """Return the text files to save with the model, by name, besides config and tokenizer."""
        return ({} if self.init_checkpoint is None else self.init_checkpoint.documents) | self.training_data.documents

    def identity(self) -> dict[str, Any]:
        """Return everything that determines the result. Only a job with the same identity may continue a run.

        Ranks and their degrees are not part of it.
        """
        return {
            "design": self.config.dump(),
            "data": self.training_data.identity(),
            "settings": self.settings.identity(),
            "init_checkpoint": None if self.init_checkpoint is None else self.init_checkpoint.weights_sha256,
            "lora": None if self.lora is None else asdict(self.lora),
            "distillation": None if self.distillation is None else self.distillation.identity(),
        }

    @cached_property
    def width_transfer(self) -> WidthTransfer:
        """Return the scales for a learning rate that was chosen at another width.

        Raises ConfigError if the weights are trained already.
        """
        width = self.settings.transfer_width
        if self.init_checkpoint is not None and width is not None:
            raise ConfigError(f"transfer_width {width}: scales fresh weights, and these are trained; leave it out")
        return transfer_over_width(self.config, width, self.settings.optimizer)

    def build_model(self) -> Decoder:
        """Build the model in its state before the first step."""
        seed = self.settings.seed
        if self.init_checkpoint is None:
            model = self.width_transfer.build_model(self.device, seed)
        else:
            model = self.init_checkpoint.build_model(self.config, self.device)
        if self.settings.precision == "bf16-params":
            cast_parameters(model, torch.bfloat16)
        return model if self.lora is None else add_lora(model, self.lora.targets, self.lora.rank, seed=seed)

    def build_teacher(self, model: Decoder) -> Teacher | None:
        """Build the teacher of a model from `build_model`, and freeze the parameters that are not trained."""
        if self.distillation is None:
            return None
        tokenizer, compile_layers = self.training_data.tokenizer, self.settings.compile
        teacher = self.distillation.build_teacher(model, tokenizer, self.device, compile_layers)
        if teacher is not None:
            self.training_data.check(teacher.model)
        return teacher


# Memory for weights, gradients and moments is checked before anything is allocated.


def check_memory(job: TrainingJob) -> None:
    """Raise MachineError if the weights of a job, with their gradients and moments, exceed the device's memory."""
    with torch.no_grad():
        parameters, _ = parameter_counts(build_distinct_layers(job.config, torch.float32))
    is_frozen = job.lora is not None or any(factor == 0 for _, factor in job.settings.lr_scale)
    needed, memory = parameters * _least_bytes(job.settings, is_frozen), device_memory(job.device)
    if needed > memory:
        raise MachineError(
            f"design: {format_amount(parameters, 'parameters')} take at least {format_amount(needed, 'bytes')} in "
            f"training, and the device has {format_amount(memory, 'bytes')}; choose smaller sizes"
        )


def _least_bytes(settings: Settings, is_frozen: bool) -> int:
    """Return the fewest bytes that a parameter takes: its weight and, where it is trained, gradient and moments."""
    weight = 2 if settings.precision == "bf16-params" else 4
    return weight if is_frozen else 2 * weight + 4  # one moment of Muon's; AdamW has two


def device_memory(device: str) -> int:
    """Return a device's total memory in bytes."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_process_memory() -> int:
    """Return the peak resident memory of this process in bytes."""  # Linux counts KiB, macOS bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
