"""The loop: batch → gradients → step → log, with saves that make a continued run equal an uninterrupted one."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from heddle import progress as display
from heddle.data.chat import Chat
from heddle.data.corpus import Corpus
from heddle.data.samples import Batch
from heddle.errors import ConfigError, MachineError
from heddle.model.compiled import compiled
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.lora import add_lora
from heddle.storage.lock import RunLock
from heddle.storage.run_log import Log, open_run
from heddle.training.checkpoint import Progress, resume_run, save_run
from heddle.training.datasets import Answers, Material, Measured, Source, Text, Turns
from heddle.training.evaluation.bits_per_byte import bits_per_byte
from heddle.training.init_checkpoint import Base, Lora
from heddle.training.optimizer import Optimizer, make_optimizer
from heddle.training.settings import Settings, learning_rate
from heddle.training.signals import Interrupted, Wish, listening
from heddle.training.step import BatchResult, apply, gradients

LONGEST_STREAK = 10
EVALUATED = 2**16  # validation tokens of the evaluation at the end
ON_THE_WAY = 2**14  # and of one on the way


class Diverged(MachineError):
    """Too many steps in a row had a loss or gradient that was not finite."""


@dataclass(frozen=True)
class Outcome:
    """A finished run: the model, what was measured of each held-out window or row, what happened on the way.

    windows: bits and bytes of a text, right answers and scored targets of a task.
    """

    model: Decoder
    windows: Measured
    progress: Progress
    tokens_per_second: float

    @property
    def bits_per_byte(self) -> float:
        """Of the whole validation text."""
        return bits_per_byte(self.windows)

    @property
    def accuracy(self) -> float:
        """Of a task: right answers over scored targets."""
        return bits_per_byte(self.windows)


@dataclass(frozen=True)
class Job:
    """What to train, on what, how, where to, and in which circumstances (for run.json)."""

    config: ModelConfig
    corpus: Corpus | Chat | Source
    settings: Settings
    out: Path
    device: str = "cpu"
    name: str = "training"  # of the progress bar
    circumstances: dict[str, Any] | None = None
    base: Base | None = None  # whose weights it starts from
    lora: Lora | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The narrow dtype of products, or None."""
        return torch.bfloat16 if self.settings.precision == "bf16" else None

    @property
    def material(self) -> Material:
        """What the loop asks of the text or the rows."""
        if isinstance(self.corpus, Corpus):
            return Text(self.corpus)
        return Turns(self.corpus) if isinstance(self.corpus, Chat) else Answers(self.corpus)

    @property
    def texts(self) -> dict[str, str]:
        """What is saved beside model and tokenizer, by file name."""
        return ({} if self.base is None else self.base.documents) | self.material.documents

    def identity(self) -> dict[str, Any]:
        """What decides the result: a run is continued only by a job that shares it."""
        data = self.material.identity()
        start = {
            "base": None if self.base is None else self.base.hash,
            "lora": None if self.lora is None else asdict(self.lora),
        }
        return {"design": self.config.dump(), "data": data, "settings": self.settings.identity(), **start}

    def start(self) -> Decoder:
        """The model before the first step."""
        seed = self.settings.seed
        if self.base is None:
            model = build(self.config, device=self.device, seed=seed)
        else:
            model = self.base.start(self.config, self.device)
        return model if self.lora is None else add_lora(model, self.lora.targets, self.lora.rank, seed=seed)


def train(job: Job) -> Outcome:
    """Train, or continue, the run in `job.out`; the same job ends bit-identical however often it was interrupted.

    Raises CheckpointError if the folder is another run's or in use, Diverged after too many bad steps,
    MachineError if it cannot be written, Interrupted after saving when a signal asked for it.
    """
    settings, material = job.settings, job.material
    batches = material.batches(settings)
    model = job.start().train()
    material.check(model)
    if model.memory_width is not None:
        raise ConfigError("memory: the design reads one, and these data come without; take the steps of training.step")
    optimizer = make_optimizer(model, settings.weight_decay, settings.optimizer, settings.lr_scale)
    with RunLock(job.out), listening() as wish:
        open_run(job.out, job.identity(), {"data_report": material.report(), **(job.circumstances or {})})
        torch.manual_seed(settings.seed)
        progress = resume_run(job.out, model, optimizer)
        runner = compiled(model) if settings.compile else model
        runner.checkpointing = settings.checkpoint_activations
        log = Log(job.out, progress.step)
        try:
            speed = _run(job, _Running(model, runner, optimizer, batches, progress, log, wish))
        finally:
            log.close()
        windows = evaluate(model, job, wish=wish)
        if not math.isfinite(bits_per_byte(windows)):
            raise Diverged(
                f"{job.out}: after {settings.steps} steps the loss on held-out text is not finite; "
                f"try a lower --lr than {settings.learning_rate:g} in another --out"
            )
        return Outcome(model, windows, progress, speed)


def evaluate(model: Decoder, job: Job, tokens: int = EVALUATED, wish: Wish | None = None) -> Measured:
    """What is measured on about `tokens` held-out tokens, by window of the text or row of the task.

    Raises Interrupted, between batches, when a `wish` to end is made.
    """
    chosen = job.material.held_out(job.settings, tokens)
    return job.material.measure(model, _while_welcome(chosen, wish), job.autocast)


def _while_welcome(windows: Iterable[Batch], wish: Wish | None) -> Iterator[Batch]:
    for window in windows:
        if wish is not None and wish.number is not None:
            display.say("every step is done and saved; the same command evaluates it")
            raise Interrupted(wish.number)
        yield window


@dataclass
class _Running:
    model: Decoder
    runner: Decoder  # the model, or its compiled twin
    optimizer: Optimizer
    batches: Callable[[int], Batch]
    progress: Progress
    log: Log
    wish: Wish


def _run(job: Job, run: _Running) -> float:
    """All remaining steps; returns the median tokens a second."""
    settings, progress = job.settings, run.progress
    speeds = []
    total, done = (count * settings.tokens_per_step for count in (settings.steps, progress.step))
    with display.bar(job.name, total, "tokens", done) as bar:
        while progress.step < settings.steps:
            line = _step(job, run)
            speeds.append(settings.tokens_per_step / line["seconds"])
            run.log.write(line)
            bar.advance(settings.tokens_per_step, _note(line))
            _watch(job, run)
            finished = progress.step == settings.steps
            due = settings.save_every is not None and progress.step % settings.save_every == 0
            if finished or due or run.wish.number is not None:
                run.log.keep()
                save_run(job.out, run.model, run.optimizer, progress, job.material.tokenizer, job.texts)
            if run.wish.number is not None and not finished:
                display.say(f"saved at step {progress.step}; the same command continues")
                raise Interrupted(run.wish.number)
    return sorted(speeds)[len(speeds) // 2] if speeds else math.nan


def _step(job: Job, run: _Running) -> dict[str, Any]:
    """Take one step; returns its line of the log, in which numbers that are not finite are null."""
    settings, progress = job.settings, run.progress
    began = time.perf_counter()
    batch = run.batches(progress.step)
    found = gradients(run.runner, batch, (settings.seed, progress.step), settings.accumulate, job.autocast)
    rate = learning_rate(settings, progress.step)
    result = apply(run.model, run.optimizer, found, rate, settings.clip)
    seconds = time.perf_counter() - began
    progress.step += 1
    progress.skipped += not result.taken
    progress.streak = 0 if result.taken else progress.streak + 1
    line: dict[str, Any] = {
        "step": progress.step,
        "tokens": progress.step * settings.tokens_per_step,
        "loss": result.loss,
        **job.material.told(batch, result.loss),
        **_experts(found),
        "gradient_norm": result.norm,
        "learning_rate": rate,
        "taken": result.taken,
        "seconds": round(seconds, 6),
    }
    every = settings.evaluate_every
    if every is not None and (progress.step % every == 0 or progress.step == settings.steps):
        line[f"validation_{job.material.score}"] = bits_per_byte(evaluate(run.model, job, ON_THE_WAY))
    return {key: value if _says_something(value) else None for key, value in line.items()}


def _experts(found: BatchResult) -> dict[str, Any]:
    """What the log says of mixtures of experts; nothing for a design without."""
    if not found.mixtures:
        return {}
    told = {path: tally.told() for path, tally in found.mixtures.items()}
    return {"penalty": float(found.penalty), "experts": told}


def _says_something(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _note(line: dict[str, Any]) -> str:
    if line["loss"] is None:
        return f"step {line['step']} not taken: its loss is not finite"
    bits = line.get("bits_per_byte")
    return f"{line['loss']:.3f} nats an answer" if bits is None else f"{bits:.3f} bits per byte"


def _watch(job: Job, run: _Running) -> None:
    progress = run.progress
    if progress.streak >= LONGEST_STREAK:
        raise Diverged(
            f"{job.out}: {progress.streak} steps in a row, up to step {progress.step}, had a loss or gradient that was "
            f"not finite, and were not taken; try a lower --lr than {job.settings.learning_rate:g}"
        )
