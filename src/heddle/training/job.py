"""A training job: what to train, on which data, how and where."""

import os
import resource
import sys
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heddle.data.chat import ChatDataset
from heddle.data.corpus import Corpus
from heddle.distributed.ranks import ONE_PROCESS, ParallelDegrees, Ranks
from heddle.errors import ConfigError, MachineError
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import cast_parameters
from heddle.model.lora import add_lora
from heddle.model.size import build_distinct_layers, parameter_counts
from heddle.progress import format_amount
from heddle.training.distillation import Distillation, Teacher
from heddle.training.evaluation.scores import EvaluationBudget, TokenObserver
from heddle.training.init_checkpoint import InitCheckpoint, LoraSettings
from heddle.training.settings import Settings
from heddle.training.training_data import ChatData, TaskData, TaskSource, TextData, TrainingData
from heddle.training.width_transfer import WidthTransfer, transfer_over_width


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
