"""The training loop: batch, gradients, update, log, checkpoint.

A resumed run is bit-equal to an uninterrupted one on a CPU, and on CUDA where the process asked torch for deterministic
algorithms (`heddle.runtime`). On an accelerator the host queues a step before it reads the numbers of the one before.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from heddle import progress as display
from heddle.data.chat import ChatDataset
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.errors import ConfigError, MachineError
from heddle.model.compiled import compiled
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder
from heddle.model.initialization import cast_parameters
from heddle.model.lora import add_lora
from heddle.numerics.dispatch.transfer import UNPINNED
from heddle.signals import Interrupted, StopRequest, catch_stop_signals
from heddle.storage.lock import RunLock
from heddle.storage.run_log import RunLog, open_run
from heddle.training.checkpoint import TrainingProgress, resume_run, save_run
from heddle.training.distillation import Distillation, Teacher
from heddle.training.evaluation.bits_per_byte import TokenObserver
from heddle.training.evaluation.budget import EarlyStop, EvaluationBudget
from heddle.training.evaluation.scores import Scores, ratio_of_sums
from heddle.training.float8 import float8_copy
from heddle.training.init_checkpoint import InitCheckpoint, LoraSettings
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.prefetch import prepared_batches
from heddle.training.settings import Settings, scheduled_learning_rate
from heddle.training.smoothed_loss import SmoothedLoss
from heddle.training.step import PreparedBatch, accumulate_gradients, apply_gradients
from heddle.training.step_log import QueuedStep, finite, log_line, peak_memory, peak_note
from heddle.training.training_data import ChatData, TaskData, TaskSource, TextData, TrainingData
from heddle.training.training_result import TrainingResult
from heddle.training.width_transfer import WidthTransfer, transfer_over_width

MAX_CONSECUTIVE_SKIPS = 10
FINAL_EVALUATION_TOKENS = 2**16  # held-out tokens of the evaluation at the end
INTERIM_EVALUATION_TOKENS = 2**14  # and of an evaluation during training
_QUEUED_STEPS = 1  # on an accelerator: a step is queued before the one before it is read
RATE_STEPS = 100  # the rate beside the progress bar is that of the median of the last steps


class Diverged(MachineError):
    """Too many consecutive steps had a loss or gradient that was not finite."""


@dataclass(frozen=True)
class TrainingJob:
    """What to train, on which data, how and where.

    source: the data. out: the run's folder. label: of the progress bar. environment: plain values for run.json.
    init_checkpoint: starts from its weights. lora: trains only adapters. distillation: trains towards a teacher.
    evaluation: how much evaluations read, and whether a solved task ends the training. observer: of the last one.
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

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the dtype of autocast, or None for float32."""
        return None if self.settings.precision == "fp32" else torch.bfloat16

    @property
    def training_data(self) -> TrainingData:
        """Return the source as training data."""
        if isinstance(self.source, Corpus):
            return TextData(self.source)
        return ChatData(self.source) if isinstance(self.source, ChatDataset) else TaskData(self.source)

    @property
    def documents(self) -> dict[str, str]:
        """Return the text files that are saved with the model, by name, besides config and tokenizer."""
        return ({} if self.init_checkpoint is None else self.init_checkpoint.documents) | self.training_data.documents

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the result. Only a job with the same identity may continue a run."""
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
        """Return what changes where the learning rate was chosen at another width."""
        return transfer_over_width(self.config, self.settings.transfer_width, self.settings.optimizer)

    def build_model(self) -> Decoder:
        """Build the model as it is before the first step."""
        seed, width = self.settings.seed, self.settings.transfer_width
        if self.init_checkpoint is None:
            model = self.width_transfer.build_model(self.device, seed)
        elif width is not None:
            raise ConfigError(f"transfer_width {width}: scales fresh weights, and these are trained; leave it out")
        else:
            model = self.init_checkpoint.build_model(self.config, self.device)
        if self.settings.precision == "bf16-params":
            cast_parameters(model, torch.bfloat16)
        return model if self.lora is None else add_lora(model, self.lora.targets, self.lora.rank, seed=seed)

    def build_teacher(self, model: Decoder) -> Teacher | None:
        """Build the teacher of a model that `build_model` returned, and freeze what does not learn."""
        if self.distillation is None:
            return None
        tokenizer, compile_layers = self.training_data.tokenizer, self.settings.compile
        teacher = self.distillation.build_teacher(model, tokenizer, self.device, compile_layers)
        if teacher is not None:
            self.training_data.check(teacher.model)
        return teacher


def train(job: TrainingJob) -> TrainingResult:
    """Train, or continue the run in `job.out`. The result is bit-equal however often the run was interrupted.

    Raises CheckpointError if the folder holds another run or is in use, Diverged after too many skipped steps,
    MachineError if the folder cannot be written, and Interrupted, after saving, when a signal arrives.
    """
    settings, training_data = job.settings, job.training_data
    batch_at = training_data.train_batches(settings)
    model = job.build_model().train()
    training_data.check(model)
    if model.encoder_width is not None:
        raise ConfigError(
            "encoder_width: the design reads an encoder output, and this data has none; write a loop of your own with "
            "heddle.training.step"
        )
    teacher = job.build_teacher(model)
    scales = job.width_transfer.scales
    rounding = settings.stochastic_rounding
    optimizer = build_optimizer(model, settings.weight_decay, settings.optimizer, settings.lr_scale, scales, rounding)
    forward_model = float8_copy(model) if settings.fp8 else model
    with RunLock(job.out), catch_stop_signals() as stop_request:
        environment = {"memory": optimizer.memory(), **(job.environment or {})}
        open_run(job.out, job.identity(), {"data_report": training_data.report(), **environment})
        torch.manual_seed(settings.seed)
        log = RunLog(job.out)
        progress = resume_run(job.out, model, optimizer, log)
        forward_model = compiled(forward_model) if settings.compile else forward_model
        forward_model.checkpointing = settings.checkpoint_activations
        unread = 0 if torch.device(job.device).type in UNPINNED else _QUEUED_STEPS
        state = _LoopState(model, forward_model, teacher, optimizer, batch_at, progress, log, stop_request, unread)
        try:
            tokens_per_second = _train_steps(job, state)
        finally:
            log.close()
        final_tokens = job.evaluation.final_tokens or FINAL_EVALUATION_TOKENS
        scores = evaluate(model, job, final_tokens, stop_request, job.observer)
        if not math.isfinite(ratio_of_sums(scores)):
            raise Diverged(
                f"{job.out}: after {settings.steps} steps the loss on held-out text is not finite; "
                f"try a learning rate below {settings.learning_rate:g} in another folder"
            )
        return TrainingResult(model, scores, progress, tokens_per_second)


def evaluate(
    model: Decoder,
    job: TrainingJob,
    tokens: int = FINAL_EVALUATION_TOKENS,
    stop_request: StopRequest | None = None,
    observer: TokenObserver | None = None,
) -> Scores:
    """Evaluate a model on about `tokens` held-out tokens; the scores are those of each window or row.

    observer: receives the token losses of text. Raises Interrupted, between batches, when a stop is requested.
    """
    batches = _until_stopped(job.training_data.validation_batches(job.settings, tokens), stop_request)
    return job.training_data.evaluate(model, batches, job.autocast, observer)


def _until_stopped(batches: Iterable[Batch], stop_request: StopRequest | None) -> Iterator[Batch]:
    for batch in batches:
        if stop_request is not None and stop_request.signal_number is not None:
            sentence = "every step is done and saved; the same command evaluates it"
            raise Interrupted(stop_request.signal_number, sentence)
        yield batch


@dataclass
class _LoopState:
    model: Decoder
    forward_model: Decoder  # the model itself, or a compiled or float8 copy that shares its parameters
    teacher: Teacher | None
    optimizer: Optimizer
    batch_at: Callable[[int], Batch]
    progress: TrainingProgress
    log: RunLog
    stop_request: StopRequest
    max_queued: int  # steps that are queued before the first of them is read
    queued: deque[QueuedStep] = field(default_factory=deque)
    last_read: float = 0.0  # when the numbers of the step before were read


def _train_steps(job: TrainingJob, state: _LoopState) -> float:
    """Take all remaining steps and return the median tokens per second."""
    settings, progress = job.settings, state.progress
    seconds: list[float] = []
    loss, early_stop = SmoothedLoss(), EarlyStop.of_run(job.evaluation, job.out)
    total_tokens, tokens_done = (count * settings.tokens_per_step for count in (settings.steps, progress.step))

    def read_steps(unread: int) -> None:
        while len(state.queued) > unread:
            line = _read_step(job, state)
            seconds.append(line["seconds"])
            early_stop.add(line)
            state.log.write(line)
            rate = settings.tokens_per_step / statistics.median(seconds[-RATE_STEPS:])
            bar.advance(settings.tokens_per_step, loss.note(line) + peak_note(line), rate)
            _stop_if_diverged(job, state)

    ahead = state.model.embed.weight.device if state.max_queued else None
    with (
        display.progress_bar(job.label, total_tokens, "tokens", tokens_done) as bar,
        prepared_batches(state.batch_at, settings, ahead) as take,
    ):
        while progress.step < settings.steps and not early_stop.is_over:
            state.queued.append(_queue_step(job, state, take))
            must_save = settings.is_save_step(progress.step)
            read_steps(0 if must_save or settings.is_evaluation_step(progress.step) else state.max_queued)
            if state.stop_request.signal_number is not None:
                read_steps(0)
            finished = progress.step == settings.steps or early_stop.is_over
            if finished or must_save or state.stop_request.signal_number is not None:
                read_steps(0)
                state.log.sync()
                tokenizer, documents = job.training_data.tokenizer, job.documents
                save_run(job.out, state.model, state.optimizer, progress, tokenizer, documents, state.log.position)
            if state.stop_request.signal_number is not None and not finished:
                sentence = f"saved at step {progress.step}; the same command continues"
                raise Interrupted(state.stop_request.signal_number, sentence)
    return settings.tokens_per_step / statistics.median(seconds) if seconds else math.nan


def _queue_step(job: TrainingJob, state: _LoopState, take: Callable[[int], Batch | PreparedBatch]) -> QueuedStep:
    """Queue one step on the device. Nothing is read where the optimizer skips bad steps on the device."""
    settings, progress, started = job.settings, state.progress, time.perf_counter()
    batch, key = take(progress.step), (settings.seed, progress.step)
    batch_result = accumulate_gradients(
        state.forward_model, batch, key, settings.gradient_accumulation_steps, job.autocast, state.teacher
    )
    rate = scheduled_learning_rate(settings, progress.step)
    state.optimizer.key = key
    result = apply_gradients(state.model, state.optimizer, batch_result, rate, settings.max_gradient_norm)
    progress.step += 1
    host_batch = batch.batch if isinstance(batch, PreparedBatch) else batch
    return QueuedStep(progress.step, host_batch, result, rate, started)


def _read_step(job: TrainingJob, state: _LoopState) -> dict[str, Any]:
    """Read the numbers of the first step that is queued, and return its line of the log."""
    settings, progress, step = job.settings, state.progress, state.queued.popleft()
    numbers = step.result.read()
    progress.skipped_steps += numbers.skipped
    progress.consecutive_skips = progress.consecutive_skips + 1 if numbers.skipped else 0
    metrics = job.training_data.step_metrics(step.batch, numbers.loss)
    line = log_line(step, numbers, step.number * settings.tokens_per_step, metrics, state.last_read)
    line |= peak_memory(state.model.embed.weight.device)
    if settings.is_evaluation_step(step.number):
        scores = evaluate(state.model, job, job.evaluation.interim_tokens or INTERIM_EVALUATION_TOKENS)
        line[f"validation_{job.training_data.metric}"] = ratio_of_sums(scores)
    state.last_read = time.perf_counter()
    return finite(line)


def _stop_if_diverged(job: TrainingJob, state: _LoopState) -> None:
    progress, step = state.progress, state.progress.step - len(state.queued)
    if progress.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
        raise Diverged(
            f"{job.out}: {progress.consecutive_skips} steps in a row, up to step {step}, were skipped because "
            f"their loss or gradient was not finite; try a learning rate below {job.settings.learning_rate:g}"
        )
