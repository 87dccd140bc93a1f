"""Estimate from timed steps how long a comparison takes, and fit it to a time budget.

The budget covers the whole command: preparing the text, tuning, training, speed and recall. Explicit settings are never
changed; the others are chosen: tokens first, then fewer seeds. No run continues past the end of the budget.
"""

import math
import tempfile
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import torch

from heddle import __version__
from heddle.data.cache import DataCache
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.lab.compare.plan import ComparisonPlan, DesignEntry, planned_trials
from heddle.lab.compare.probes import AUTO, RECALL_PROBES, TaskChoice, final_tokens
from heddle.lab.compare.tasks import (
    SPEED_ROUNDS,
    Comparison,
    calibration_task,
    choose_recall_tasks,
    is_unfinished,
    training_steps,
)
from heddle.lab.workers import describe_workers, run_tasks
from heddle.model.config import ModelConfig
from heddle.model.decoder import build
from heddle.model.size import flops_per_token, size
from heddle.progress import format_duration, parse_duration, print_status
from heddle.runtime import hardware
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.run_log import to_plain_json

MIN_STEPS = 64  # of a run whose length the budget chose: a shorter one is mostly warmup and decay
MIN_SEEDS = 2  # one seed has no interval
TOKENS_PER_PARAMETER = 20  # a budget never chooses more
TRAINED_SHARE = 0.9  # of the training time that the estimate may fill
EVALUATED_SHARE = 0.12  # of a run's steps: the time of evaluations during training and on longer sequences
OTHER_EVALUATED_TOKENS = 2**15  # at the end of a run: longer sequences, recall in text, and its sample
END_SHARE, MIN_END_SECONDS = 0.02, 6.0  # reserved for starting the command and writing the last report
TEXT_SHARE, MAX_TEXT_SECONDS = 0.06, 60.0  # reserved for preparing the text
SPEED_SHARE, RECALL_SHARE = 0.15, 0.2  # at most, where a budget chooses them
LATE_SPEED_SHARE = 0.05  # at most, where trainings took longer than planned
SLOW_SPEED = 1.5  # how much longer a round of speed measurements may take than planned
DECODE_SECONDS = 0.5  # for decoding at one context length
KERNEL_SHARE = 0.1  # at most, for building and measuring kernels, once per machine
KEPT_SECONDS = 600.0  # for which step times hold: the load of a machine changes
UNTIMED_FLOPS = 2e12  # training below this takes seconds, and is not worth timing


@dataclass(frozen=True)
class StepTime:
    """Seconds of a training step while every worker is busy. start: seconds of a task besides its steps.

    flops: of a step.
    """

    step: float
    start: float
    flops: float

    def forward(self, flops: float) -> float:
        """Seconds of a forward pass with this many FLOPs."""
        return flops * self.step / self.flops


@dataclass(frozen=True)
class Estimate:
    """Seconds of what has no result yet, by its part of a comparison; preparing the text is not included.

    step: (lowest, highest) seconds of a training step.
    """

    step: tuple[float, float]
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class TimeBudget:
    """Time for the whole command. seconds: its length. started: its start, in time.monotonic() seconds."""

    seconds: float
    started: float

    @property
    def end(self) -> float:
        """When the last task must end, in time.monotonic() seconds."""
        return self.started + self.seconds - end_seconds(self.seconds)

    @property
    def remaining(self) -> float:
        """Seconds until `end`."""
        return self.end - time.monotonic()


@dataclass(frozen=True)
class TimePlan:
    """When the parts of a comparison must end, in time.monotonic() seconds; infinite without a budget.

    times: step times by design.
    """

    budget: TimeBudget | None = None
    times: Mapping[str, StepTime] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """When everything but the last report must end."""
        return math.inf if self.budget is None else self.budget.end

    @property
    def ended(self) -> str:
        """The start of a sentence on what the budget cut short."""
        return "" if self.budget is None else f"The budget of {format_duration(self.budget.seconds)} ended"

    def training_end(self, comparison: Comparison, choices: Sequence[TaskChoice]) -> float:
        """When training must end. Planned seeds come first; seeds that are bought leave time for the other parts."""
        if self.budget is None or not self.times or comparison.plan.until_resolved is None:
            return self._end_before_speeds(comparison, LATE_SPEED_SHARE)
        speed = _speed_seconds(comparison, self.times, comparison.plan.speed_contexts, rounds=1)
        recall = sum(_recall_seconds(comparison, self.times, choice) for choice in choices)
        shares = min(recall, RECALL_SHARE * self.budget.seconds), min(speed, SPEED_SHARE * self.budget.seconds)
        return self.end - sum(shares)

    def recall_end(self, comparison: Comparison) -> float:
        """When the recall tasks must end, to leave time for a round of the speed measurements, which come last."""
        return self._end_before_speeds(comparison, SPEED_SHARE)

    def _end_before_speeds(self, comparison: Comparison, share: float) -> float:
        """The end of the budget without a slow round of speed measurements, of at most a share of it."""
        if self.budget is None or not self.times:
            return self.end
        speed = _speed_seconds(comparison, self.times, comparison.plan.speed_contexts, rounds=1)
        return self.end - min(SLOW_SPEED * speed, share * self.budget.seconds)

    def affordable(self, comparison: Comparison, choices: Sequence[TaskChoice]) -> list[TaskChoice]:
        """The recall tasks; those that `auto` chose and that do not fit the budget are marked as left out."""
        if self.budget is None or not self.times:
            return list(choices)
        left, kept = RECALL_SHARE * self.budget.seconds, []
        for choice in choices:
            seconds = _recall_seconds(comparison, self.times, choice)
            if AUTO in comparison.plan.recall_probes and seconds > left:
                reason = f"the budget of {format_duration(self.budget.seconds)} leaves no time for it"
                kept.append(replace(choice, reason=choice.reason or reason))
            else:
                left -= seconds
                kept.append(choice)
        return kept


def kernel_seconds(text: str | None) -> float | None:
    """Seconds of a --budget in which this machine's kernels may be built and measured; None without one."""
    return None if text is None else KERNEL_SHARE * parse_duration(text, "--budget")


def text_seconds(budget: float) -> float:
    """Seconds of a budget reserved for preparing the text."""
    return min(TEXT_SHARE * budget, MAX_TEXT_SECONDS)


def end_seconds(budget: float) -> float:
    """Seconds of a budget reserved for starting the command and writing the last report."""
    return max(MIN_END_SECONDS, END_SHARE * budget)


def least_budget(seconds: float) -> float:
    """The smallest budget that leaves this many seconds beside the text and the end, rounded up as it is printed."""
    budget = seconds
    for _ in range(50):
        budget = seconds + text_seconds(budget) + end_seconds(budget)
    budget *= 1.02  # a second measurement of steps may be a little slower
    unit = 1 if budget < 7200 else 360
    return float(unit * math.ceil(budget / unit))


def is_worth_timing(comparison: Comparison, steps: Mapping[str, int]) -> bool:
    """Whether training may take long enough that timing its steps first pays off."""
    plan = comparison.plan
    flops = (
        3 * steps[entry.name] * _flops_per_token(comparison.config(entry), plan.sequence_length, training=True)
        for entry in plan.entries
    )
    return sum(flops) * plan.tokens_per_step * len(plan.seeds) > UNTIMED_FLOPS


def time_steps(comparison: Comparison) -> dict[str, StepTime]:
    """Time a training step of each design on random tokens, with all workers busy as in training.

    Times that another call measured on this machine within `KEPT_SECONDS` are used, so that a budget that was refused
    can be corrected at once. Raises MachineError where a step cannot be timed.
    """
    plan, workers = comparison.plan, comparison.workers
    file = _times_file(comparison)
    with suppress(CheckpointError, OSError):
        saved = read_json_file(file) if file is not None and file.is_file() else {}
        age = time.time() - saved.get("time", -math.inf)
        if 0 <= age < KEPT_SECONDS:
            print_status(f"using the step times measured {format_duration(age)} ago")
            return {entry.name: StepTime(*each) for entry, each in zip(plan.entries, saved["times"], strict=True)}
    print_status(f"timing a step of each design, {workers.total} at a time" if workers.total > 1 else "timing steps")
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = replace(comparison, out=Path(folder))
        tasks = [calibration_task(elsewhere, entry) for entry in plan.entries]
        threads = comparison.workers.threads
        as_in_trainings = {"threads": threads, "choices": comparison.runtime.choices_of_worker(threads)}
        tasks = [replace(task, request={**task.request, **as_in_trainings}) for task in tasks]
        began = time.monotonic()
        results = run_tasks(tasks, replace(comparison.workers, share=None))
        seconds = time.monotonic() - began
    times = {}
    rounds = math.ceil(len(tasks) / comparison.workers.count)
    for entry, result in zip(plan.entries, results, strict=True):
        if result["status"] != "done":
            raise MachineError(f"{result['message']}; without a time budget no step needs to be timed")
        flops = 3 * _flops_per_token(comparison.config(entry), plan.sequence_length, training=True)
        start = max(0.0, seconds / rounds - result["timed_seconds"])
        times[entry.name] = StepTime(result["seconds_per_step"], start, flops * plan.tokens_per_step)
    if file is not None:
        with suppress(MachineError):
            write_json_file(file, {"time": time.time(), "times": [list(astuple(each)) for each in times.values()]})
    return times


def _times_file(comparison: Comparison) -> Path | None:
    """The cache's file of these designs' step times on this machine; None without a cache."""
    plan, workers, runtime = comparison.plan, comparison.workers, comparison.runtime
    names = ("design", "settings", "tf32", "deterministic")
    requests = [calibration_task(comparison, entry).request for entry in plan.entries]
    machine = [hardware(), torch.__version__, __version__, runtime.threads, runtime.choices_of_worker(workers.threads)]
    key = [
        machine,
        workers.devices,
        workers.threads,
        workers.ranks,
        [[each[name] for name in names] for each in requests],
        [sha256(Path(file).read_bytes()).hexdigest() for file in plan.part_files],
    ]
    with suppress(ConfigError, MachineError):
        return DataCache(None).path("json", "step times", to_plain_json(key))
    return None


def estimate(
    comparison: Comparison,
    times: Mapping[str, StepTime],
    steps: Mapping[str, int],
    choices: Sequence[TaskChoice],
    rounds: int = SPEED_ROUNDS,
) -> Estimate:
    """Estimate the seconds of each part.

    steps: training steps of each design. choices: the recall tasks. rounds: of speed measurements.
    """
    plan, runs = comparison.plan, unfinished_runs(comparison)
    each_step = [time.step for time in times.values()]
    parts = {
        "tuning": _unfinished_tuning(comparison, _training_seconds(comparison, times, steps, all_runs(plan)), runs),
        "training": _training_seconds(comparison, times, steps, runs),
        "speed": _speed_seconds(comparison, times, plan.speed_contexts, rounds),
        "recall": sum(_recall_seconds(comparison, times, choice) for choice in choices),
    }
    return Estimate((min(each_step), max(each_step)), parts)


def all_runs(plan: ComparisonPlan) -> dict[str, int]:
    """How many training runs each design has."""
    return {entry.name: len(plan.seeds) for entry in plan.entries}


def unfinished_runs(comparison: Comparison) -> dict[str, int]:
    """How many training runs of each design have no result."""
    return {
        entry.name: sum(is_unfinished(comparison, entry.name, f"seed{seed}") for seed in comparison.plan.seeds)
        for entry in comparison.plan.entries
    }


def is_finished(comparison: Comparison, choices: Sequence[TaskChoice]) -> bool:
    """Whether every training, speed measurement and recall task has a result. choices: the recall tasks."""
    plan = comparison.plan
    return (
        plan.until_resolved is None
        and not any(unfinished_runs(comparison).values())
        and not any(_unfinished_rounds(comparison, entry.name) for entry in plan.entries)
        and not any(_unfinished_copies(comparison, choice) for choice in choices)
    )


def fit_plan(
    comparison: Comparison, times: Mapping[str, StepTime], budget: TimeBudget, *, chooses_tokens: bool,
    chooses_seeds: bool, chooses_contexts: bool, text: float | None = None,
) -> ComparisonPlan:  # fmt: skip
    """The plan with the settings that a budget chooses, and sentences on them.

    text: seconds for preparing the text; None: as many as a budget reserves for it. Raises ConfigError if not even the
    smallest comparison that can distinguish designs fits.
    """
    plan, notes = comparison.plan, list[tuple[str, str]]()
    if chooses_contexts:
        contexts = list(plan.speed_contexts)
        while len(contexts) > 1 and _speed_seconds(comparison, times, contexts) > SPEED_SHARE * budget.seconds:
            contexts.pop()
        if len(contexts) < len(plan.speed_contexts):
            plan = replace(plan, speed_contexts=tuple(contexts))
            where = f"up to {contexts[-1]:,} tokens" if len(contexts) > 1 else f"at {contexts[0]:,} tokens only"
            notes.append(("speed_contexts", f"speed is measured {where}"))
    text = text_seconds(budget.seconds) if text is None else text
    others = text + _speed_seconds(comparison, times, plan.speed_contexts, rounds=1)
    chosen, recall = None, RECALL_SHARE * budget.seconds if plan.recall_probes else 0.0
    for _ in range(2):  # again with what the recall tasks of the first choice need
        chosen = _choose(replace(comparison, plan=plan), times, budget, others + recall, chooses_tokens, chooses_seeds)
        if chosen is None and recall and plan.recall_probes == (AUTO,):
            recall = 0.0
        elif chosen is not None:
            steps = {entry.name: training_steps(replace(comparison, plan=chosen), entry) for entry in plan.entries}
            choices = choose_recall_tasks(replace(comparison, plan=chosen), steps)
            choices = TimePlan(budget, times).affordable(comparison, choices)
            recall = min(recall, sum(_recall_seconds(comparison, times, choice) for choice in choices))
    if chosen is None:
        fewest = replace(plan, seeds=plan.seeds[: MIN_SEEDS if chooses_seeds else None])
        parts = {"recall": recall, "speed": others - text}
        raise _too_short(replace(comparison, plan=fewest), times, budget, parts, _least_steps(plan, chooses_tokens))
    if chooses_tokens:
        notes.insert(0, ("tokens", f"each run trains on {int(chosen.budget_value):,} tokens"))
        if plan.warmup is not None and plan.warmup > chosen.token_steps:
            chosen = replace(chosen, warmup=None)
            notes.append(("warmup", f"of {chosen.token_steps} steps the warmup takes a twentieth, not {plan.warmup}"))
    if len(chosen.seeds) < len(plan.seeds):
        notes.insert(0, ("seeds", f"{len(chosen.seeds)} seeds of each design are trained, not {len(plan.seeds)}"))
    return replace(chosen, budget_notes=tuple(notes))


def _too_short(
    comparison: Comparison, times: Mapping[str, StepTime], budget: TimeBudget, parts: Mapping[str, float], steps: int
) -> ConfigError:
    """The refusal: the least budget, what takes it, and the options that make it smaller.

    parts: seconds of what follows the training. steps: of each run.
    """
    plan = comparison.plan
    training = _training_seconds(comparison, times, dict.fromkeys(times, steps), all_runs(plan))
    tuning = _tuning_seconds(plan, training)
    spent = {"timing steps": time.monotonic() - budget.started}
    parts = {**spent, "tuning": tuning / TRAINED_SHARE, "training": training / TRAINED_SHARE, **parts}
    least = least_budget(sum(parts.values()))
    parts["text and report"] = least - sum(parts.values())
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items() if round(seconds))
    smaller = {
        f"--seeds {MIN_SEEDS}": len(plan.seeds) > MIN_SEEDS,
        f"--batch-size {plan.batch_size // 2}": plan.batch_size > 1,
        "--speed-context-length 512": max(plan.speed_contexts) > 512,
        "a smaller --tune-budget": tuning > 0,
        "--vocab-size 1024": plan.tokenizer is None and (plan.vocab_size is None or plan.vocab_size > 1024),
        "layers.*.repeat=2": any(layer.repeat > 2 for entry in plan.entries for layer in entry.config.layers),
    }
    advised = ", ".join(option for option, helps in smaller.items() if helps)
    advice = f", or less of each, such as {advised}" if advised else ""
    timed = _range(sorted(each.step for each in times.values()))
    return ConfigError(
        f"--budget {format_seconds(budget.seconds)}: is too short: the least, {len(plan.seeds)} seeds of "
        f"{len(plan.entries)} designs, {steps} steps of {plan.tokens_per_step:,} tokens each at "
        f"{timed} s/step, take about {format_seconds(least)}: {listed}; give at least that, or compare fewer "
        f"designs{advice}"
    )


def _range(steps: Sequence[float]) -> str:
    """Seconds of training steps: 0.36 to 0.45."""
    return " to ".join(dict.fromkeys(f"{seconds:.2g}" for seconds in (steps[0], steps[-1])))


def _choose(
    comparison: Comparison,
    times: Mapping[str, StepTime],
    budget: TimeBudget,
    others: float,
    chooses_tokens: bool,
    chooses_seeds: bool,
) -> ComparisonPlan | None:
    """The plan with the most seeds, and then the longest training, that fits; None where none does.

    others: seconds of everything but tuning and training.
    """
    plan = comparison.plan
    available = TRAINED_SHARE * (budget.remaining - others)
    if plan.until_resolved is not None and chooses_tokens:
        available /= 2  # the other half buys seeds
    fewest = MIN_SEEDS if chooses_seeds and plan.until_resolved is None else len(plan.seeds)
    for count in range(len(plan.seeds), min(fewest, len(plan.seeds)) - 1, -1):
        candidate = replace(plan, seeds=plan.seeds[:count])
        most = _most_steps(replace(comparison, plan=candidate), times, available)
        if most < _least_steps(plan, chooses_tokens):
            continue
        if not chooses_tokens:
            return candidate
        largest = max(int(size(comparison.config(entry)).parameters) for entry in plan.entries)
        longest = max(MIN_STEPS, TOKENS_PER_PARAMETER * largest // plan.tokens_per_step)
        return replace(candidate, budget_kind="tokens", budget_value=float(min(most, longest) * plan.tokens_per_step))
    return None


def _least_steps(plan: ComparisonPlan, chooses_tokens: bool) -> int:
    """The fewest steps of a run that the budget may choose."""
    if chooses_tokens:
        return MIN_STEPS
    return plan.token_steps if plan.budget_kind == "tokens" else 1


def describe_plan(
    comparison: Comparison,
    estimate: Estimate | None,
    budget: TimeBudget | None = None,
    finished: bool = False,
    begun: bool = False,
) -> list[str]:
    """What a comparison will do, and how long the rest of it takes, as sentences.

    estimate: None if no step was timed. finished: whether nothing is left to do. begun: whether an earlier call chose
    the plan.
    """
    plan = comparison.plan
    at_once = f", {describe_workers(comparison.workers, comparison.runtime.threads)}"
    amount = (
        f"{plan.budget_value:,.0f} tokens"
        if plan.budget_kind == "tokens"
        else f"{plan.budget_value:g} {plan.budget_kind}"
    )
    length = f" on {amount}"
    designs, seeds = len(plan.entries), len(plan.seeds)
    runs = f"{designs} design{'s' * (designs > 1)} × {seeds} seed{'s' * (seeds > 1)}{length}"
    notes = "; ".join(sentence for _, sentence in plan.budget_notes)
    chosen = [f"the budget {'had chosen' if begun or finished else 'chose'}: {notes}"] if notes else []
    if finished:
        return [f"plan: {runs}: everything is finished", *chosen]
    count = designs * seeds
    if done := count - sum(unfinished_runs(comparison).values()):
        runs += f", {done} of {count} runs finished"
    if estimate is None:
        return [f"plan: {runs}{at_once}"]
    step = _range(estimate.step)
    listed = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in estimate.parts.items() if seconds)
    total = f"{'about' if plan.until_resolved is None else 'at least'} {format_seconds(estimate.total)}"
    if budget is not None and estimate.total > budget.remaining:
        chosen.append(f"the budget of {format_duration(budget.seconds)} ends before that; the same command continues")
    if not listed and plan.until_resolved is not None:
        return [f"plan: {runs}{at_once}: more seeds follow until ± {plan.until_resolved:g}", *chosen]
    whole = "left" if done else "in all"
    return [f"plan: {runs}, {step} s/step{at_once}: {listed}; {total} {whole}", *chosen]


def format_seconds(seconds: float) -> str:
    """A duration to the second below two hours: 45 s, 4 min 10 s."""
    if seconds < 60 or seconds >= 7200:
        return format_duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"


def _most_steps(comparison: Comparison, times: Mapping[str, StepTime], available: float) -> int:
    """The most steps per run for which tuning and training fit into `available` seconds."""

    def seconds(steps: int) -> float:
        return _seconds(comparison, times, dict.fromkeys(times, steps))

    return bisect_right(range(1, 2**40), available, key=seconds)


def _seconds(comparison: Comparison, times: Mapping[str, StepTime], steps: Mapping[str, int]) -> float:
    training = _training_seconds(comparison, times, steps, all_runs(comparison.plan))
    return training + _tuning_seconds(comparison.plan, training)


def _training_seconds(
    comparison: Comparison, times: Mapping[str, StepTime], steps: Mapping[str, int], runs: Mapping[str, int]
) -> float:
    """Seconds of some runs on all workers: at least the rounds in which they take turns. runs: how many, by design."""
    plan, workers = comparison.plan, comparison.workers.total
    final = final_tokens(min(steps.values()) * plan.tokens_per_step, plan.sequence_length)
    evaluated = (final + OTHER_EVALUATED_TOKENS) / plan.tokens_per_step / 2
    seconds = {
        name: each.start + each.step * (steps[name] * (1 + EVALUATED_SHARE) + evaluated)
        for name, each in times.items()
        if runs[name]
    }
    if not seconds:
        return 0.0
    count, total = sum(runs.values()), sum(runs[name] * each for name, each in seconds.items())
    return max(math.ceil(count / workers) * total / count, total / workers, *seconds.values())


def _tuning_seconds(plan: ComparisonPlan, training: float) -> float:
    if plan.tuning is None:
        return 0.0
    if plan.tuning.budget_kind == "seconds":
        return plan.tuning.budget_value
    return training * min(plan.tuning.budget_value, planned_trials(plan.tuning.fields) / len(plan.seeds))


def _unfinished_tuning(comparison: Comparison, training: float, runs: Mapping[str, int]) -> float:
    """Seconds of the trials without a result. training: seconds of all training runs; runs: those without a result."""
    plan = comparison.plan
    if plan.tuning is None or runs != all_runs(plan):  # the first run follows the last trial
        return 0.0
    names = [f"{entry.name}-tune" for entry in plan.entries]
    files = [file for file in (comparison.out / "runs").glob("*.json") if file.name.startswith(tuple(names))]
    saved = sum(float(read_json_file(file).get("seconds") or 0.0) for file in files)
    return max(0.0, _tuning_seconds(plan, training) - saved / comparison.workers.total)


def _unfinished_rounds(comparison: Comparison, name: str) -> int:
    """How many of a design's speed measurements have no result."""
    return sum(is_unfinished(comparison, name, f"speed-{number}") for number in range(1, SPEED_ROUNDS + 1))


def _speed_seconds(
    comparison: Comparison, times: Mapping[str, StepTime], contexts: Sequence[int], rounds: int = SPEED_ROUNDS
) -> float:
    """Seconds of the rounds without a result, at most `rounds`, one design after another."""
    total = 0.0
    for entry in comparison.plan.entries:
        each = times[entry.name]
        seconds = each.start + 7 * each.step
        for context in contexts:
            prefill = each.forward(_flops_per_token(comparison.config(entry), context) * context)
            seconds += prefill * (2 if prefill < 2 else 1) + DECODE_SECONDS
        total += min(rounds, _unfinished_rounds(comparison, entry.name)) * seconds
    return total


def _unfinished_copies(comparison: Comparison, choice: TaskChoice) -> list[DesignEntry]:
    """The designs whose small copies are trained on a task and have no result."""
    return [
        entry
        for entry in comparison.plan.entries
        if choice.copies.get(entry.name) == entry.name
        and not choice.reason
        and is_unfinished(comparison, entry.name, f"recall-{choice.probe}")
    ]


def _recall_seconds(comparison: Comparison, times: Mapping[str, StepTime], choice: TaskChoice) -> float:
    """Seconds to train the small copies on a task."""
    probe, total = RECALL_PROBES[choice.probe], 0.0
    trained = _unfinished_copies(comparison, choice)
    for entry in trained:
        each = times[entry.name]
        copy = probe.small_copy(comparison.config(entry))
        length = probe.task_stream.length
        tokens = probe.steps * probe.batch_size * length
        total += each.start + each.forward(3 * _flops_per_token(copy, length, training=True) * tokens)
    return total / min(comparison.workers.total, max(1, len(trained)))


@lru_cache(maxsize=256)  # asked again before each run
def _flops_per_token(config: ModelConfig, length: int, training: bool = False) -> float:
    """FLOPs per token of a forward pass, at most at the longest sequence that its learned positions allow."""
    try:
        return flops_per_token(build(config, device="meta"), length, training=training)
    except ConfigError:
        return flops_per_token(build(config, device="meta"), 1, training=training)
