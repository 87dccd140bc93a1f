"""Train designs at several sizes as `heddle compare ladder` does, from settings: `heddle.ladder`."""

import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heddle.errors import ConfigError
from heddle.lab.compare.budget import UNTIMED_FLOPS, TimeBudget, parse_duration
from heddle.lab.compare.plan import load_entries, shared_vocab_size, split_designs
from heddle.lab.compare.results import plain
from heddle.lab.compare.tables import TextTable, format_number
from heddle.lab.ladder.budget import Choice, describe_ladder, fit_ladder_plan
from heddle.lab.ladder.plan import LadderPlan, SharedSettings, join_with_saved
from heddle.lab.ladder.report import best_size_table, cost_table, held_out_table, prediction_table, rung_table
from heddle.lab.ladder.results import EstimatedRun, LadderEstimate, LadderReport
from heddle.lab.ladder.run import PLAN_FILE, Ladder, ladder_seconds, open_ladder, run_ladder, time_steps
from heddle.lab.ladder.settings import DEFAULT_SEEDS, DEFAULT_SIZES, LadderSettings, parse_ratios, parse_sizes
from heddle.progress import format_duration, print_status, print_text
from heddle.runtime import Runtime
from heddle.session import open_session
from heddle.settings import parse_named, shared
from heddle.storage.file_io import read_json_file
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.tokenizer import Tokenizer

DEFAULT_TOKENS = "20"
IRREDUCIBLE = ("shared", "separate")


@dataclass(frozen=True)
class TrainedLadder:
    """A ladder. folder: its own, with ladder.html. report: what ladder.json holds; of a dry run, the estimate."""

    folder: Path
    report: dict[str, Any]


def ladder(*designs: LadderSettings | str | Path, **options: Any) -> TrainedLadder:
    """Train designs at several sizes as `heddle compare ladder` does, with its options, defaults and output.

    designs: files, preset:NAME or folders, of which the first is the baseline, and overrides such as "width=64"; or the
    settings of the whole ladder. options: those of the command line, such as `sizes="5"`. Raises ConfigError for an
    option that does not exist or cannot be, and what the command reports.
    """
    if not designs:
        raise ConfigError("designs: are missing; give at least one file, preset:NAME or folder")
    if isinstance(designs[0], LadderSettings):
        return _ladder(designs[0])
    return _ladder(LadderSettings.read({"designs": designs, **options}))


def _ladder(settings: LadderSettings) -> TrainedLadder:
    started = time.monotonic()
    with ExitStack() as stack:
        runtime = open_session(stack, settings)
        plan, choice, until = _plan_time(settings, _plan(settings, runtime), runtime, started)
        if settings.dry_run:
            assert choice is not None
            estimate = _estimate(choice, settings.json)
            return TrainedLadder(settings.out, plain(estimate))
        report = run_ladder(plan, settings.out, runtime, settings.command_line("compare ladder"), until)
    if settings.json:
        print_text(json.dumps(plain(report), indent=2))
    else:
        _print_report(report)
        print_text(f"report: {settings.out / 'ladder.html'}")
    return TrainedLadder(settings.out, plain(report))


def _plan_time(
    settings: LadderSettings, plan: LadderPlan, runtime: Runtime, started: float
) -> tuple[LadderPlan, Choice | None, float]:
    """The plan with what a budget chooses, its timed steps, and when its runs must have ended.

    A ladder that continues keeps what it chose; neither it nor one of few steps is timed.
    """
    until, budget = math.inf, None
    if settings.budget is not None:
        budget = TimeBudget(parse_duration(settings.budget, "--budget"), started)
        until = budget.end
    plan_file = settings.out / PLAN_FILE
    is_begun = plan_file.is_file()
    if is_begun and budget is not None:
        saved = read_json_file(plan_file)
        plan = replace(
            plan,
            sizes=tuple(saved["sizes"]) if settings.sizes is None else plan.sizes,
            seeds=saved["seeds"] if settings.seeds is None else plan.seeds,
        )
    joined = join_with_saved(plan_file, plan)
    chooses_sizes = budget is not None and not is_begun and isinstance(joined.sizes, int)
    ladder = open_ladder(joined, settings.out, runtime, has_rungs=not chooses_sizes)
    if not settings.dry_run and (is_begun or not (budget is not None or is_worth_timing(ladder))):
        return plan, None, until
    workers = ladder.workers.count
    print_status(f"timing steps{f', {workers} at a time' if workers > 1 else ''}")
    if budget is not None and not is_begun:
        choice = fit_ladder_plan(
            ladder,
            budget,
            chooses_sizes=chooses_sizes,
            chooses_ratio=settings.tokens_per_parameter is None,
            chooses_seeds=settings.seeds is None,
        )
    else:
        times = time_steps(ladder)
        choice = Choice(ladder, times, ladder_seconds(ladder, times))
    for sentence in describe_ladder(choice):
        print_status(sentence)
    return choice.ladder.plan, choice, until


def is_worth_timing(ladder: Ladder) -> bool:
    """Whether the runs may take long enough to time their steps first."""
    tokens_per_step = ladder.plan.settings.tokens_per_step
    flops = sum(
        3 * rung.flops_per_token * ladder.new_steps(rung, ratio) * tokens_per_step
        for rungs in ladder.rungs.values()
        for rung in rungs
        for ratio in ladder.ratios
    )
    return ladder.plan.seeds * flops > UNTIMED_FLOPS


def _plan(settings: LadderSettings, runtime: Runtime) -> LadderPlan:
    if settings.irreducible not in IRREDUCIBLE:
        choices = ", ".join(IRREDUCIBLE)
        raise ConfigError(f"--irreducible {settings.irreducible}: unknown choice; choices: {choices}")
    tokenizer = settings.tokenizer
    if tokenizer is not None:
        Tokenizer.load(tokenizer)  # one that cannot be read must not become part of a ladder
    entries = load_entries(*split_designs(settings.designs))
    ratios = settings.tokens_per_parameter
    shared_settings = SharedSettings(
        **shared(settings, SharedSettings)
        | {
            "data": settings.data or ("stdlib",),
            "tokens_per_parameter": parse_named("--tokens-per-parameter", ratios or DEFAULT_TOKENS, parse_ratios),
            "learning_rate": settings.lr,
            "rate_exponent": settings.lr_exponent,
            "vocab_size": None if tokenizer else shared_vocab_size(entries, settings.vocab_size, DEFAULT_VOCAB_SIZE),
            "tokenizer": None if tokenizer is None else os.path.realpath(tokenizer),
            "device": runtime.device,
            "part_files": tuple(os.path.realpath(file) for file in settings.part),
        }
    )
    return LadderPlan(
        **shared(settings, LadderPlan)
        | {
            "entries": entries,
            "sizes": parse_sizes(settings.sizes or DEFAULT_SIZES),
            "seeds": DEFAULT_SEEDS if settings.seeds is None else settings.seeds,
            "settings": shared_settings,
            "names_tokens": ratios is not None,
            "share_irreducible": settings.irreducible != "separate",
        }
    )


def _estimate(choice: Choice, as_json: bool) -> LadderEstimate:
    """Print the sizes, tokens and seconds of each run, and of all; return them."""
    ladder, seeds = choice.ladder, choice.ladder.plan.seeds
    rows = [
        EstimatedRun(
            design=name,
            parameters=rung.parameters,
            width=rung.width,
            tokens=ladder.steps(rung, ratio) * ladder.plan.settings.tokens_per_step,
            learning_rate=ladder.learning_rate(name, rung),
            seconds=choice.times.step(name, rung) * ladder.new_steps(rung, ratio),
        )
        for name, rungs in ladder.rungs.items()
        for rung in rungs
        for ratio in ladder.ratios
    ]
    count, total = ladder.workers.count, choice.seconds
    estimate = LadderEstimate(runs=rows, seeds=seeds, workers=count, seconds=total)
    if as_json:
        print_text(json.dumps(plain(estimate), indent=2))
        return estimate
    header = ["design", "parameters", "width", "tokens", "rate", "seconds a run"]
    cells = [
        [
            row.design,
            format_number(row.parameters),
            str(row.width),
            format_number(row.tokens),
            f"{row.learning_rate:.2g}",
            f"{row.seconds:.0f}",
        ]
        for row in rows
    ]
    _print_table(TextTable(header, cells, ""))
    workers = f", {count} at once" if count > 1 else ""
    print_text(f"{seeds * len(rows)} runs{workers}: about {format_duration(total)}. Nothing was trained.")
    return estimate


def _print_report(report: LadderReport) -> None:
    for design in report.designs:
        print_text(design.name)
        _print_table(rung_table(design))
    if report.predictions:
        _print_table(prediction_table(report))
    if report.best_sizes:
        _print_table(best_size_table(report))
    if report.equal_loss:
        _print_table(cost_table(report))
    if report.held_out:
        _print_table(held_out_table(report))
    for sentence in report.verdict:
        print_text(sentence)
    print_text("\nCaveats:")
    for warning in report.warnings:
        print_text(f"• {warning}")


def _print_table(table: TextTable) -> None:
    """The columns aligned, the first to the left; an empty line after the table."""
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_text(_aligned(row, widths))
    print_text("")


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if index else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *others]).rstrip()
