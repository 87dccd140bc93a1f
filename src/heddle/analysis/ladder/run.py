"""Train the runs of a ladder that are not done yet, fit the curves, and write ladder.json and ladder.html."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heddle import progress
from heddle.analysis.comparison.formatting import format_bits
from heddle.analysis.ladder.plan import (
    MIN_SIZES,
    LadderPlan,
    design_scales,
    find_rungs,
    join_with_saved,
    model_vocab_size,
    save_plan,
)
from heddle.analysis.ladder.report import ladder_report
from heddle.analysis.ladder.scaling import DesignScale, Rung
from heddle.analysis.pages.ladder import write_ladder_page
from heddle.analysis.workers import Result, Task, default_workers, run_tasks
from heddle.data.corpus import Corpus, check_tokenizer_fits, prepare_corpus
from heddle.data.samples import check_token_count
from heddle.errors import CheckpointError, ConfigError, MachineError
from heddle.runtime import Runtime
from heddle.storage.json_file import read_json_file, write_json_file
from heddle.storage.lock import RunLock
from heddle.storage.run_log import first_difference
from heddle.tokenization import DEFAULT_VOCAB_SIZE

PLAN_FILE, DATA_FILE, RESULTS_FILE = "plan.json", "data.json", "ladder.json"
MIN_STEPS = 20  # of the smallest run: fewer are warmup and decay alone


@dataclass(frozen=True)
class Ladder:
    """A ladder whose text is ready.

    sizes: as asked for. rungs: by design, in ascending order. max_train_tokens: how much of the text was made ready.
    out: its folder. command: what the user called.
    """

    plan: LadderPlan
    scales: dict[str, DesignScale]
    sizes: tuple[float, ...]
    rungs: dict[str, list[Rung]]
    corpus: Corpus
    max_train_tokens: int
    out: Path
    runtime: Runtime
    command: str

    @property
    def workers(self) -> int:
        """Processes that train at the same time."""
        return default_workers(self.runtime.threads, self.runtime.device) if self.plan.threads is None else 1

    def steps(self, rung: Rung) -> int:
        """Optimizer steps of a rung's runs."""
        return self.plan.settings.steps(rung.parameters)

    def learning_rate(self, name: str, rung: Rung) -> float:
        """The peak learning rate of a rung's runs."""
        return self.plan.settings.training(1, rung.width / self.scales[name].config.width, 0).learning_rate


def run_ladder(plan: LadderPlan, out: Path, runtime: Runtime, command: str) -> dict[str, Any]:
    """Run what is not done yet of a plan and of what was planned before in the folder `out`; return the report.

    Raises CheckpointError where the folder has other content, Interrupted after a signal, once the current runs have
    been saved. The same call continues.
    """
    with RunLock(out):
        if not (out / PLAN_FILE).is_file():
            others = sorted(entry.name for entry in out.iterdir() if not entry.name.startswith("."))
            if others:
                raise CheckpointError(f"{out}: holds something else ({others[0]}); choose an empty or new folder")
        ladder = prepare_ladder(join_with_saved(out / PLAN_FILE, plan), out, runtime, command)
        _check_text(out / DATA_FILE, ladder.corpus)
        save_plan(out / PLAN_FILE, ladder.plan, ladder.sizes)
        tasks = _training_tasks(ladder)
        total = len(tasks)

        def tell(task: Task, result: Result) -> None:
            if result["status"] == "done":
                finished = sum(each.result_file.is_file() for each in tasks)
                bits = format_bits(result["bits_per_byte"])
                progress.print_status(f"{task.label}: {bits} bits per byte (run {finished} of {total})")
            else:
                progress.print_status(f"warning: {result['message']}")

        results = run_tasks(tasks, ladder.workers, tell)
        report = ladder_report(ladder, dict(zip(tasks.values(), results, strict=True)))
        write_json_file(out / RESULTS_FILE, report)
        write_ladder_page(report, out)
        return report


def prepare_ladder(plan: LadderPlan, out: Path, runtime: Runtime, command: str = "") -> Ladder:
    """Read the text and find the rungs. Raises ConfigError and DataError for what cannot be trained."""
    settings = plan.settings
    # how much text is read depends on the sizes, and they on the text's vocabulary, which may be smaller than asked for
    vocab_size = model_vocab_size(settings, DEFAULT_VOCAB_SIZE)
    nominal = design_scales(plan, vocab_size)
    sizes = plan.requested_sizes(nominal[0])
    if len(sizes) < MIN_SIZES:
        raise ConfigError(f"sizes: {len(sizes)} are too few to fit; give {MIN_SIZES} at least")
    largest = max(rung.parameters for rungs in find_rungs(nominal, sizes).values() for rung in rungs)
    max_train_tokens = settings.steps(largest) * settings.tokens_per_step
    tokenizer = None if settings.tokenizer is None else Path(settings.tokenizer)
    corpus = prepare_corpus(
        settings.data,
        vocab_size=settings.vocab_size,
        max_train_tokens=max_train_tokens,
        tokenizer=tokenizer,
    )
    check_token_count(corpus.train, settings.sequence_length, settings.batch_size)
    for entry in plan.entries:
        check_tokenizer_fits(corpus.tokenizer, entry.config.vocab_size)
    scales = nominal
    if corpus.tokenizer.vocab_size != vocab_size:
        scales = design_scales(plan, corpus.tokenizer.vocab_size)
        sizes = plan.requested_sizes(scales[0])
    rungs = find_rungs(scales, sizes)
    smallest = min(rung.parameters for each in rungs.values() for rung in each)
    if settings.steps(smallest) < MIN_STEPS:
        raise ConfigError(
            f"tokens_per_parameter {settings.tokens_per_parameter:g}: gives the smallest size, {smallest} parameters, "
            f"{settings.steps(smallest)} steps of {settings.tokens_per_step} tokens; give more, a smaller batch_size "
            "or larger sizes"
        )
    return Ladder(
        plan=plan,
        scales={scale.name: scale for scale in scales},
        sizes=sizes,
        rungs=rungs,
        corpus=corpus,
        max_train_tokens=max_train_tokens,
        out=out,
        runtime=runtime,
        command=command,
    )


def _check_text(path: Path, corpus: Corpus) -> None:
    """Write what the text of a new ladder is; compare that of a continued one with the file."""
    identity = {"data": {"hash": corpus.hash, "tokens": [len(file) for file in corpus.train]}}
    if not path.is_file():
        write_json_file(path, identity)
        return
    difference = first_difference(read_json_file(path), identity)
    if difference:
        raise CheckpointError(
            f"{path.parent}: was trained on another text, or on less of it: {difference}; use another folder, since "
            "its runs and new ones would not read the same text"
        )


def _training_tasks(ladder: Ladder) -> dict[Task, tuple[str, int, int]]:
    """A task for each run, small sizes first; with its design, width and seed."""
    rungs = [(name, rung) for name, each in ladder.rungs.items() for rung in each]
    rungs.sort(key=lambda pair: pair[1].parameters)
    tasks = {}
    for name, rung in rungs:
        for seed in range(ladder.plan.seeds):
            stem = f"{name}-w{rung.width}-seed{seed}"
            folder = ladder.out / "runs"
            request = _request(ladder, name, rung, seed) | {"task": "loss", "out": str(folder / stem)}
            label = f"{name}, width {rung.width}, seed {seed}"
            tasks[Task(label, folder / f"{stem}.json", request)] = (name, rung.width, seed)
    return tasks


def _request(ladder: Ladder, name: str, rung: Rung, seed: int) -> dict[str, Any]:
    plan, settings = ladder.plan, ladder.plan.settings
    steps = ladder.steps(rung)
    width_ratio = rung.width / ladder.scales[name].config.width
    return {
        "design": rung.config.dump(),
        "data": settings.data,
        "tokenizer": settings.tokenizer,
        "vocab_size": settings.vocab_size,
        "max_train_tokens": ladder.max_train_tokens,
        "settings": asdict(settings.training(steps, width_ratio, seed)),
        "device": settings.device,
        "threads": plan.threads if ladder.workers == 1 else max(1, ladder.runtime.threads // ladder.workers),
        "part_files": settings.part_files,
        "command": ladder.command,
    }


def time_runs(ladder: Ladder) -> dict[str, list[float]]:
    """By design the estimated seconds of one run of each rung, from timed steps of the smallest and the largest.

    Between them the time of a step is taken as linear in its FLOPs. Evaluations and the start of a process are left
    out. Raises MachineError where a step cannot be timed.
    """
    seconds = {}
    for name, rungs in ladder.rungs.items():
        ends = [rungs[0], rungs[-1]]
        with tempfile.TemporaryDirectory() as folder:
            tasks = [
                Task(
                    f"{name}, width {rung.width}, timing a step",
                    Path(folder) / f"{rung.width}.json",
                    _request(ladder, name, rung, 0) | {"task": "calibrate", "out": str(Path(folder) / "run")},
                )
                for rung in ends
            ]
            results = run_tasks(tasks, 1)
        times = [_seconds_per_step(result) for result in results]
        flops = [rung.flops_per_token for rung in ends]
        seconds[name] = [float(np.interp(rung.flops_per_token, flops, times)) * ladder.steps(rung) for rung in rungs]
    return seconds


def _seconds_per_step(result: Mapping[str, Any]) -> float:
    if result["status"] != "done":
        raise MachineError(f"{result['message']}; the ladder cannot be estimated")
    return float(result["seconds_per_step"])
