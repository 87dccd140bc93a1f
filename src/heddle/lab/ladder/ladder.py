"""Train designs at several sizes as `heddle ladder` does, from settings: `heddle.ladder`."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from heddle.data.sources import check_sources
from heddle.errors import ConfigError, DataError
from heddle.lab.compare.budget import (
    MIN_SEEDS,
    TRAINED_SHARE,
    UNTIMED_FLOPS,
    TimeBudget,
    format_seconds,
    kernel_seconds,
    least_budget,
    text_seconds,
)
from heddle.lab.compare.plan import load_entries, shared_vocab_size, split_designs
from heddle.lab.compare.results import plain
from heddle.lab.compare.tables import TextTable, format_number, format_percent
from heddle.lab.ladder.fit import MAX_EXTRAPOLATION, SizeLosses
from heddle.lab.ladder.plan import SIZE_STEP, DesignScale, LadderPlan, SharedSettings, join_with_saved
from heddle.lab.ladder.predictions import LadderPoints, interval
from heddle.lab.ladder.report import prediction_tables, rung_table
from heddle.lab.ladder.results import EstimatedRun, LadderEstimate, LadderReport
from heddle.lab.ladder.run import PLAN_FILE, Ladder, StepTimes, ladder_seconds, open_ladder, run_ladder, time_steps
from heddle.lab.ladder.settings import DEFAULT_SEEDS, DEFAULT_SIZES, LadderSettings, parse_ratios, parse_sizes
from heddle.lab.workers import default_workers, describe_workers
from heddle.machine import with_worker_choices
from heddle.progress import format_duration, parse_duration, print_status, print_text
from heddle.runtime import Runtime
from heddle.session import TRAINING_NEEDS, open_session
from heddle.settings import parse_named, shared
from heddle.storage.file_io import read_json_file
from heddle.storage.run_log import refuse_other_content
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.tokenizer import Tokenizer

# A ladder that fits a time budget on this machine, from timed steps, and the difference that it can resolve.

SMALLER_RATIOS = (10.0, 5.0)  # tokens per parameter that a budget may choose if the target is out of reach at 20
LARGEST_STEP = 2**0.25  # between the sizes that are tried
TIMED_SIZES = (1.0, 1 / 8)  # of twice the smallest size that reaches the target
TYPICAL_DEVIATION = 0.005  # of the log loss of small models between seeds
TYPICAL_LOSS = (0.8, 0.5, 0.25)  # E, C and γ of E + C·(N / the target)^−γ


@dataclass(frozen=True)
class Choice:
    """A ladder that fits, its step times, and its seconds of training.

    needed: seconds of a budget that would reach the target, where this one does not.
    """

    ladder: Ladder
    times: StepTimes
    seconds: float
    needed: float | None = None


def fit_ladder_plan(
    ladder: Ladder, budget: TimeBudget, *, chooses_sizes: bool, chooses_ratio: bool, chooses_seeds: bool
) -> Choice:
    """Choose the sizes, tokens per parameter and seeds that fit the budget; explicit settings stay.

    The largest size is as large as fits, and no larger than the target needs. Raises ConfigError if no ladder fits.
    """
    plan = ladder.plan
    count = plan.sizes if isinstance(plan.sizes, int) else len(plan.sizes)
    seeds = [plan.seeds, *range(plan.seeds - 1, MIN_SEEDS - 1, -1)] if chooses_seeds else [plan.seeds]
    ratios = [plan.settings.tokens_per_parameter, *((ratio,) for ratio in SMALLER_RATIOS if chooses_ratio)]
    largest = max(ladder.sizes) if plan.target is None else plan.target / 2
    if not chooses_sizes:
        times = time_steps(ladder)
        for ratio, number in product(ratios, seeds):
            candidate = _with(ladder, plan.sizes, ratio, number)
            seconds = ladder_seconds(candidate, times)
            if seconds <= _available(budget):
                return Choice(candidate, times, seconds)
        needed = format_seconds(least_budget(time.monotonic() - budget.started + seconds / TRAINED_SHARE))
        raise ConfigError(
            f"--budget {format_seconds(budget.seconds)}: this ladder takes about {needed} here; give at least that, or "
            "smaller sizes"
        )
    smallest = [each for ratio in ratios for each in _descending_ladders(ladder, count, largest, ratio, seeds[-1])]
    if not smallest and plan.target is not None:
        raise ConfigError(
            f"--target {format_number(plan.target)}: no {count} sizes of these designs are below half of it; give a "
            "larger one"
        )
    if not smallest:
        _with(ladder, _halving(largest, count), ratios[-1], seeds[-1])  # raises with the reason
    least = 0.0 if plan.target is None else plan.target / MAX_EXTRAPOLATION
    timed = min(largest, 2 * least) if least else largest  # larger steps take long to time
    times = time_steps(_at_sizes(ladder, tuple(timed * share for share in TIMED_SIZES)))
    best: Choice | None = None
    for ratio, number in product(ratios, seeds):
        choices = (
            Choice(each, times, ladder_seconds(each, times))
            for each in _descending_ladders(ladder, count, largest, ratio, number)
        )
        choice = next((each for each in choices if each.seconds <= _available(budget)), None)
        if choice is None:
            continue
        if plan.target is None or plan.target <= _reach(choice.ladder):
            return choice
        if best is None or max(choice.ladder.sizes) > max(best.ladder.sizes):
            best = choice
    if best is None:
        seconds = min(ladder_seconds(each, times) for each in smallest)
        needed = format_seconds(least_budget(time.monotonic() - budget.started + seconds / TRAINED_SHARE))
        raise ConfigError(
            f"--budget {format_seconds(budget.seconds)}: is too short for {count} sizes of these designs here, of "
            f"which the smallest take about {needed}; give at least that, fewer designs, or a smaller vocabulary with "
            "--vocab-size"
        )
    sizes = [size for size in _descending(largest, ladder.scales) if size * LARGEST_STEP > least]
    for size in reversed(sizes):
        nearest = _with(ladder, _halving(size, count), ratios[-1], seeds[-1])
        if plan.target is not None and plan.target <= _reach(nearest):
            spent = time.monotonic() - budget.started
            return replace(best, needed=least_budget(spent + ladder_seconds(nearest, times) / TRAINED_SHARE))
    return best


def _halving(largest: float, count: int) -> tuple[float, ...]:
    return tuple(largest / SIZE_STEP**index for index in reversed(range(count)))


def _reach(ladder: Ladder) -> float:
    """The largest size that the finished ladder can predict."""
    plan, ratio = ladder.plan, ladder.ratios[-1]
    asked = ratio if plan.target_tokens is None or plan.target is None else plan.target_tokens / plan.target
    largest = min(max(rung.parameters for rung in rungs) for rungs in ladder.rungs.values())
    return MAX_EXTRAPOLATION * largest * min(1.0, ratio / asked)


def describe_ladder(choice: Choice) -> list[str]:
    """What the ladder does, how long it takes, and which differences it can resolve, as sentences."""
    ladder, plan = choice.ladder, choice.ladder.plan
    sizes = ", ".join(format_number(size) for size in ladder.sizes)
    ratios = " and ".join(f"{ratio:g}" for ratio in ladder.ratios)
    done, count = ladder.finished
    left = " left" if done else ""
    sentences = [
        f"plan: {len(ladder.rungs)} design{'s' * (len(ladder.rungs) > 1)} × {len(ladder.sizes)} sizes ({sizes}) × "
        f"{plan.seeds} seed{'s' * (plan.seeds > 1)} on {ratios} tokens per parameter"
        f"{f', {done} of {count} runs finished' if done else ''}"
        f", {describe_workers(ladder.workers, ladder.runtime.threads)}: about {format_seconds(choice.seconds)}{left}"
    ]
    if plan.target is not None and plan.target > _reach(ladder):
        factor = MAX_EXTRAPOLATION * plan.target / _reach(ladder)
        sentences.append(
            f"the target of {format_number(plan.target)} parameters is {factor:.0f} times the largest size that is "
            f"trained; beyond {MAX_EXTRAPOLATION} times nothing is predicted, so the predictions are for "
            f"{format_number(_reach(ladder))}{_remedy(choice.needed)}"
        )
    if (sentence := _resolution(choice)) is not None:
        sentences.append(sentence)
    return sentences


def _remedy(needed: float | None) -> str:
    """The budget that would reach the target, as an option."""
    if needed is None:
        return ""
    unit, seconds = ("m", 60) if needed < 7200 else ("h", 3600)
    return f"; here, --budget {math.ceil(needed / seconds)}{unit} would reach it"


def _resolution(choice: Choice) -> str | None:
    """The smallest difference at the target that is resolved, from the fit of a typical curve with a typical spread."""
    ladder, names = choice.ladder, list(choice.ladder.rungs)
    target = min(ladder.plan.target or 10 * max(ladder.sizes), _reach(ladder))
    if len(names) < 2 or ladder.plan.settings.shares_trunk:
        return None
    deviation = TYPICAL_DEVIATION / math.sqrt(ladder.plan.seeds)
    floor, scale, power = TYPICAL_LOSS
    random = np.random.default_rng(0)
    losses = {}
    for name in names[:2]:
        sizes = [float(rung.parameters) for rung in ladder.rungs[name]]
        noise = np.exp(deviation * random.standard_normal(len(sizes)))
        values = [
            (floor + scale * (size / target) ** -power) * factor for size, factor in zip(sizes, noise, strict=True)
        ]
        losses[name] = SizeLosses(sizes, values, [ladder.plan.seeds] * len(sizes))
    try:
        fit = LadderPoints(losses, {}, deviation).fit(ladder.plan.share_irreducible)
        first, second = (fit.losses(name, target, 0.0) for name in names[:2])
    except DataError:
        return None
    _, low, high = interval(first / second)
    factor, spread = MAX_EXTRAPOLATION * target / _reach(ladder), format_percent(TYPICAL_DEVIATION)
    return (
        f"it predicts {format_number(target)} parameters, {factor:.0f} times the largest size; with a seed spread "
        f"of {spread} of the loss, differences at that size below about "
        f"{format_percent((high - low) / 2)} cannot be resolved"
    )


def _descending_ladders(
    ladder: Ladder, count: int, largest: float, ratio: Sequence[float], seeds: int
) -> Iterator[Ladder]:
    """The ladders that can be built and trained, from the largest down."""
    for size in _descending(largest, ladder.scales):
        with suppress(ConfigError):  # the smallest is too small
            yield _with(ladder, _halving(size, count), ratio, seeds)


def _descending(largest: float, scales: Mapping[str, DesignScale]) -> Iterator[float]:
    """Sizes from the largest down to sizes that are almost only the embedding."""
    smallest = min(scale.config.vocab_size or 1 for scale in scales.values())
    while largest > smallest:
        yield largest
        largest /= LARGEST_STEP


def _with(ladder: Ladder, sizes: int | tuple[float, ...], ratio: Sequence[float], seeds: int) -> Ladder:
    plan: LadderPlan = ladder.plan
    settings = replace(plan.settings, tokens_per_parameter=tuple(ratio))
    changed = replace(plan, sizes=sizes, settings=settings, seeds=seeds)
    opened = open_ladder(changed, ladder.out, ladder.runtime, ladder.command, ladder.scales)
    opened.plan.settings.check_steps([rung.parameters for each in opened.rungs.values() for rung in each])
    return opened


def _at_sizes(ladder: Ladder, sizes: tuple[float, ...]) -> Ladder:
    """The ladder at the sizes at which steps are timed, or the nearest that a design has."""
    rungs = {
        name: [scale.nearest_rung(size, most=math.inf) for size in sorted(sizes)]
        for name, scale in ladder.scales.items()
    }
    return replace(ladder, sizes=tuple(sorted(sizes)), rungs=rungs)


def _available(budget: TimeBudget) -> float:
    """Seconds of training that are left in the budget."""
    return TRAINED_SHARE * (budget.remaining - text_seconds(budget.seconds))


DEFAULT_TOKENS = "20"
IRREDUCIBLE = ("shared", "separate")


@dataclass(frozen=True)
class TrainedLadder:
    """A ladder. folder: its own, with ladder.html. report: what ladder.json holds; of a dry run, the estimate."""

    folder: Path
    report: dict[str, Any]


def ladder(*designs: LadderSettings | str | Path, **options: Any) -> TrainedLadder:
    """Train designs at several sizes as `heddle ladder` does, with its options, defaults and output.

    designs: files, preset:NAME or folders, the first of which is the baseline, and overrides such as "width=64"; or
    one `LadderSettings`. options: as on the command line, such as `sizes="5"`. Raises ConfigError for an unknown or
    invalid option, and the errors that the command reports.
    """
    if not designs:
        raise ConfigError("designs: none given; give at least one file, preset:NAME or folder")
    if isinstance(designs[0], LadderSettings):
        return _ladder(designs[0])
    return _ladder(LadderSettings.read({"designs": designs, **options}))


def _ladder(settings: LadderSettings) -> TrainedLadder:
    started = time.monotonic()
    with ExitStack() as stack:
        runtime = open_session(stack, settings)
        check_sources(settings.data)
        refuse_other_content(settings.out, PLAN_FILE)
        plan = _plan(settings, runtime)
        threads = plan.threads or default_workers(runtime.device, runtime.threads).threads or runtime.threads
        seconds = kernel_seconds(settings.budget)
        runtime = with_worker_choices(runtime, settings.out, PLAN_FILE, {threads: TRAINING_NEEDS}, seconds)
        plan, choice, until = _plan_time(settings, plan, runtime, started)
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
    """The plan with what a budget chooses, its step times, and when its runs must end.

    A resumed ladder keeps its choices. Steps are not timed then, nor if there are only a few.
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
    if plan.target is not None and not chooses_sizes and plan.target < min(ladder.sizes):
        raise ConfigError(
            f"--target {format_number(plan.target)}: is below the smallest size, {format_number(min(ladder.sizes))}; "
            "give at least that"
        )
    if budget is None and not is_begun:
        _check_steps(ladder)
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


def _check_steps(ladder: Ladder) -> None:
    """Raise ConfigError, before steps are timed, for runs that are too short, or shorter than the given warmup."""
    plan, sizes = ladder.plan.settings, [rung.parameters for each in ladder.rungs.values() for rung in each]
    plan.check_steps(sizes)
    shortest = plan.steps(min(sizes), plan.tokens_per_parameter[0])
    if plan.warmup is not None and plan.warmup > shortest:  # an earlier ladder may exceed it
        reason = f"is longer than a run of {shortest} steps, which would never reach --lr"
        raise ConfigError(f"--warmup {plan.warmup}: {reason}; give fewer steps of warmup, or larger sizes")


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
        Tokenizer.load(tokenizer)  # fail before an unreadable one becomes part of the ladder
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
            "sizes": parse_sizes(DEFAULT_SIZES if settings.sizes is None else settings.sizes),
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
    workers, total = ladder.workers.count, choice.seconds
    estimate = LadderEstimate(runs=rows, seeds=seeds, workers=workers, seconds=total)
    if as_json:
        print_text(json.dumps(plain(estimate), indent=2))
        return estimate
    header = ["design", "parameters", "width", "tokens", "rate", "seconds per run"]
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
    at_once, (done, count) = f", {workers} at once" if workers > 1 else "", ladder.finished
    runs = f"{count - done} of {count} runs are left" if done else f"{count} runs"
    print_text(f"{runs}{at_once}: about {format_duration(total)}. Nothing was trained.")
    return estimate


def _print_report(report: LadderReport) -> None:
    for design in report.designs:
        print_text(design.name)
        _print_table(rung_table(design))
    for table in filter(None, prediction_tables(report).values()):
        _print_table(table)
    for sentence in report.verdict:
        print_text(sentence)
    print_text("\nCaveats:")
    for warning in report.warnings:
        print_text(f"• {warning}")


def _print_table(table: TextTable) -> None:
    """Print the columns aligned, the first one to the left, and an empty line after the table."""
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        print_text("  ".join(cells).rstrip())
    print_text("")
