"""Train the unfinished runs of a ladder, fit the curves, and write ladder.json and ladder.html."""

import heapq
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from heddle import progress
from heddle.data.corpus import Corpus, check_tokenizer_fits, prepare_corpus
from heddle.data.samples import check_token_count
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.lab.compare.results import plain
from heddle.lab.compare.tables import format_bits
from heddle.lab.ladder.plan import (
    MIN_SIZES,
    TEXT_FACTOR,
    DesignScale,
    LadderPlan,
    Rung,
    design_scales,
    find_rungs,
    join_with_saved,
    model_vocab_size,
    save_plan,
)
from heddle.lab.ladder.report import CUT, ladder_report
from heddle.lab.ladder.results import LadderReport
from heddle.lab.pages.ladder import PAGE_FILE, ladder_page
from heddle.lab.workers import Result, Task, Workers, default_workers, run_tasks
from heddle.machine import record_worker_choices
from heddle.runtime import Runtime
from heddle.signals import Interrupted, delayed_stop_signals
from heddle.storage.file_io import read_json_file, write_file, write_json_file
from heddle.storage.lock import RunLock
from heddle.storage.run_log import first_difference, refuse_other_content
from heddle.training.loop import FINAL_EVALUATION_TOKENS

RunKey = tuple[str, int, float, int]  # a run's design, width, tokens per parameter and seed
PLAN_FILE, DATA_FILE, RESULTS_FILE = "plan.json", "data.json", "ladder.json"


@dataclass(frozen=True)
class Ladder:
    """A ladder.

    sizes: as requested. rungs: by design, in ascending order. max_train_tokens: how much of the text is prepared.
    out: its folder. command: the user's command. text: None until it is prepared.
    """

    plan: LadderPlan
    scales: dict[str, DesignScale]
    sizes: tuple[float, ...]
    rungs: dict[str, list[Rung]]
    max_train_tokens: int
    out: Path
    runtime: Runtime
    command: str
    text: Corpus | None = None

    @property
    def corpus(self) -> Corpus:
        """The prepared text."""
        assert self.text is not None
        return self.text

    @property
    def workers(self) -> Workers:
        """Where the runs take place."""
        if self.plan.threads is not None:
            return Workers((self.runtime.device,), self.plan.threads)
        return default_workers(self.runtime.device, self.runtime.threads)

    @property
    def ratios(self) -> tuple[float, ...]:
        """The tokens per parameter of each size's runs, ascending."""
        return self.plan.settings.tokens_per_parameter

    def steps(self, rung: Rung, ratio: float) -> int:
        """Optimizer steps of a rung's runs with these tokens per parameter."""
        return self.plan.settings.steps(rung.parameters, ratio)

    def new_steps(self, rung: Rung, ratio: float) -> int:
        """The steps among them that are not shared with the trunk of the next smaller ratio."""
        index, settings = self.ratios.index(ratio), self.plan.settings
        shared = settings.training(rung.parameters, self.ratios[index - 1], 1.0, 0).constant_steps if index else 0
        return self.steps(rung, ratio) - shared

    def result_file(self, name: str, rung: Rung, ratio: float, seed: int) -> Path:
        """The file of a run's result."""
        branch = f"-d{ratio:g}" if self.plan.settings.shares_trunk else ""
        return self.out / "runs" / f"{name}-w{rung.width}-seed{seed}{branch}.json"

    @property
    def waves(self) -> list[list[tuple[str, Rung, float, int]]]:
        """The runs in their order: one seed of every size before the next seed, small sizes first.

        So if time runs out, as many sizes as possible have a loss. The runs of a wave may run at the same time; longer
        branches continue the trunks of shorter ones, so each number of tokens is a wave of its own.
        """
        names, sizes = list(self.rungs), zip(*self.rungs.values(), strict=True)
        runs = [run for same_size in sizes for run in zip(names, same_size, strict=True)]
        waves = [
            [(name, rung, ratio, seed) for name, rung in runs]
            for seed in range(self.plan.seeds)
            for ratio in self.ratios
        ]
        return waves if self.plan.settings.shares_trunk else [[run for wave in waves for run in wave]]

    @property
    def finished(self) -> tuple[int, int]:
        """How many of the runs have a result, and how many there are."""
        files = [self.result_file(*run) for wave in self.waves for run in wave]
        return sum(file.is_file() for file in files), len(files)

    def learning_rate(self, name: str, rung: Rung) -> float:
        """The peak learning rate of a rung's runs."""
        return self.plan.settings.training(1, 1, rung.width / self.scales[name].config.width, 0).learning_rate


def run_ladder(plan: LadderPlan, out: Path, runtime: Runtime, command: str, until: float = math.inf) -> LadderReport:
    """Run what is unfinished of a plan, and of earlier plans in the folder `out`; return the report.

    until: in time.monotonic() seconds; runs that have not ended by then are left out. Raises CheckpointError if the
    folder has other content, and Interrupted after a signal, once the current runs have been saved. The same call
    resumes.
    """
    with RunLock(out):
        refuse_other_content(out, PLAN_FILE)
        ladder = prepare_ladder(join_with_saved(out / PLAN_FILE, plan), out, runtime, command)
        _check_text(out / DATA_FILE, ladder.corpus)
        save_plan(out / PLAN_FILE, ladder.plan, ladder.sizes)
        ladder = replace(ladder, runtime=record_worker_choices(runtime, out))
        return _write_report(ladder, _run_all(ladder, until))


def _write_report(ladder: Ladder, results: dict[RunKey, Result]) -> LadderReport:
    report = ladder_report(ladder, results)
    with delayed_stop_signals():
        write_json_file(ladder.out / RESULTS_FILE, plain(report))
        write_file(ladder.out / PAGE_FILE, ladder_page(report))
    return report


def _run_all(ladder: Ladder, until: float) -> dict[RunKey, Result]:
    """The results of all runs.

    If time runs out, or a signal arrives, the report of the finished runs is still written.
    """
    waves = [_training_tasks(ladder, wave) for wave in ladder.waves]
    files = [task.result_file for wave in waves for task in wave]
    results: dict[RunKey, Result] = {}

    def tell(task: Task, result: Result) -> None:
        if result["status"] == "done":
            finished = sum(file.is_file() for file in files)
            bits = format_bits(result["bits_per_byte"])
            progress.print_status(f"{task.label}: {bits} bits per byte (run {finished} of {len(files)})")
        else:
            progress.print_status(f"warning: {result['message']}")

    for wave in waves:
        of_task: dict[Task, Result] = {}

        def add(task: Task, result: Result, of_task: dict[Task, Result] = of_task) -> None:
            of_task[task] = result
            tell(task, result)

        try:
            if time.monotonic() < until:
                run_tasks(wave, ladder.workers, add, until=until)
        except Interrupted:
            _report_saved(ladder, waves)
            raise
        results |= {key: of_task.get(task) or task.saved_result() or _not_run(task) for task, key in wave.items()}
    missing = sum(not file.is_file() for file in files)
    if missing and time.monotonic() >= until:
        ended = f"the time budget ended before {missing} of {len(files)} runs"
        progress.print_status(f"{ended}; the same command continues")
    return results


def _not_run(task: Task) -> Result:
    return {"status": "failed", "message": f"{task.label}: {CUT}"}


def _report_saved(ladder: Ladder, waves: list[dict[Task, RunKey]]) -> None:
    """Write the report of the runs that have a result, and print what is missing."""
    tasks = {task: key for wave in waves for task, key in wave.items()}
    saved = {key: result for task, key in tasks.items() if (result := task.saved_result()) is not None}
    if saved:
        _write_report(ladder, saved | {key: _not_run(task) for task, key in tasks.items() if key not in saved})
    done = f"{len(saved)} of {len(tasks)} runs are done"
    where = f"report so far: {ladder.out / PAGE_FILE}; " if saved else ""
    progress.print_text(f"{where}{done}, {len(tasks) - len(saved)} are missing")


def open_ladder(
    plan: LadderPlan,
    out: Path,
    runtime: Runtime,
    command: str = "",
    scales: dict[str, DesignScale] | None = None,
    *,
    has_rungs: bool = True,
) -> Ladder:
    """A ladder before its text is read, with the requested vocabulary size. Raises ConfigError for invalid settings.

    scales: by design, if they are known. has_rungs: whether the sizes are known.
    """
    settings = plan.settings
    if scales is None:
        scales = {scale.name: scale for scale in design_scales(plan, model_vocab_size(settings))}
    sizes = plan.requested_sizes(next(iter(scales.values())))
    if len(sizes) < MIN_SIZES:
        raise ConfigError(f"sizes: {len(sizes)} are too few to fit; give at least {MIN_SIZES}")
    if len(settings.tokens_per_parameter) == 2:
        raise ConfigError("tokens_per_parameter: 2 values are too few for L(N, D); give 1, or at least 3")
    if not settings.shares_trunk and (plan.target_tokens is not None or plan.target_flops is not None):
        name = "target_flops" if plan.target_tokens is None else "target_tokens"
        raise ConfigError(f"{name}: L(N) at one tokens_per_parameter says nothing about others; give at least 3")
    rungs = find_rungs(list(scales.values()), sizes) if has_rungs else {}
    largest = max((rung.parameters for each in rungs.values() for rung in each), default=0)
    max_train_tokens = settings.steps(largest, settings.tokens_per_parameter[-1]) * settings.tokens_per_step
    if settings.shares_trunk:
        max_train_tokens = max(max_train_tokens, plan.text_tokens or TEXT_FACTOR * max_train_tokens)
        plan = replace(plan, text_tokens=max_train_tokens)
    return Ladder(plan, scales, sizes, rungs, max_train_tokens, out, runtime, command)


def prepare_ladder(plan: LadderPlan, out: Path, runtime: Runtime, command: str = "") -> Ladder:
    """Read the text and find the rungs. Raises ConfigError and DataError for what cannot be trained."""
    # the length of the text depends on the sizes, and these on its vocabulary, which may be smaller than requested
    ladder = open_ladder(plan, out, runtime, command)
    plan, settings = ladder.plan, ladder.plan.settings
    corpus = prepare_corpus(
        settings.data,
        vocab_size=settings.vocab_size,
        max_train_tokens=ladder.max_train_tokens,
        tokenizer=None if settings.tokenizer is None else Path(settings.tokenizer),
    )
    check_token_count(corpus.train, settings.sequence_length, settings.batch_size)
    for entry in plan.entries:
        check_tokenizer_fits(corpus.tokenizer, entry.config.vocab_size)
    ladder = replace(ladder, text=corpus)
    if corpus.tokenizer.vocab_size != model_vocab_size(settings):
        scales = design_scales(plan, corpus.tokenizer.vocab_size)
        sizes = plan.requested_sizes(scales[0])
        ladder = replace(
            ladder, scales={scale.name: scale for scale in scales}, sizes=sizes, rungs=find_rungs(scales, sizes)
        )
    settings.check_steps([rung.parameters for each in ladder.rungs.values() for rung in each])
    return ladder


def _check_text(path: Path, corpus: Corpus) -> None:
    """Write a new ladder's text facts to the file; compare a resumed ladder's text with it."""
    identity = {"data": {"hash": corpus.hash, "tokens": [len(file) for file in corpus.train]}}
    if not path.is_file():
        write_json_file(path, identity)
        return
    difference = first_difference(read_json_file(path), identity)
    if difference:
        raise CheckpointError(
            f"{path.parent}: was trained on another text, or on less text: {difference}; use another folder, since "
            "its runs and new ones would not read the same text"
        )


def _training_tasks(ladder: Ladder, wave: Sequence[tuple[str, Rung, float, int]]) -> dict[Task, RunKey]:
    tasks = {}
    for name, rung, ratio, seed in wave:
        folder = ladder.out / "runs"
        stem = f"{name}-w{rung.width}-seed{seed}"
        label = f"{name}, width {rung.width}, seed {seed}"
        trunks: dict[str, str | None] = {}
        if ladder.plan.settings.shares_trunk:
            fewer = max((each for each in ladder.ratios if each < ratio), default=None)
            trunks = {"trunk": str(folder / f"{stem}-trunk{ratio:g}")}
            trunks["previous"] = None if fewer is None else str(folder / f"{stem}-trunk{fewer:g}")
            label = f"{label}, {ratio:g} tokens per parameter"
        file = ladder.result_file(name, rung, ratio, seed)
        out = str(file.with_suffix(""))
        request = _request(ladder, name, rung, ratio, seed) | {"task": "loss", "out": out} | trunks
        tasks[Task(label, file, request)] = (name, rung.width, ratio, seed)
    return tasks


def _request(ladder: Ladder, name: str, rung: Rung, ratio: float, seed: int) -> dict[str, Any]:
    settings = ladder.plan.settings
    width_ratio = rung.width / ladder.scales[name].config.width
    return {
        "design": rung.config.dump(),
        "data": settings.data,
        "tokenizer": settings.tokenizer,
        "vocab_size": settings.vocab_size,
        "max_train_tokens": ladder.max_train_tokens,
        "settings": asdict(settings.training(rung.parameters, ratio, width_ratio, seed)),
        "threads": ladder.workers.threads,
        "choices": ladder.runtime.choices_of_worker(ladder.workers.threads),
        "part_files": settings.part_files,
        "command": ladder.command,
    }


@dataclass(frozen=True)
class StepTimes:
    """By design (FLOPs per token, seconds per step) at two sizes. start: seconds of a run beside its steps."""

    ends: Mapping[str, Sequence[tuple[float, float]]]
    start: float

    def step(self, name: str, rung: Rung) -> float:
        """Seconds per step: linear in FLOPs; in proportion above the larger size, down to a tenth below the smaller."""
        (low, fast), (high, slow) = self.ends[name]
        flops = rung.flops_per_token
        if flops > high:
            return slow * flops / high
        return float(np.interp(flops, [0.0, low, high], [0.1 * fast, fast, slow]))


def time_steps(ladder: Ladder) -> StepTimes:
    """Time steps of the smallest and the largest size of each design, on random tokens, with all workers busy.

    Raises MachineError where a step cannot be timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        tasks = {
            Task(
                f"{name}, width {rung.width}, timing a step",
                Path(folder) / f"{name}-{end}.json",
                _request(ladder, name, rung, ladder.ratios[0], 0)
                | {"task": "calibrate", "out": str(Path(folder) / "run")},
            ): (name, rung)
            for name, rungs in ladder.rungs.items()
            for end, rung in (("smallest", rungs[0]), ("largest", rungs[-1]))
        }
        began = time.monotonic()
        results = run_tasks(tasks, ladder.workers)
        seconds = time.monotonic() - began
    ends: dict[str, list[tuple[float, float]]] = {name: [] for name in ladder.rungs}
    for (name, rung), result in zip(tasks.values(), results, strict=True):
        if result["status"] != "done":
            raise MachineError(f"{result['message']}; the ladder cannot be estimated")
        ends[name].append((rung.flops_per_token, float(result["seconds_per_step"])))
    timed = sum(result.get("timed_seconds", 0.0) for result in results)
    return StepTimes(ends, max(0.0, (seconds * ladder.workers.count - timed) / len(tasks)))


def ladder_seconds(ladder: Ladder, times: StepTimes) -> float:
    """Seconds until all runs have a result, with the evaluation at the end of each, as free workers take the next."""
    evaluated, end = FINAL_EVALUATION_TOKENS / ladder.plan.settings.tokens_per_step / 2, 0.0
    for wave in ladder.waves:
        ends = [end] * ladder.workers.count
        for name, rung, ratio, seed in wave:
            if not ladder.result_file(name, rung, ratio, seed).is_file():
                seconds = times.start + times.step(name, rung) * (ladder.new_steps(rung, ratio) + evaluated)
                heapq.heapreplace(ends, ends[0] + seconds)
        end = max(ends)
    return end
