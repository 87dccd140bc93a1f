"""The training loop: batch, gradients, update, log, checkpoint.

A resumed run is bit-equal to an uninterrupted one on a CPU, and on CUDA if the process asked torch for deterministic
algorithms (`heddle.runtime`). On an accelerator the host queues a step before it reads the results of the previous one.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from heddle import progress as display
from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks
from heddle.errors import MachineError
from heddle.model.decoder import Decoder
from heddle.numerics.transfer import UNPINNED
from heddle.progress import format_amount
from heddle.signals import Interrupted, StopRequest, catch_stop_signals
from heddle.storage.file_io import write_json_file
from heddle.storage.lock import RunLock
from heddle.storage.run_log import FINAL_FILE, RATE_STEPS, REMEDY, RunLog, SmoothedLoss, open_run, read_log, step_speed
from heddle.training.built_models import BuiltModels, build_models
from heddle.training.checkpoint import CheckpointSaver, TrainingProgress, resume_run, save_run
from heddle.training.evaluation.scores import EarlyStop, Scores, TokenObserver, ratio_of_sums, scores_on_ranks
from heddle.training.job import TrainingJob, peak_process_memory
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.settings import Settings, scheduled_learning_rate
from heddle.training.step import (
    BatchResult,
    PreparedBatch,
    StepNumbers,
    StepResult,
    accumulate_gradients,
    apply_gradients,
    first_non_finite,
    prepare_batch,
)
from heddle.training.trackers import open_trackers

# A step that is queued on a device, and its log line once its results are read.


class QueuedStep(NamedTuple):
    """number: the step, from 1. start_time: when the host began to queue it, in time.perf_counter() seconds."""

    number: int
    batch: Batch
    result: StepResult
    learning_rate: float
    start_time: float


def log_line(
    step: QueuedStep, numbers: StepNumbers, tokens: int, metrics: dict[str, float], previous_end: float
) -> dict[str, Any]:
    """Return a step's log line. metrics: of its data.

    previous_end: when the results of the previous step were read, in time.perf_counter() seconds. A step that was
    queued earlier counts its seconds from then on.
    """
    return {
        "step": step.number,
        "tokens": tokens,
        "loss": numbers.loss,
        **metrics,
        **numbers.distillation,
        **({"aux_loss": numbers.aux_loss} if numbers.experts or numbers.aux_loss else {}),
        **({"experts": numbers.experts} if numbers.experts else {}),
        **{f"multi_token_loss_{depth}": loss for depth, loss in enumerate(numbers.multi_token, start=1)},
        **({} if numbers.logits is None else numbers.logits._asdict()),
        "gradient_norm": numbers.gradient_norm,
        "learning_rate": step.learning_rate,
        "skipped": numbers.skipped,
        "seconds": round(time.perf_counter() - max(step.start_time, previous_end), 6),
    }


def finite(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with None for non-finite numbers, which JSON cannot express."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in line.items()}


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return `peak_memory_bytes` so far: of tensors on a CUDA device, of the whole process on a CPU; else nothing."""
    if device.type == "cuda":
        return {"peak_memory_bytes": torch.cuda.max_memory_allocated(device)}
    return {"peak_memory_bytes": peak_process_memory()} if device.type == "cpu" else {}


def peak_note(line: dict[str, Any]) -> str:
    """Return the text about memory beside the progress bar."""
    peak = line.get("peak_memory_bytes")
    return "" if peak is None else f", {format_amount(peak, 'bytes')} at most"


# After a loss spike, a run returns to its last checkpoint and skips the batches since then.
#
# Chowdhery et al. (2022, PaLM, section 5.1) restarted about 100 steps before a spike and skipped 200 to 500 batches.


WINDOW = 128  # previous losses that a loss is compared with
MIN_LOSSES = 16  # with fewer previous losses, no loss is a spike
MIN_SPREAD = 0.01  # of the median: otherwise any loss would be a spike after nearly equal losses
MAX_REWINDS = 3  # in a row to one checkpoint
NORMAL_SPREAD = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation


class SpikeGuard:
    """Finds spikes: losses above median + deviations · 1.4826 · median absolute deviation of the previous losses.

    deviations: None disables it. first_checkpoint: no step up to it is a spike, as there is no checkpoint to return to.
    """

    def __init__(self, deviations: float | None, first_checkpoint: int = 0) -> None:
        self.deviations, self.first_checkpoint = deviations, first_checkpoint
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.rewinds = self.rewind_step = 0  # how often in a row the run went back to this step

    @classmethod
    def of_run(cls, settings: Settings, run: Path) -> "SpikeGuard":
        """Restore the guard from a run's log: a resumed run finds the same spikes as an uninterrupted one."""
        guard = cls(settings.spike_guard, settings.save_every or 0)
        guard.read(run)
        return guard

    def read(self, run: Path) -> None:
        """Replace the losses by those in a run's log."""
        self.losses.clear()
        for line in read_log(run) if self.deviations is not None else []:
            self.is_spike(line)

    def is_spike(self, line: Mapping[str, Any]) -> bool:
        """Return whether the loss in a log line is a spike; any other finite loss is remembered."""
        if self.deviations is None or line["loss"] is None or line["skipped"]:
            return False
        can_be_spike = line["step"] > self.first_checkpoint and len(self.losses) >= MIN_LOSSES
        if can_be_spike and line["loss"] > self.limit:
            return True
        self.losses.append(line["loss"])
        return False

    @property
    def limit(self) -> float:
        """Return the largest loss that is not a spike."""
        assert self.deviations is not None
        median = statistics.median(self.losses)
        spread = NORMAL_SPREAD * statistics.median(abs(loss - median) for loss in self.losses)
        return median + self.deviations * max(spread, MIN_SPREAD * abs(median))

    def count_rewind(self, run: Path, step: int) -> None:
        """Count a return to the checkpoint of a step. Raises MachineError after too many in a row."""
        self.rewinds = self.rewinds + 1 if step == self.rewind_step else 1
        self.rewind_step = step
        if self.rewinds > MAX_REWINDS:
            raise MachineError(
                f"{run}: the loss spiked again after each of {MAX_REWINDS} returns to step {step}; try a lower "
                "learning rate in another folder"
            )


# A thread prepares the next step's data while this step runs.


Value = TypeVar("Value")


class Prefetcher(Generic[Value]):
    """Calls `build` for the next step on a thread, one step ahead of `take`.

    steps: how many steps there are. An error of `build` is raised by the `take` of its step. At the end of the block
    the thread finishes its current build, whose item is dropped, and ends.
    """

    def __init__(self, build: Callable[[int], Value], steps: int) -> None:
        self._build, self._steps = build, steps
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="heddle-batches")
        self._ahead: tuple[int, Future[Value]] | None = None

    def take(self, step: int) -> Value:
        """Return the item of a step, and start to build the next step's. Steps may come in any order."""
        ahead = self._ahead
        future = ahead[1] if ahead is not None and ahead[0] == step else self._submit(step)
        self._ahead = (step + 1, self._submit(step + 1)) if step + 1 < self._steps else None
        return future.result()

    def _submit(self, step: int) -> Future[Value]:
        return self._executor.submit(copy_context().run, self._build, step)

    def __enter__(self) -> "Prefetcher[Value]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def prepared_batches(
    batch_at: Callable[[int], Batch], settings: Settings, device: torch.device, ranks: Ranks, ahead: bool
) -> Iterator[Callable[[int], PreparedBatch]]:
    """Yield a function from a step to its batch, with this rank's rows on the device.

    ahead: a thread builds the next batch while a step runs, and copies it through pinned memory.
    """

    def prepare(step: int) -> PreparedBatch:
        return prepare_batch(batch_at(step), device, settings.gradient_accumulation_steps, ranks)

    if not ahead:
        yield prepare
        return
    with Prefetcher(prepare, settings.steps) as prefetcher:
        yield prefetcher.take


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    scores: of the final evaluation, (bits, bytes) of each window of text or (correct answers, scored targets) of each
    row of a task. tokens_per_second: of the median step, without evaluations and checkpoints.
    """

    model: Decoder
    scores: Scores
    progress: TrainingProgress
    tokens_per_second: float

    @property
    def bits_per_byte(self) -> float:
        """Return the bits per byte of the held-out text. Only for text and chats."""
        return ratio_of_sums(self.scores)

    @property
    def task_accuracy(self) -> float:
        """Return the fraction of a task's held-out targets that the model predicts correctly. Only for tasks."""
        return ratio_of_sums(self.scores)


MAX_CONSECUTIVE_SKIPS = 10
FINAL_EVALUATION_TOKENS = 2**16  # held-out tokens of the evaluation at the end
INTERIM_EVALUATION_TOKENS = 2**14  # and of an evaluation during training
_QUEUED_STEPS = 1  # on an accelerator: a step is queued before the previous one is read


class Diverged(MachineError):
    """Too many consecutive steps had a non-finite loss or gradient."""


def train(job: TrainingJob) -> TrainingResult:
    """Train, or continue the run in `job.out`. The result is bit-equal however often the run was interrupted.

    Every rank calls it; rank 0 locks the folder and writes the log, and the resulting model is sharded. Raises
    CheckpointError if the folder holds another run or is in use, Diverged after too many skipped steps, MachineError if
    the folder cannot be written, and Interrupted, after saving, when a signal arrives at any rank.
    """
    settings, training_data = job.settings, job.training_data
    batch_at = training_data.train_batches(settings)
    models = build_models(job)
    scales, rounding = job.width_transfer.scales, settings.stochastic_rounding
    optimizer = build_optimizer(
        models.model, settings.weight_decay, settings.optimizer, settings.lr_scale, scales, rounding
    )
    if settings.qk_clip is not None:
        optimizer.check_logits(models.model, settings.qk_clip)
    with ExitStack() as stack:
        if job.ranks.is_first:
            stack.enter_context(RunLock(job.out))
        stop_request = stack.enter_context(catch_stop_signals())
        if job.ranks.is_first:
            environment = {"memory": optimizer.memory(), **(job.environment or {})}
            open_run(job.out, job.identity(), {"data_report": training_data.report(), **environment})
        job.ranks.wait()  # the folder is this run's
        torch.manual_seed(settings.seed)
        log = RunLog(job.out)
        progress = resume_run(job.out, models.model, optimizer, log, job.ranks, settings.steps)
        job.ranks.wait()  # the log has no later lines
        unread = 0 if torch.device(job.device).type in UNPINNED else _QUEUED_STEPS
        guard = SpikeGuard.of_run(settings, job.out)
        saver = stack.enter_context(CheckpointSaver(job.out, job.ranks, job.is_save_async))
        track = stack.enter_context(open_trackers(job, progress.step + 1))
        state = _LoopState(models, optimizer, batch_at, progress, log, stop_request, unread, guard, saver, track)
        try:
            tokens_per_second = _train_steps(job, state)
        finally:
            log.close()
        final_tokens = job.evaluation.final_tokens or FINAL_EVALUATION_TOKENS
        scores = evaluate(models.model, job, final_tokens, stop_request, job.observer)
        if not math.isfinite(ratio_of_sums(scores)):
            raise Diverged(
                f"{job.out}: the loss on held-out text is not finite after {settings.steps} steps; "
                f"try a learning rate below {settings.learning_rate:g} in another folder"
            )
        final = {"step": state.progress.step, f"final_{training_data.metric}": ratio_of_sums(scores)}
        track(final)
        if job.ranks.is_first:
            write_json_file(job.out / FINAL_FILE, final, REMEDY)
        return TrainingResult(models.model, scores, state.progress, tokens_per_second)


def evaluate(
    model: Decoder,
    job: TrainingJob,
    tokens: int = FINAL_EVALUATION_TOKENS,
    stop_request: StopRequest | None = None,
    observer: TokenObserver | None = None,
) -> Scores:
    """Evaluate a model on about `tokens` held-out tokens; return the scores of each window or row.

    Every rank calls it, evaluates a part of the batches, and returns all scores, equal to one process's.
    observer: receives the token losses of text. Raises Interrupted, between batches, when a stop is requested.
    """
    held_out = list(job.training_data.validation_batches(job.settings, tokens))
    batches = _until_stopped(held_out, stop_request, job.ranks)
    if job.ranks.count == 1:
        with display.progress_bar("evaluating", sum(batch.targets.size for batch in held_out), "tokens") as bar:
            return job.training_data.evaluate(model, _counted(batches, bar), job.autocast, observer)

    def evaluate_part(part: Sequence[Batch], own_observer: TokenObserver | None) -> Scores:
        return job.training_data.evaluate(model, part, job.autocast, own_observer)

    return scores_on_ranks(model, batches, evaluate_part, job.ranks, observer)


def _until_stopped(batches: Iterable[Batch], stop_request: StopRequest | None, ranks: Ranks) -> Iterator[Batch]:
    for batch in batches:
        signal_number = 0 if stop_request is None else ranks.largest(stop_request.signal_number or 0)
        if signal_number:
            raise Interrupted(signal_number, "every step is done and saved; the same command evaluates it")
        yield batch


def _counted(batches: Iterable[Batch], bar: display.ProgressBar) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        bar.advance(batch.targets.size)


@dataclass
class _LoopState:
    models: BuiltModels
    optimizer: Optimizer
    batch_at: Callable[[int], Batch]
    progress: TrainingProgress
    log: RunLog
    stop_request: StopRequest
    max_queued: int  # steps that are queued before the first of them is read
    guard: SpikeGuard
    saver: CheckpointSaver
    track: Callable[[dict[str, Any]], None]  # sends a line of the log to the job's trackers
    queued: deque[QueuedStep] = field(default_factory=deque)
    last_read: float = 0.0  # when the results of the previous step were read
    saved_step: int = 0  # of the last checkpoint
    saved_at: float = field(default_factory=time.monotonic)
    origin: str | None = None  # of non-finite numbers, once they end training

    def __post_init__(self) -> None:
        self.saved_step = self.progress.step

    @property
    def device(self) -> torch.device:
        return self.models.model.embed.weight.device


def _train_steps(job: TrainingJob, state: _LoopState) -> float:
    """Take all remaining steps and return the median tokens per second."""
    settings = job.settings
    seconds: list[float] = []
    loss, early_stop, first_step = SmoothedLoss(), EarlyStop.of_run(job.evaluation, job.out), state.progress.step
    total_tokens, tokens_done = (count * settings.tokens_per_step for count in (settings.steps, first_step))

    def read_steps(unread: int) -> None:
        nonlocal early_stop
        while len(state.queued) > unread:
            step = state.queued.popleft()
            line = _read_step(job, state, step)
            seconds.append(line["seconds"])
            if state.guard.is_spike(line):
                bar.advance((state.saved_step - step.number + 1) * settings.tokens_per_step)
                _rewind(job, state, line)
                early_stop = EarlyStop.of_run(job.evaluation, job.out)
                return
            early_stop.add(line)
            if job.ranks.is_first:
                state.log.write(line)
                state.track(line)
            rate = step_speed(settings.tokens_per_step, seconds, RATE_STEPS)
            bar.advance(settings.tokens_per_step, loss.note(line) + peak_note(line), rate)
            _stop_if_diverged(job, state, step)

    with (
        display.progress_bar(job.label, total_tokens, "tokens", tokens_done) as bar,
        prepared_batches(state.batch_at, settings, state.device, job.ranks, bool(state.max_queued)) as take,
    ):
        while state.progress.step < settings.steps and not early_stop.is_over:
            state.queued.append(_queue_step(job, state, take))
            step = state.progress.step
            state.saver.check()
            if step == first_step + 1:  # only the first step may wait for compilation
                job.ranks.limit_waits()
            must_save = _must_save(job, state)
            read_steps(0 if must_save or settings.is_evaluation_step(step) else state.max_queued)
            signal_number = job.ranks.largest(state.stop_request.signal_number or 0)
            if signal_number or early_stop.is_over:
                read_steps(0)
            finished = state.progress.step == settings.steps or early_stop.is_over
            # A spike returns to the last checkpoint, which must not depend on when signals arrived.
            saves_on_signal = signal_number and settings.spike_guard is None
            if finished or saves_on_signal or (must_save and state.progress.step == step):
                _save(job, state)
            if finished or signal_number:
                state.saver.wait()
            if signal_number and not finished:
                raise Interrupted(signal_number, f"saved at step {state.saved_step}; the same command continues")
    return step_speed(settings.tokens_per_step, seconds) if seconds else math.nan


def _must_save(job: TrainingJob, state: _LoopState) -> bool:
    """Whether a checkpoint is due after the newest step: by the clock only if neither ranks nor spikes depend on it."""
    settings, step = job.settings, state.progress.step
    if step == settings.steps or job.ranks.count > 1 or settings.spike_guard is not None:
        return settings.is_save_step(step)
    return settings.is_save_step(step) and time.monotonic() - state.saved_at >= job.save_seconds


def _queue_step(job: TrainingJob, state: _LoopState, take: Callable[[int], PreparedBatch]) -> QueuedStep:
    """Queue one step on the device. The host reads nothing if the optimizer skips bad steps on the device."""
    settings, progress, started = job.settings, state.progress, time.perf_counter()
    batch, key = take(progress.step + progress.skipped_batches), (settings.seed, progress.step)
    model, forward_model, teacher = state.models
    batch_result = accumulate_gradients(
        forward_model,
        batch,
        key,
        settings.gradient_accumulation_steps,
        job.autocast,
        teacher,
        settings.qk_clip is not None,
    )
    rate = scheduled_learning_rate(settings, progress.step)
    state.optimizer.key = key
    result = apply_gradients(model, state.optimizer, batch_result, rate, settings.max_gradient_norm, settings.qk_clip)
    progress.step += 1
    return QueuedStep(progress.step, batch.batch, result, rate, started)


def _read_step(job: TrainingJob, state: _LoopState, step: QueuedStep) -> dict[str, Any]:
    """Read the results of a step, and return its log line."""
    settings, progress, numbers = job.settings, state.progress, step.result.read()
    progress.skipped_steps += numbers.skipped
    progress.consecutive_skips = progress.consecutive_skips + 1 if numbers.skipped else 0
    metrics = job.training_data.step_metrics(step.batch, numbers.loss)
    line = log_line(step, numbers, step.number * settings.tokens_per_step, metrics, state.last_read)
    line |= peak_memory(state.device)
    if progress.skipped_batches:
        line["skipped_batches"] = progress.skipped_batches
    if settings.is_evaluation_step(step.number):
        scores = evaluate(state.models.model, job, job.evaluation.interim_tokens or INTERIM_EVALUATION_TOKENS)
        line[f"validation_{job.training_data.metric}"] = ratio_of_sums(scores)
    if progress.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
        line["first_non_finite"] = state.origin = _origin(job, state, step)
    state.last_read = time.perf_counter()
    return finite(line)


def _save(job: TrainingJob, state: _LoopState) -> None:
    if job.ranks.is_first:
        state.log.sync()
    tokenizer = job.training_data.tokenizer
    documents = job.documents | ({} if tokenizer is None else tokenizer.to_files())
    model, log = state.models.model, state.log.position
    save_run(state.saver, model, state.optimizer, state.progress, documents, log)
    state.saved_step, state.saved_at = state.progress.step, time.monotonic()


def _rewind(job: TrainingJob, state: _LoopState, line: dict[str, Any]) -> None:
    """Return to the last checkpoint after a loss spike, and skip the batches since then."""
    first_batch = line["step"] + state.progress.skipped_batches
    state.guard.count_rewind(job.out, state.saved_step)
    display.print_warning(
        f"{job.out}: the loss of step {line['step']} spiked to {line['loss']:.4g}, above the limit of "
        f"{state.guard.limit:.4g}; returning to step {state.saved_step} and skipping the batches since then"
    )
    state.queued.clear()
    state.saver.wait()
    state.log.close()
    state.progress = resume_run(job.out, state.models.model, state.optimizer, state.log, job.ranks, job.settings.steps)
    state.progress.skipped_batches = first_batch - state.progress.step
    state.guard.read(job.out)


def _origin(job: TrainingJob, state: _LoopState, step: QueuedStep) -> str | None:
    """Say where a skipped step has its first non-finite number, by running it again with checks."""
    settings, (model, _, teacher) = job.settings, state.models
    batch = prepare_batch(step.batch, state.device, settings.gradient_accumulation_steps, job.ranks)

    def compute_gradients() -> BatchResult:
        return accumulate_gradients(model, batch, (settings.seed, step.number - 1), 1, job.autocast, teacher)

    origin = first_non_finite(model, state.optimizer, compute_gradients if job.ranks.count == 1 else None)
    return job.ranks.first_text(origin)  # each rank has checked only its own rows


def _stop_if_diverged(job: TrainingJob, state: _LoopState, step: QueuedStep) -> None:
    skips = state.progress.consecutive_skips
    if skips >= MAX_CONSECUTIVE_SKIPS:
        raise Diverged(
            f"{job.out}: {skips} steps in a row, up to step {step.number}, were skipped because of non-finite numbers"
            f"{'' if state.origin is None else f' ({state.origin})'}; "
            f"try a learning rate below {job.settings.learning_rate:g}"
        )
