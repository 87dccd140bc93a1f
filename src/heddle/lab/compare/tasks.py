"""The tasks of a comparison, as requests to worker processes: calibrate, train, measure speed and recall."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.corpus import Corpus
from heddle.distributed.ranks import Ranks
from heddle.errors import ConfigError, MachineError
from heddle.lab.compare.plan import ComparisonPlan, DesignEntry
from heddle.lab.compare.probes import Samples, TaskChoice, choose_tasks, plan_evaluations
from heddle.lab.compare.results import ProbeResult, Run, parse
from heddle.lab.workers import Task, Workers, default_workers, run_tasks
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import flops_per_token
from heddle.runtime import Runtime
from heddle.settings import shared
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.evaluation.length_extrapolation import ExtrapolationPlan
from heddle.training.loop import FINAL_EVALUATION_TOKENS
from heddle.training.settings import Settings

SPEED_ROUNDS = 2
CHECKPOINTS_PER_RUN = 4
NO_EXTRAPOLATION = ExtrapolationPlan(sequence_length=1)
PHASES = ("train", "prefill", "decode", "read")


@dataclass(frozen=True)
class Comparison:
    """A running comparison: the plan, its text, its folder, the machine, and the command for the report.

    corpus: None until it is prepared. extrapolation: validation text that each trained model reads at several
    lengths. text_recall_rows: needles that each of them reads in held-out text. final_tokens: held-out tokens that
    score each of them.
    """

    plan: ComparisonPlan
    corpus: Corpus | None
    out: Path
    runtime: Runtime
    workers: Workers
    command: str
    extrapolation: ExtrapolationPlan = NO_EXTRAPOLATION
    text_recall_rows: int = 0
    final_tokens: int = FINAL_EVALUATION_TOKENS

    def config(self, entry: DesignEntry) -> ModelConfig:
        """The design with the shared vocabulary."""
        if entry.config.vocab_size is not None:
            return entry.config
        return entry.config.replace(vocab_size=self.vocab_size)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size; until the text is prepared, the requested one, which a small text may not reach."""
        if self.corpus is not None:
            return self.corpus.tokenizer.vocab_size
        if self.plan.tokenizer is not None:
            return Tokenizer.load(Path(self.plan.tokenizer)).vocab_size
        return self.plan.vocab_size or DEFAULT_VOCAB_SIZE

    def settings(self, seed: int, steps: int) -> Settings:
        """The training settings of one run."""
        plan = self.plan
        return Settings(
            **shared(plan, Settings),
            steps=steps,
            seed=seed,
            save_every=max(1, steps // CHECKPOINTS_PER_RUN),
            evaluate_every=plan_evaluations(steps, plan.tokens_per_step).interval,
        )

    @property
    def text(self) -> Corpus:
        """The prepared text."""
        assert self.corpus is not None
        return self.corpus


def choose_workers(
    plan: ComparisonPlan,
    runtime: Runtime,
    *,
    count: int | None = None,
    devices: tuple[str, ...] = (),
    share: tuple[int, int] | None = None,
    ranks: int = 1,
) -> Workers:
    """Where a plan's tasks run: on `devices`, each process with the plan's threads; or `count` at a time on one device.

    With count None several workers of few threads run, which is faster; but a budget in seconds assumes that a run has
    the machine to itself, as does a run on several `ranks`. Raises ConfigError for a batch that ranks cannot share.
    """
    Ranks(count=ranks).rows(plan.batch_size, 1)  # which must be equal for each rank
    if not devices:
        is_alone = plan.threads is not None or plan.budget_kind == "seconds" or ranks > 1
        count = 1 if count is None and is_alone else count
        workers = default_workers(runtime.device, runtime.threads, None if count is None else count * ranks)
    else:
        workers = replace(default_workers(runtime.device, runtime.threads, len(devices)), devices=devices)
    if plan.threads is not None and (devices or workers.count == ranks):
        workers = replace(workers, threads=plan.threads)
    return replace(workers, share=share, ranks=ranks)


def training_steps(comparison: Comparison, entry: DesignEntry) -> int:
    """Optimizer steps that the budget allows a design. Raises ConfigError where it allows none."""
    plan = comparison.plan
    if plan.budget_kind == "tokens":
        steps = plan.token_steps
    elif plan.budget_kind == "flops":
        model = build(comparison.config(entry), device="meta")
        # a backward pass costs twice a forward pass
        flops = 3 * flops_per_token(model, plan.sequence_length, training=True)
        steps = int(plan.budget_value / (flops * plan.tokens_per_step))
    else:
        steps = int(plan.budget_value / seconds_per_step(comparison, entry, "a budget in tokens needs no timing"))
    if steps < 1:
        raise ConfigError(
            f"{plan.budget_kind} {plan.budget_value:g}: is less than one step of {plan.tokens_per_step} tokens for "
            f"{entry.name}; give more"
        )
    return steps


def seconds_per_step(comparison: Comparison, entry: DesignEntry, remedy: str) -> float:
    """The time of a training step with nothing else running. Raises MachineError with the remedy if it has none."""
    [result] = run_tasks([calibration_task(comparison, entry)], comparison.workers.first())
    if result["status"] != "done":
        raise MachineError(f"{result['message']}; {remedy}")
    return float(result["seconds_per_step"])


def result_file(out: Path, name: str, task: str) -> Path:
    """The file of a task's result. name: of the design. task: seed0, speed-1 or recall-mqar, say."""
    return out / "runs" / f"{name}-{task}.json"


def is_unfinished(comparison: Comparison, name: str, task: str) -> bool:
    """Whether a task of a design has no result."""
    return not result_file(comparison.out, name, task).is_file()


def calibration_task(comparison: Comparison, entry: DesignEntry) -> Task:
    """The timing of a few steps on random tokens."""
    return _task(comparison, entry, "calibrate", "calibrate", "timing a step", steps=1)


def training_task(comparison: Comparison, entry: DesignEntry, seed: int, steps: int) -> Task:
    """One training run."""
    return _task(comparison, entry, f"seed{seed}", "train", f"seed {seed}", seed=seed, steps=steps)


def speed_task(comparison: Comparison, entry: DesignEntry, number: int) -> Task:
    """One round of the speed measurements of a design. Nothing else may run at the same time."""
    return _task(comparison, entry, f"speed-{number}", "speed", f"measuring speed, round {number}")


def choose_recall_tasks(comparison: Comparison, steps: Mapping[str, int]) -> list[TaskChoice]:
    """Which recall tasks are trained, for which designs. steps: training steps by design."""
    plan, configs = comparison.plan, {entry.name: comparison.config(entry) for entry in comparison.plan.entries}
    tokens = min(steps.values()) * plan.tokens_per_step * len(plan.seeds)
    return choose_tasks(configs, plan.recall_probes, tokens)


def recall_task(comparison: Comparison, entry: DesignEntry, probe: str) -> Task:
    """A recall probe; it may be impossible for one design only, for example if its positions are too few."""
    name = f"recall-{probe}"
    return _task(comparison, entry, name, "recall", f"recall {probe}", probe=probe, is_optional=True)


def run_result(seed: int, result: Mapping[str, Any]) -> Run:
    """The result of a training for the report; its numbers are None if it diverged or failed."""
    if result["status"] == "done":
        return parse(Run, result)
    progress.print_status(f"warning: {result['message']}")
    return Run(seed=seed, status=result["status"], message=result["message"], bits_per_byte=None)


def speed_result(result: Mapping[str, Any]) -> dict[str, Samples]:
    """The samples of one round; empty if measuring failed."""
    if result["status"] == "done":
        return {phase: result.get(phase, []) for phase in PHASES}  # older ones have no "read"
    progress.print_status(f"warning: {result['message']}")
    return {phase: [] for phase in PHASES}


def recall_result(result: Mapping[str, Any]) -> ProbeResult:
    """The result of a probe; if it failed, its numbers are None, and it has a message."""
    if result["status"] != "done":
        progress.print_status(f"warning: {result['message']}")
    return parse(ProbeResult, result)


def _task(comparison: Comparison, entry: DesignEntry, name: str, kind: str, description: str, **choices: Any) -> Task:
    """A task of one design. choices: its seed, steps and probe, and whether it is optional."""
    plan, is_optional = comparison.plan, choices.pop("is_optional", False)
    seed, steps = choices.pop("seed", 0), choices.pop("steps", 1)
    file = result_file(comparison.out, entry.name, name)
    threads = plan.threads if kind in ("calibrate", "speed") else comparison.workers.threads
    request = {
        "task": kind,
        "probe": choices.pop("probe", ""),
        "out": str(file.with_suffix("")),
        "design": comparison.config(entry).dump(),
        "data": plan.data,
        "tokenizer": plan.tokenizer,
        "vocab_size": plan.vocab_size,
        "max_train_tokens": int(plan.budget_value) if plan.budget_kind == "tokens" else None,
        "settings": asdict(comparison.settings(seed, steps)),
        "tf32": plan.tf32,
        "deterministic": plan.deterministic,
        "threads": threads,
        "choices": comparison.runtime.choices_of_worker(threads),
        "part_files": plan.part_files,
        "speed_contexts": plan.speed_contexts,
        "extrapolation": asdict(comparison.extrapolation),
        "text_recall_rows": comparison.text_recall_rows,
        "final_tokens": comparison.final_tokens,
        "command": comparison.command,
        "trackers": plan.trackers,
    }
    return Task(f"{entry.name}, {description}", file, request, is_optional)
