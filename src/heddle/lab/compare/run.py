"""Run a comparison: train every design on the same text in the same order, measure it, and write the report.

Several processes may work on one comparison, as in an array of Slurm jobs: each takes runs that no other has taken, and
waits for the others where it needs all of them.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from heddle import progress
from heddle.data.corpus import Corpus, check_tokenizer_fits, prepare_corpus
from heddle.data.samples import check_token_count
from heddle.errors import CheckpointError, HeddleError, MachineError
from heddle.lab.compare.budget import TimePlan
from heddle.lab.compare.plan import ComparisonPlan, DesignEntry
from heddle.lab.compare.probes import GONE, TaskChoice, final_tokens
from heddle.lab.compare.report import Results, comparison_report, design_facts
from heddle.lab.compare.results import Report, Run, ScoredRun, plain
from heddle.lab.compare.statistics import grown_statistics
from heddle.lab.compare.tables import format_bits, join_names
from heddle.lab.compare.tasks import (
    SPEED_ROUNDS,
    Comparison,
    choose_recall_tasks,
    recall_result,
    recall_task,
    result_file,
    run_result,
    speed_result,
    speed_task,
    training_steps,
    training_task,
)
from heddle.lab.compare.text_profile import count_recall_rows, describe_profile
from heddle.lab.compare.tuning import (
    final_task,
    finish_tuning,
    needs_shared_run,
    shared_task,
    shared_value_matters,
    start_tuning,
)
from heddle.lab.compare.verdict import MAX_SEEDS, Spending, StoppingRule
from heddle.lab.live import LivePage
from heddle.lab.pages.report import report_json, report_page, write_report
from heddle.lab.workers import Result, Task, Workers, run_tasks
from heddle.machine import RECORD, record_worker_choices
from heddle.model.config import ModelConfig
from heddle.runtime import Runtime, kind_of_device
from heddle.storage.file_io import read_json_file, write_json_file
from heddle.storage.lock import InUseError, RunLock, lock_output, wait_for_lock
from heddle.storage.run_log import LogReader, first_difference, refuse_other_content, to_plain_json
from heddle.training.evaluation.length_extrapolation import plan_extrapolation
from heddle.training.loop import FINAL_EVALUATION_TOKENS

# Which runs a comparison does next: every seed of every design, or seeds until it is resolved.
#
# A schedule chooses runs in batches. The runs of a batch may run at the same time; the next one waits for all of them.


@dataclass
class UntilResolved:
    """First the planned seeds of every design, then the rule's runs, until it stops; `reason` is a sentence.

    Every call repeats the decisions from the first one, each from the runs of the earlier batches alone, so that a
    comparison that was interrupted in the middle of a batch resumes as if it had not been. workers: runs at the same
    time, so that their seconds count only in part. saved: (design, seed) of runs with a result from another schedule,
    such as a smaller budget. They are used before more are bought than decided. earlier_designs: as in `Judging`.
    """

    names: tuple[str, ...]
    first_seeds: tuple[int, ...]
    rule: StoppingRule
    workers: int = 1
    saved: Collection[tuple[str, int]] = ()
    earlier_designs: Sequence[Sequence[str]] = ()
    reason: str | None = field(default=None, init=False)

    def next_runs(self, runs: Mapping[str, Sequence[ScoredRun]]) -> list[tuple[str, int]]:
        """Return the next (design, seed) pairs that have no run; empty once it stops, and `reason` says why."""
        self.reason = None
        results = {(name, run.seed): run for name, of_design in runs.items() for run in of_design}
        batch = [(name, seed) for seed in self.first_seeds for name in self.names]
        used: list[tuple[str, int]] = []
        while True:
            missing = [pair for pair in batch if pair not in results]
            if missing:
                return missing
            used += batch
            by_design = {name: [results[pair] for pair in used if pair[0] == name] for name in self.names}
            statistics, *earlier = grown_statistics(by_design, self.earlier_designs)
            decision = self.rule.decide(statistics, self._spending(by_design), earlier)
            batch = [(self.names[design], seed) for design, seed in decision.runs]
            if not batch:
                batch = self._saved_beyond({name: len(of_design) for name, of_design in by_design.items()})
            if not batch:
                self.reason = decision.reason
                return []

    def _saved_beyond(self, seeds: Mapping[str, int]) -> list[tuple[str, int]]:
        """The saved runs whose seeds follow the ones used so far."""
        pairs = []
        for name, seed in seeds.items():
            while (name, seed) in self.saved:
                pairs.append((name, seed))
                seed += 1
        return pairs

    def _spending(self, by_design: Mapping[str, Sequence[ScoredRun]]) -> Spending:
        seconds = [[run.seconds_in_all / self.workers for run in runs] for runs in by_design.values()]
        means = [sum(of_design) / len(of_design) for of_design in seconds]
        return Spending([len(runs) for runs in by_design.values()], means, sum(map(sum, seconds)))


@dataclass(frozen=True)
class FixedSeeds:
    """Every seed of every design, all designs of a seed before the next seed. reason: none; every run is done."""

    names: tuple[str, ...]
    seeds: tuple[int, ...]
    reason: str | None = None

    def next_runs(self, runs: Mapping[str, Sequence[ScoredRun]]) -> list[tuple[str, int]]:
        """Return all pairs that have no run."""
        tried = {(name, run.seed) for name, of_design in runs.items() for run in of_design}
        return [(name, seed) for seed in self.seeds for name in self.names if (name, seed) not in tried]


Schedule = FixedSeeds | UntilResolved


def choose_schedule(
    plan: ComparisonPlan,
    workers: int = 1,
    saved: Collection[tuple[str, int]] = (),
    earlier_designs: Sequence[Sequence[str]] = (),
) -> Schedule:
    """The schedule of a plan. workers, saved, earlier_designs: as in `UntilResolved`."""
    names = tuple(entry.name for entry in plan.entries)
    if plan.until_resolved is None:
        return FixedSeeds(names, plan.seeds)
    rule = StoppingRule(plan.until_resolved, plan.time_budget)
    return UntilResolved(names, plan.seeds, rule, workers, saved, earlier_designs)


# A comparison that grows in place: seeds and designs may be added, and it may continue until it is resolved.
#
# Nothing may be changed or removed. Seeds added once all runs were finished may have been added because of the results;
# from then on the intervals hold at any number of seeds. Added designs do not narrow the intervals of the others.


REMEDY = "use the same, or another folder"


def run_file(out: Path, name: str, seed: int) -> Path:
    """The file of a training run's result."""
    return result_file(out, name, f"seed{seed}")


def saved_runs(out: Path, names: Sequence[str]) -> list[tuple[str, int]]:
    """(design, seed) of every training run that has a result."""
    return [(name, seed) for seed in range(MAX_SEEDS) for name in names if run_file(out, name, seed).is_file()]


def check_plan(path: Path, plan: ComparisonPlan, *, may_grow: bool = True) -> bool:
    """Write the plan of a new comparison, or check the plan of a resumed one and add what is new.

    Returns whether the number of seeds depends on results. Raises as `joined_plan`, and CheckpointError for anything
    new if it may not grow, because other processes work on it.
    """
    written = joined_plan(path, plan)
    if not path.is_file() or read_json_file(path) != written:
        if not may_grow:
            raise CheckpointError(
                f"{path.parent}: other processes work on fewer seeds or designs there; wait until they have ended"
            )
        write_json_file(path, written)
    return bool(written["is_anytime"])


def joined_plan(path: Path, plan: ComparisonPlan) -> dict[str, Any]:
    """The content of a plan's file when the comparison continues: the recorded plan, and what is new.

    Raises CheckpointError naming what was changed or removed.
    """
    identity = to_plain_json(plan.identity())
    saved = dict(identity)
    if path.is_file():
        saved = read_json_file(path)
        saved["device"] = kind_of_device(str(saved.get("device")))  # earlier plans name one GPU
        saved["recall_probes"] = [name for name in saved.get("recall_probes", ()) if name != GONE]
    notes = dict(saved.pop("budget_notes", plan.budget_notes))
    is_anytime = saved.pop("is_anytime", False)
    until_resolved, earlier = saved.pop("until_resolved", None), saved.pop("earlier_designs", [])
    if until_resolved is not None and plan.until_resolved is None:
        raise CheckpointError(
            f"{path.parent}: its seeds were bought until resolved (± {until_resolved:g}), and a fixed number of "
            "seeds would leave some out; continue it in the same way, or choose another folder"
        )
    _check_unchanged(path.parent, saved, identity)
    more_seeds = identity["seeds"] != saved["seeds"]
    if more_seeds:
        notes.pop("seeds", None)
    planned = itertools.product(saved["entries"], saved["seeds"])
    if more_seeds and all(run_file(path.parent, name, seed).is_file() for name, seed in planned):
        is_anytime = True
    is_anytime = is_anytime or plan.until_resolved is not None
    if not identity["entries"].keys() <= saved["entries"].keys() and saved_runs(path.parent, list(saved["entries"])):
        earlier = [*earlier, list(saved["entries"])]
    written: dict[str, Any] = identity | {"is_anytime": is_anytime, "until_resolved": plan.until_resolved}
    written |= {"earlier_designs": earlier} if earlier else {}
    return written | ({"budget_notes": [list(note) for note in notes.items()]} if notes else {})


def _check_unchanged(folder: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise CheckpointError for anything but added seeds and designs."""
    same, seeds, entries = dict(identity), saved.get("seeds"), saved.get("entries")
    if isinstance(seeds, list) and set(seeds) <= set(identity["seeds"]):
        same["seeds"] = seeds
    if isinstance(entries, dict):
        removed = [name for name in entries if name not in identity["entries"]]
        if removed:
            raise CheckpointError(f"{folder}: holds another comparison: {removed[0]} is in it too; {REMEDY}")
        same["entries"] = {name: identity["entries"][name] for name in entries}
    difference = first_difference(_name_budget(saved), _name_budget(same))
    if difference:
        raise CheckpointError(f"{folder}: holds another comparison: {difference}; {REMEDY}")
    added = [name for name in identity["entries"] if name not in saved["entries"]]
    if added and identity.get("tuning"):
        raise CheckpointError(
            f"{folder}: holds a comparison without {added[0]}; a tuned comparison cannot gain designs, since they are "
            "tuned together; choose another folder"
        )
    if added and identity["budget_kind"] != "tokens":
        # how much of the longer texts is read depends on the steps of every design
        raise CheckpointError(
            f"{folder}: holds a comparison without {added[0]}; designs can be added only if the budget is in tokens; "
            "choose another folder"
        )


def _name_budget(identity: dict[str, Any]) -> dict[str, Any]:
    """The identity with the budget under its kind, `tokens` say, instead of kind and value."""
    others = {name: value for name, value in identity.items() if not name.startswith("budget_")}
    return {str(identity.get("budget_kind")): identity.get("budget_value")} | others


# The report of a running comparison: written before the first training, and again after tasks.


REPORT_FILES = ("report.json", "report.html")
LOOK_SECONDS = 2.0  # between two looks at the logs of running trainings
SLOW_REPORT_SECONDS, MAX_REPORT_SHARE = 1.0, 0.05
MAX_LISTED_RUNS = 6  # in a sentence


class ReportWriter:
    """Writes the report of a comparison in its present state, and shows it on the live page.

    If other processes work on the comparison too, each writes the results so far; the last to finish writes all.
    """

    def __init__(
        self, comparison: Comparison, results: Results, live: LivePage | None, time_plan: TimePlan | None = None
    ) -> None:
        self.comparison, self.results, self.live = comparison, results, live
        self.time_plan = time_plan or TimePlan()
        self.seconds = self.written_at = self.looked_at = 0.0
        self.logs: dict[tuple[str, int], LogReader] = {}
        self._configs: dict[str, ModelConfig] = {}
        self.find_facts()

    def find_facts(self) -> None:
        """Compute what needs no training; again for designs that change once the vocabulary is known."""
        for entry in self.comparison.plan.entries:
            config = self.comparison.config(entry)
            if self._configs.get(entry.name) != config:
                self._configs[entry.name] = config
                self.results.facts[entry.name] = design_facts(self.comparison, entry)
        if self.comparison.corpus is not None:
            length = self.comparison.plan.sequence_length
            self.results.loss_groups = describe_profile(self.comparison.corpus, length)

    @property
    def training_end(self) -> float:
        """When the training must end, in time.monotonic() seconds."""
        return self.time_plan.training_end(self.comparison, self.results.task_choices)

    def write(self) -> Report:
        """Write the report, show it, and return it."""
        is_shared = self.comparison.workers.share is not None
        with wait_for_lock(self.comparison.out / REPORT_FILES[0]) if is_shared else nullcontext():
            return self._write()

    def _write(self) -> Report:
        started = time.monotonic()
        report = comparison_report(self.comparison, self.results)
        write_report(report, self.comparison.out)
        if self.live is not None:
            page = partial(report_page, report)
            self.live.publish(page, lambda: report_json(report), plain(report.progress))
        self.written_at = time.monotonic()
        self.seconds = self.written_at - started
        return report

    def update(self) -> None:
        """Write the report after a task; less often with very many designs or processes."""
        is_shared = self.comparison.workers.share is not None
        limit = MAX_REPORT_SHARE * (time.monotonic() - self.written_at)
        if not is_shared and self.seconds < max(SLOW_REPORT_SECONDS, limit):
            self._write()
        elif is_shared and self.seconds < limit:
            with suppress(InUseError), lock_output(self.comparison.out / REPORT_FILES[0]):
                self._write()

    def follow_trainings(self) -> None:
        """Show the learning curves of the running trainings on the live page."""
        now = time.monotonic()
        if self.live is None or now - self.looked_at < LOOK_SECONDS:
            return
        self.looked_at, is_new = now, False
        for name, seed in self.results.pending:
            folder = run_file(self.comparison.out, name, seed).with_suffix("")
            log = self.logs.setdefault((name, seed), LogReader(folder))
            with suppress(CheckpointError):  # its own process reports the damage
                if not log.read():
                    continue
                scored = [line for line in log.lines if line.get("validation_bits_per_byte") is not None]
                curve = [(line["tokens"], line["validation_bits_per_byte"]) for line in scored]
                is_new = is_new or curve != self.results.running.get((name, seed), [])
                self.results.running[name, seed] = curve
        if is_new:
            self.update()

    @contextmanager
    def first_report(self) -> Iterator[None]:
        """Write the report of a new comparison before the block, in which its text is prepared.

        If the block rejects the text or the budget, report and plan are removed: a corrected call may use the folder.
        """
        out, is_shared = self.comparison.out, self.comparison.workers.share is not None  # then others may have begun
        if any((out / name).exists() for name in REPORT_FILES):
            yield
            return
        self.write()
        try:
            yield
        except HeddleError:
            for name in REPORT_FILES if is_shared else (*REPORT_FILES, PLAN_FILE, RECORD):
                (out / name).unlink(missing_ok=True)
            raise


PLAN_FILE, DATA_FILE = "plan.json", "data.json"
Tasks = dict[Task, Callable[[Result], None]]  # each with the function that receives its result


def run_comparison(
    plan: ComparisonPlan,
    out: Path,
    runtime: Runtime,
    command: str,
    *,
    workers: Workers,
    live: LivePage | None,
    time_plan: TimePlan,
    text: Corpus | None,
) -> Report:
    """Run the unfinished tasks of a plan in the folder `out`; return the report, which is also written as tasks finish.

    command: the user's command, for the report. workers: where the runs take place. live: shows the report while it
    grows. time_plan: ends the comparison at the end of a time budget. text: None: the text is read. Raises
    CheckpointError if the folder has other content or another comparison, and Interrupted after a signal, once the
    current runs have been saved.
    """
    with _open(out, plan, workers.share is not None) as is_anytime:
        runtime = record_worker_choices(runtime, out)
        names = [entry.name for entry in plan.entries]
        results = Results(names, SPEED_ROUNDS, len(plan.recall_probes), is_anytime=is_anytime)
        saved = read_json_file(out / PLAN_FILE)
        plan = replace(plan, budget_notes=tuple(map(tuple, saved.get("budget_notes", ()))))
        results.earlier_designs = saved.get("earlier_designs", ())
        comparison = Comparison(plan, None, out, runtime, workers, command)
        writer = ReportWriter(comparison, results, live, time_plan)
        schedule = choose_schedule(plan, workers.total, saved_runs(out, names), results.earlier_designs)
        results.pending = list(schedule.next_runs(results.runs))
        with writer.first_report():
            writer.comparison = comparison = replace(comparison, corpus=_prepare_text(comparison, text))
            results.steps = {entry.name: training_steps(comparison, entry) for entry in plan.entries}
        trained_tokens = min(results.steps.values()) * plan.tokens_per_step
        extrapolation = plan_extrapolation(
            comparison.text.validation, plan.sequence_length, plan.max_length_multiple, trained_tokens
        )
        rows = count_recall_rows(plan.sequence_length, trained_tokens) if plan.recall_probes else 0
        writer.comparison = comparison = replace(
            comparison,
            extrapolation=extrapolation,
            text_recall_rows=rows,
            final_tokens=_final_tokens(comparison, trained_tokens),
        )
        results.task_choices = time_plan.affordable(comparison, choose_recall_tasks(comparison, results.steps))
        results.probes = sum(not choice.reason for choice in results.task_choices)
        writer.find_facts()
        if plan.tuning is not None:
            _tune(writer)
        if plan.until_resolved is not None and time_plan.budget is not None:
            files = (run_file(out, *pair) for pair in saved_runs(out, names))
            spent = sum(float(read_json_file(file).get("seconds") or 0.0) for file in files) / workers.total
            seconds = spent + max(0.0, writer.training_end - time.monotonic())
            schedule = choose_schedule(
                replace(plan, time_budget=seconds), workers.total, saved_runs(out, names), results.earlier_designs
            )
        # Workers that finish the last trainings start on the recall tasks at once, unless the number of trainings, or
        # the time that they leave, is not known in advance.
        is_fixed = plan.until_resolved is None and time_plan.budget is None
        try:
            _train(writer, schedule, _recall_tasks(writer) if is_fixed else {})
            _train_at_shared_values(writer)
            _measure_recall(writer)
            _measure_speeds(writer)
            results.is_complete = True
        finally:  # also after a signal: `update` leaves reports out that take long to write
            report = writer.write()
        return report


@contextmanager
def _open(out: Path, plan: ComparisonPlan, is_shared: bool) -> Iterator[bool]:
    """Lock the folder, and check the plan; yields whether the number of seeds depends on results.

    Processes that share the comparison share a lock, which keeps all others out.
    """
    with ExitStack() as stack:
        if not is_shared:
            stack.enter_context(RunLock(out))
            yield _check_folder(out, plan)
            return
        with wait_for_lock(out / PLAN_FILE):
            try:
                with RunLock(out):
                    is_anytime = _check_folder(out, plan)
                stack.enter_context(RunLock(out, shared=True))
            except InUseError:
                stack.enter_context(RunLock(out, shared=True))
                is_anytime = check_plan(out / PLAN_FILE, plan, may_grow=False)
        yield is_anytime


def _check_folder(out: Path, plan: ComparisonPlan) -> bool:
    """Check that a folder is new or holds this comparison, and write its plan; returns as `check_plan` does."""
    refuse_other_content(out, PLAN_FILE)
    return check_plan(out / PLAN_FILE, plan)


def read_text(plan: ComparisonPlan, until: float = math.inf) -> Corpus:
    """The text of a comparison. until: as in `prepare_corpus`."""
    return prepare_corpus(
        plan.data,
        vocab_size=plan.vocab_size,
        max_train_tokens=int(plan.budget_value) if plan.budget_kind == "tokens" else None,
        tokenizer=None if plan.tokenizer is None else Path(plan.tokenizer),
        until=until,
    )


def _prepare_text(comparison: Comparison, text: Corpus | None) -> Corpus:
    """Check the text against the designs and the folder. One of several processes writes the file.

    text: None: the text is read.
    """
    plan, file = comparison.plan, comparison.out / DATA_FILE
    with wait_for_lock(file, file.is_file) if comparison.workers.share is not None else nullcontext():
        corpus = text or read_text(plan)
        for entry in plan.entries:
            check_tokenizer_fits(corpus.tokenizer, entry.config.vocab_size)
        check_token_count(corpus.train, plan.sequence_length, plan.batch_size)
        facts = to_plain_json({"data": {"hash": corpus.hash, "tokens": [len(file) for file in corpus.train]}})
        if not file.is_file():
            write_json_file(file, facts | {"final_tokens": None})
        elif difference := first_difference({"data": read_json_file(file).get("data")}, facts):
            raise CheckpointError(f"{comparison.out}: holds another comparison: {difference}; {REMEDY}")
    return corpus


def _final_tokens(comparison: Comparison, trained_tokens: int) -> int:
    """The held-out tokens that each run is scored on: as many for designs and seeds added later."""
    file = comparison.out / DATA_FILE
    with wait_for_lock(file) if comparison.workers.share is not None else nullcontext():
        saved = read_json_file(file)
        if "final_tokens" not in saved:  # from a version that did not choose it
            return FINAL_EVALUATION_TOKENS
        if saved["final_tokens"] is None:
            saved["final_tokens"] = final_tokens(trained_tokens, comparison.plan.sequence_length)
            write_json_file(file, saved)
        return int(saved["final_tokens"])


def _train(writer: ReportWriter, schedule: Schedule, then: Tasks) -> None:
    """Train as scheduled, one batch of runs after another; free workers start on the tasks of `then`."""
    comparison, results = writer.comparison, writer.results
    entries = {entry.name: entry for entry in comparison.plan.entries}
    while True:
        results.pending = list(schedule.next_runs(results.runs))
        results.stop_reason = schedule.reason
        if not results.pending:
            return
        tasks = [(_training_task(writer, entries[name], seed), name, seed) for name, seed in results.pending]
        runs = {task: partial(_add_run, results, task.label, name, seed) for task, name, seed in tasks}
        _run(writer, runs | then, comparison.workers, writer.training_end)
        if results.pending:  # the time budget ended first
            missing = ", ".join(f"seed {seed} of {name}" for name, seed in results.pending[:MAX_LISTED_RUNS])
            more = len(results.pending) - MAX_LISTED_RUNS
            others = f" and {more} more" if more > 0 else ""
            results.stop_reason = f"{writer.time_plan.ended} before {missing}{others}; the same command continues."
            results.pending = []
            return


def _add_run(results: Results, label: str, name: str, seed: int, result: Result) -> None:
    """Add a training run, and print its result."""
    results.add_run(name, run_result(seed, result))
    if result["status"] == "done":
        total = results.finished_runs + len(results.pending)
        bits = format_bits(result["bits_per_byte"])
        progress.print_status(
            f"{label}: {bits} bits per byte of held-out text (run {results.finished_runs} of {total})"
        )


def _training_task(writer: ReportWriter, entry: DesignEntry, seed: int) -> Task:
    """A run of the comparison, at the design's own best values where they were tuned."""
    comparison, results = writer.comparison, writer.results
    if results.tuning is None:
        return training_task(comparison, entry, seed, results.steps[entry.name])
    return final_task(comparison, results.tuning, entry, seed)


def _tune(writer: ReportWriter) -> None:
    """Find each design's best values of the tuned fields."""
    comparison = writer.comparison
    tuning = writer.results.tuning = start_tuning(comparison, writer.results.steps)
    end = writer.training_end

    def run(tasks: list[Task], add: Callable[[Task, Result], None]) -> None:
        _run(writer, {task: partial(add, task) for task in tasks}, comparison.workers, end)
        if any(not task.result_file.is_file() for task in tasks) and time.monotonic() >= end:
            raise MachineError(f"{writer.time_plan.ended} while values were tuned; the same command continues")

    finish_tuning(comparison, tuning, run)


def _train_at_shared_values(writer: ReportWriter) -> None:
    """Train at the best shared values, if the trials suggest that these change the answer."""
    comparison, results, tuning = writer.comparison, writer.results, writer.results.tuning
    if tuning is None:
        return
    shared_runs: dict[str, list[Run]] = {}
    if shared_value_matters(tuning, results.runs):
        entries = [entry for entry in comparison.plan.entries if needs_shared_run(tuning, entry.name)]
        shared_runs = {name: [] if any(name == entry.name for entry in entries) else list(runs)
                       for name, runs in results.runs.items()}  # fmt: skip

        def add(name: str, seed: int, result: Result) -> None:
            shared_runs[name].append(run_result(seed, result))

        tasks: Tasks = {
            shared_task(comparison, tuning, entry, run.seed): partial(add, entry.name, run.seed)
            for entry in entries
            for run in results.runs[entry.name]
        }
        _run(writer, tasks, comparison.workers, writer.training_end)
        if not all(task.result_file.is_file() for task in tasks):  # the time budget ended first
            return
    results.shared_runs = shared_runs


def _measure_speeds(writer: ReportWriter) -> None:
    """Measure speeds in rounds, with nothing else running: on one device, and by one of several processes."""
    comparison, results = writer.comparison, writer.results

    def add(name: str, result: Result) -> None:
        results.speeds[name].append(speed_result(result))

    tasks: Tasks = {
        speed_task(comparison, entry, number): partial(add, entry.name)
        for number in range(1, SPEED_ROUNDS + 1)
        for entry in comparison.plan.entries
    }
    is_shared = comparison.workers.share is not None
    with wait_for_lock(comparison.out / "runs" / "speed") if is_shared else nullcontext():
        _run(writer, tasks, replace(comparison.workers.first(), share=None), writer.time_plan.end)
    slow = [entry.name for entry in comparison.plan.entries if not results.speeds[entry.name]]
    if not slow or writer.time_plan.budget is None:
        return
    if results.stop_reason is None:
        reason = f"{writer.time_plan.ended} before the speed of {join_names(slow)}; the same command continues."
        results.stop_reason = reason
    else:  # trainings had not ended either
        results.stop_reason += f" The speed of {join_names(slow)} was not measured."


def _recall_tasks(writer: ReportWriter) -> Tasks:
    """The recall probes without a result; designs with equal copies share one result."""
    comparison, results = writer.comparison, writer.results
    trained = [choice for choice in results.task_choices if not choice.reason]
    order = [choice.probe for choice in trained]

    def add(owner: str, choice: TaskChoice, result: Result) -> None:
        probe_result = recall_result(result)
        for name in (name for name, copied in choice.copies.items() if copied == owner):
            finished = results.recall[name] | {choice.probe: probe_result}
            results.recall[name] = {probe: finished[probe] for probe in order if probe in finished}

    return {
        recall_task(comparison, entry, choice.probe): partial(add, entry.name, choice)
        for entry in comparison.plan.entries
        for choice in trained
        if choice.copies[entry.name] == entry.name and choice.probe not in results.recall[entry.name]
    }


def _measure_recall(writer: ReportWriter) -> None:
    """Train the remaining recall probes, until the time budget ends; results finished by then are kept."""
    results, tasks, end = writer.results, _recall_tasks(writer), writer.time_plan.recall_end(writer.comparison)
    _run(writer, tasks, writer.comparison.workers, end)
    reason = f"{writer.time_plan.ended[:1].lower()}{writer.time_plan.ended[1:]} first"
    cut = {str(task.request["probe"]) for task in tasks if not task.result_file.is_file()}
    if cut and time.monotonic() >= end:
        results.task_choices = [
            replace(choice, reason=reason) if choice.probe in cut else choice for choice in results.task_choices
        ]


def _run(writer: ReportWriter, tasks: Tasks, workers: Workers, until: float) -> None:
    """Run tasks and add their results, saved ones first; the report is written after each new one.

    until: in time.monotonic() seconds; tasks that are not finished by then have no result.
    """
    waiting = list(tasks)
    if workers.share is None:
        for task in tasks:
            saved = task.saved_result()
            if saved is not None:
                tasks[task](saved)
        waiting = [task for task in tasks if not task.result_file.is_file()]
    if waiting:
        writer.update()

    def add_and_write(task: Task, result: Result) -> None:
        tasks[task](result)
        writer.update()

    run_tasks(waiting, workers, add_and_write, until=until, while_waiting=writer.follow_trainings)
