"""Compare designs as `heddle compare` does, from settings: `heddle.compare`."""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from heddle.data.corpus import Corpus
from heddle.data.sources import check_sources
from heddle.errors import ConfigError, MachineError
from heddle.lab.compare.budget import (
    TimeBudget,
    TimePlan,
    describe_plan,
    estimate,
    fit_plan,
    is_finished,
    is_worth_timing,
    kernel_seconds,
    text_seconds,
    time_steps,
)
from heddle.lab.compare.equal_size import equalize_sizes
from heddle.lab.compare.plan import (
    ComparisonPlan,
    DesignEntry,
    TuningPlan,
    choose_baseline,
    load_entries,
    parse_tuned_fields,
    parse_tuning_budget,
    parse_varied_fields,
    shared_vocab_size,
    split_designs,
    tuned_paths,
)
from heddle.lab.compare.probes import left_out_sentences, select_probes
from heddle.lab.compare.results import Design, Report, finite, parse, plain
from heddle.lab.compare.run import PLAN_FILE, REPORT_FILES, joined_plan, read_text, run_comparison
from heddle.lab.compare.settings import DEFAULT_SEEDS, DEFAULT_TUNING_BUDGET, CompareSettings
from heddle.lab.compare.tables import (
    CostColumn,
    TextTable,
    cost_columns,
    difference_to_baseline,
    effect_table,
    equal_size_table,
    first_probe,
    format_bits,
    format_context,
    format_difference,
    format_number,
    format_percent,
    format_rate,
    half_width,
    judgment,
    mean_loss,
    ranked_designs,
    recall_accuracy,
    seed_counts,
)
from heddle.lab.compare.tasks import SPEED_ROUNDS, Comparison, choose_recall_tasks, choose_workers, training_steps
from heddle.lab.compare.tuning import check_tuning, make_search
from heddle.lab.compare.verdict import resolution_table
from heddle.lab.live import check_port, open_live_page
from heddle.lab.workers import Workers
from heddle.machine import with_worker_choices
from heddle.notebook import html_table
from heddle.progress import format_duration, parse_duration, print_status, print_text, terminal_safe
from heddle.runtime import Runtime, device_name, kind_of_device, resolve_device
from heddle.session import ALL_NEEDS, TRAINING_NEEDS, dtype_of, open_session
from heddle.settings import shared
from heddle.signals import Interrupted
from heddle.storage.file_io import read_json_file
from heddle.storage.run_log import refuse_other_content, to_plain_json
from heddle.tokenization import DEFAULT_VOCAB_SIZE
from heddle.tokenization.tokenizer import Tokenizer
from heddle.training.run import parse_scales, trackers_of, transfer_width_of, warn_of_precision
from heddle.training.settings import Settings

# Where runs take place: how many at a time, on which devices, shared among which processes.

MAX_WORKERS = 64


def choose_devices(devices: str | None, device: str, workers: int | None, processes: int) -> tuple[str, ...]:
    """The devices of --devices, or by default the GPUs that --nproc needs; () if one device is enough.

    Raises ConfigError if the devices, --workers and --nproc do not match.
    """
    check_workers(workers, devices)
    if not 1 <= processes <= MAX_WORKERS:
        raise ConfigError(f"--nproc {processes}: must be from 1 to {MAX_WORKERS}")
    names = parse_devices(devices, device)
    if processes == 1:
        return names
    if len(names) % processes:
        raise ConfigError(f"--nproc {processes}: must divide the {len(names)} devices of --devices {devices}")
    name = names[0] if names else device_name(device)
    if name == "mps" or (not names and ":" in name):
        raise ConfigError(f"--device {name}: each of the {processes} processes has its own device; give cuda or cpu")
    if name != "cuda":
        return names
    if workers is not None:
        raise ConfigError(f"--workers {workers}: runs of {processes} processes need named GPUs; give --devices")
    return parse_devices(f"0-{processes - 1}", "auto")


def check_workers(workers: int | None, devices: str | None) -> None:
    """Raise ConfigError for a number of workers out of range, or beside --devices, which sets it."""
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"--workers {workers}: must be from 1 to {MAX_WORKERS}")
    if workers is not None and devices is not None:
        raise ConfigError(f"--workers {workers}: --devices {devices} sets the number of runs already; leave one out")


def parse_devices(text: str | None, device: str) -> tuple[str, ...]:
    """Parse `0-7`, `cuda:0,cuda:2` or `cpu:4` (four runs at a time) into names; () for None. device: --device.

    Raises ConfigError for a device that this machine lacks or that is named twice.
    """
    if text is None:
        return ()
    if device != "auto":
        raise ConfigError(f"--devices {text}: names the devices already; leave --device {device} out")
    names: list[str] = []
    for term in text.split(","):
        matched = re.fullmatch(r"(?:cuda:)?(\d{1,4})(?:-(\d{1,4}))?|cpu:(\d{1,4})|(cpu|cuda|mps)", term.strip())
        if matched is None:
            raise ConfigError(f"--devices {text}: expected GPUs, such as 0-7 or cuda:0,cuda:2, or cpu:4")
        first, last, count, kind = matched.groups()
        if first is not None:
            names += [resolve_device(f"cuda:{index}") for index in range(int(first), int(last or first) + 1)]
        else:
            names += [resolve_device(kind or "cpu")] * int(count or 1)
        if len(names) > MAX_WORKERS:
            raise ConfigError(f"--devices {text}: names more than {MAX_WORKERS} devices; leave some out")
    twice = [name for name in names if names.count(name) > 1 and name != "cpu"]
    if not names or twice or len(set(map(kind_of_device, names))) > 1:
        reason = f"names {twice[0]} twice" if twice else "must be at least one device, and all of one kind"
        raise ConfigError(f"--devices {text}: {reason}")
    return tuple(names)


def parse_process_share(text: str | None, environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(index, count) of `--share 0/8`, or of this job in a Slurm array; None without either."""
    if text is None and "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    source = "--share" if text is not None else "SLURM_ARRAY_TASK_ID"
    if text is None:
        numbers = [environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "COUNT", "MIN")]
        text = "/".join(numbers[:2])
    else:
        numbers = [*text.split("/"), "0"]
    if len(numbers) != 3 or not all(re.fullmatch(r"\d{1,9}", number) for number in numbers) or not int(numbers[1]):
        raise ConfigError(f"{source} {text}: expected INDEX/COUNT of the processes, such as 0/8")
    index, count, first = map(int, numbers)
    if source == "--share" and index >= count:
        raise ConfigError(f"--share {text}: must be from 0/{count} to {count - 1}/{count}")
    return (index - first) % count, count


MOST_TEXT = 0.6  # of what a budget leaves after its steps are timed, for preparing the text
DEFAULT_TOKENS = 100_000
SPEED_CONTEXTS = (512, 2048, 8192)


@dataclass(frozen=True)
class ComparedDesigns:
    """A finished comparison. folder: its own, with report.html. report: what report.json holds."""

    folder: Path
    report: dict[str, Any]

    def _repr_html_(self) -> str:
        header = ("design", "parameters", "bits per byte")
        rows = [
            (design["name"], design["parameters"], design["bits_per_byte"]["mean"]) for design in self.report["designs"]
        ]
        return html_table(header, rows, " ".join(self.report["verdict"]))


def compare(*designs: CompareSettings | str | Path, **options: Any) -> ComparedDesigns:
    """Compare designs as `heddle compare` does, with its options, defaults and output.

    designs: files, preset:NAME or folders, the first of which is the baseline, and overrides such as "width=64", which
    apply to all; or one `CompareSettings`. options: as on the command line, such as `tokens=100_000` or `seeds=3`.
    Raises ConfigError for an unknown or invalid option, and the errors that the command reports.
    """
    if not designs:
        raise ConfigError("designs: none given; give at least one file, preset:NAME or folder")
    if isinstance(designs[0], CompareSettings):
        return _compare(designs[0])
    return _compare(CompareSettings.read({"designs": designs, **options}))


def _compare(settings: CompareSettings) -> ComparedDesigns:
    started = time.monotonic()
    with ExitStack() as stack:
        devices = choose_devices(settings.devices, settings.device, settings.workers, settings.nproc)
        share = parse_process_share(settings.share, os.environ)
        device = devices[0] if devices else settings.device
        runtime = open_session(stack, settings, device=device, tf32=settings.tf32, deterministic=settings.deterministic)
        check_sources(settings.data)
        refuse_other_content(settings.out, PLAN_FILE)
        if settings.port is not None:
            check_port(settings.port)
        plan = comparison_plan(settings, runtime)
        workers = choose_workers(
            plan, runtime, count=settings.workers, devices=devices, share=share, ranks=settings.nproc
        )
        # speed measurements have all needs; with as many threads as training, their entry replaces its own
        needs = {workers.threads or runtime.threads: TRAINING_NEEDS, plan.threads or runtime.threads: ALL_NEEDS}
        runtime = with_worker_choices(runtime, settings.out, PLAN_FILE, needs, kernel_seconds(settings.budget))
        warn_of_precision(runtime, settings.precision)
        plan, time_plan, text = _plan_time(settings, plan, runtime, workers, started)
        if settings.dry_run:
            print_text("Nothing was trained.")
            return ComparedDesigns(settings.out, {"plan": to_plain_json(plan.identity())})
        is_served = settings.open or settings.port is not None or not (settings.quiet or share)
        live = open_live_page(stack, settings.port, settings.open, "the report") if is_served else None
        command = settings.command_line("compare")
        try:
            report = run_comparison(
                plan, settings.out, runtime, command, workers=workers, live=live, time_plan=time_plan, text=text
            )
        except Interrupted:
            _print_interrupted(settings)
            raise
    if settings.json:
        print_text(json.dumps(plain(finite(report)), indent=2))
    else:
        print_report(_terminal_safe(report))
        print_text(f"report: {settings.out / 'report.html'}")
    return ComparedDesigns(settings.out, plain(report))


def _print_interrupted(settings: CompareSettings) -> None:
    """Print the table so far, the path of the report, and what is missing."""
    file = settings.out / REPORT_FILES[0]
    if settings.json or not file.is_file():
        return
    report = parse(Report, json.loads(file.read_text(encoding="utf-8")))
    if any(design.runs for design in report.designs):
        print_report(_terminal_safe(report))
    missing = [
        f"{stage.planned - stage.finished} of {stage.planned} {stage.title}"
        for stage in report.progress.stages
        if stage.finished < stage.planned
    ]
    what = ", ".join(missing) or "the text"
    print_text(f"report so far: {settings.out / 'report.html'} (missing: {what}). The same command continues.")


def _plan_time(
    settings: CompareSettings, plan: ComparisonPlan, runtime: Runtime, workers: Workers, started: float
) -> tuple[ComparisonPlan, TimePlan, Corpus | None]:
    """Time a step of each design, choose what the budget leaves open, and print the plan.

    Where a budget chooses, the text is prepared within it and returned. A resumed comparison keeps its choices. Steps
    are not timed then, nor where training takes only seconds.
    """
    budget = None
    if settings.budget is not None:
        budget = TimeBudget(parse_duration(settings.budget, "--budget"), started)
    chooses_tokens = budget is not None and all(
        value is None for value in (settings.tokens, settings.seconds, settings.flops)
    )
    chooses_seeds = budget is not None and settings.seeds is None
    if workers.share is not None and (chooses_tokens or chooses_seeds):
        raise ConfigError(
            f"--budget {settings.budget}: chooses tokens and seeds, and each of the {workers.share[1]} processes would "
            "choose its own; give --tokens and --seeds"
        )
    plan_file = settings.out / PLAN_FILE
    is_begun = plan_file.is_file()
    if is_begun and budget is not None:
        saved = read_json_file(plan_file)
        if chooses_tokens and saved.get("budget_kind") == "tokens":
            plan = replace(plan, budget_value=float(saved["budget_value"]))
        if chooses_seeds and isinstance(saved.get("seeds"), list):
            plan = replace(plan, seeds=tuple(saved["seeds"]))
        if any(name == "warmup" for name, _ in saved.get("budget_notes", ())):
            plan = replace(plan, warmup=saved["warmup"])
        if not settings.speed_context_length and saved.get("speed_contexts"):
            plan = replace(plan, speed_contexts=tuple(saved["speed_contexts"]))
    is_counted = not is_begun and plan.budget_kind == "tokens" and not chooses_tokens  # older ones may exceed it
    if is_counted and plan.warmup is not None and plan.warmup > plan.token_steps:
        reason = f"is longer than a run of {plan.token_steps} steps, which would never reach --lr"
        raise ConfigError(f"--warmup {plan.warmup}: {reason}; give fewer steps, or more --tokens")
    if is_begun:
        plan = replace(plan, budget_notes=tuple(map(tuple, joined_plan(plan_file, plan).get("budget_notes", ()))))
    comparison = Comparison(plan, None, settings.out, runtime, workers, "")
    if plan.budget_kind == "seconds":
        for sentence in describe_plan(comparison, None):
            print_status(sentence)
        return plan, TimePlan(budget), None
    if is_begun and budget is None and not settings.dry_run:
        return plan, TimePlan(), None
    are_steps_known = is_begun or not chooses_tokens
    steps = {entry.name: training_steps(comparison, entry) for entry in plan.entries if are_steps_known}
    if budget is None and not settings.dry_run and not is_worth_timing(comparison, steps):
        return plan, TimePlan(), None
    if is_begun and is_finished(comparison, choose_recall_tasks(comparison, steps)):
        for sentence in describe_plan(comparison, None, finished=True):
            print_status(sentence)
        return plan, TimePlan(budget), None
    times, text = time_steps(comparison), None
    if budget is not None and not is_begun:
        fit = partial(
            fit_plan,
            comparison,
            times,
            budget,
            chooses_tokens=chooses_tokens,
            chooses_seeds=chooses_seeds,
            chooses_contexts=not settings.speed_context_length,
        )
        plan = fit()
        if workers.share is None and not settings.dry_run:
            plan, text = _fit_with_text(plan, fit, budget)
    comparison = replace(comparison, plan=plan)
    steps = {entry.name: training_steps(comparison, entry) for entry in plan.entries}
    if plan.tuning is not None and plan.tuning.budget_kind == "seconds":
        make_search(plan, plan.tuning, steps, {name: steps[name] * times[name].step for name in steps})
    time_plan = TimePlan(budget, times)
    choices = time_plan.affordable(comparison, choose_recall_tasks(comparison, steps))
    seconds = estimate(comparison, times, steps, choices, SPEED_ROUNDS if budget is None else 1)
    for sentence in describe_plan(comparison, seconds, budget, begun=is_begun):
        print_status(sentence)
    return plan, time_plan, text


def _fit_with_text(
    plan: ComparisonPlan, fit: Callable[..., ComparisonPlan], budget: TimeBudget
) -> tuple[ComparisonPlan, Corpus | None]:
    """Prepare the text, and fit the plan again if that took longer than the budget reserves for it.

    fit: as `fit_plan`, with the seconds for the text. Raises MachineError if the text leaves too little time; what was
    encoded is kept.
    """
    began = time.monotonic()
    text = read_text(plan, began + MOST_TEXT * budget.remaining)
    seconds = time.monotonic() - began
    if seconds <= text_seconds(budget.seconds):
        return plan, text
    try:
        refitted = fit(text=0.0)
    except ConfigError:
        raise MachineError(
            f"--budget {format_duration(budget.seconds)}: preparing the text took {format_duration(seconds)}, which "
            "leaves too little; it is kept, so that the same command has the whole budget now"
        ) from None
    print_status(f"preparing the text took {format_duration(seconds)}; the rest of the budget is planned again")
    return refitted, text if refitted.budget_value == plan.budget_value else None


def comparison_plan(settings: CompareSettings, runtime: Runtime) -> ComparisonPlan:
    """The plan of a comparison. Raises ConfigError for invalid settings, before anything is trained."""
    budget_kind, budget_value = _budget(settings)
    seeds = DEFAULT_SEEDS if settings.seeds is None else settings.seeds
    if not 1 <= seeds <= 100:
        raise ConfigError(f"--seeds {seeds}: must be from 1 to 100")
    half_width = _stopping(settings, seeds)
    probes = select_probes(settings.recall)
    if settings.tokenizer is not None:
        Tokenizer.load(settings.tokenizer)  # fail before an unreadable one becomes part of the comparison
    scales = parse_scales(settings.lr_scale)
    tuning = _tuning(settings)
    paths = (*scales, *(tuned_paths(tuning.fields) if tuning is not None else ()))
    sources, overrides = split_designs(settings.designs)
    entries = load_entries(sources, overrides, varied_fields=parse_varied_fields(settings.vary), scales=paths)
    baseline = choose_baseline(entries, settings.baseline)
    vocabulary = settings.tokenizer or shared_vocab_size(entries, settings.vocab_size, DEFAULT_VOCAB_SIZE)
    equal = settings.equal
    if equal is not None:
        equal = f"{equal}@{settings.sequence_length}" if equal == "state" else equal
        entries = _equalize(settings, entries, baseline, equal, vocabulary)
    plan = ComparisonPlan(
        **shared(settings, ComparisonPlan)
        | {
            "entries": entries,
            "baseline": baseline,
            "equal_size": equal,
            "data": settings.data or ("stdlib",),
            "budget_kind": budget_kind,
            "budget_value": budget_value,
            "seeds": tuple(range(seeds)),
            "learning_rate": settings.lr,
            "lr_scale": scales,
            "vocab_size": vocabulary if isinstance(vocabulary, int) else None,
            "tokenizer": None if settings.tokenizer is None else os.path.realpath(settings.tokenizer),
            "device": kind_of_device(runtime.device),
            "part_files": tuple(os.path.realpath(file) for file in settings.part),
            "speed_contexts": tuple(sorted(set(settings.speed_context_length or SPEED_CONTEXTS))),
            "recall_probes": probes,
            "max_length_multiple": settings.extrapolate,
            "tuning": tuning,
            "until_resolved": half_width,
            "transfer_width": transfer_width_of(settings.transfer),
            "trackers": trackers_of(settings.track),
        }
    )
    _check(plan)
    return plan


def _tuning(settings: CompareSettings) -> TuningPlan | None:
    """The tuning plan, or None."""
    if not settings.tune:
        if settings.tune_budget is not None:
            raise ConfigError(f"--tune-budget {settings.tune_budget}: nothing is tuned; name a field with --tune")
        return None
    budget = parse_tuning_budget(settings.tune_budget or DEFAULT_TUNING_BUDGET)
    return TuningPlan(parse_tuned_fields(settings.tune), *budget)


def _stopping(settings: CompareSettings, seeds: int) -> float | None:
    """The half-width at which a comparison stops; None for a fixed number of seeds."""
    until_resolved = settings.until_resolved
    if until_resolved is None:
        return None
    if not 0 < until_resolved < float("inf"):
        raise ConfigError(f"--until-resolved {until_resolved:g}: must be a number of bits per byte above 0")
    if seeds < 2:
        raise ConfigError(f"--seeds {seeds}: must be at least 2 with --until-resolved, which starts with them")
    return until_resolved


def _budget(settings: CompareSettings) -> tuple[str, float]:
    """The unit of the training budget ("tokens", "seconds" or "flops") and its amount, for each run."""
    options = {"tokens": settings.tokens, "seconds": settings.seconds, "flops": settings.flops}
    budgets: dict[str, float] = {kind: value for kind, value in options.items() if value is not None}
    if len(budgets) > 1:
        flags = " and ".join(f"--{kind}" for kind in budgets)
        raise ConfigError(f"{flags}: all set the length of the training; give one of them")
    kind, value = next(iter(budgets.items()), ("tokens", float(DEFAULT_TOKENS)))
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{kind} {value:g}: must be a number above 0")
    return kind, value


def _terminal_safe(report: Report) -> Report:
    """The same report with every string safe to print."""
    return parse(Report, _safe(plain(report)))


def _safe(data: Any) -> Any:
    if isinstance(data, dict):
        return {_safe(key): _safe(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_safe(value) for value in data]
    return terminal_safe(data) if isinstance(data, str) else data


def _equalize(
    settings: CompareSettings, entries: tuple[DesignEntry, ...], baseline: str, kind: str, vocabulary: Path | int
) -> tuple[DesignEntry, ...]:
    """The entries resized, by width or by fields of mixers, so that all designs have the same size."""
    length = settings.sequence_length
    if length < 1:  # sizes are measured at this length, before the plan is checked
        raise ConfigError(f"--sequence-length {length}: must be at least 1")
    vocab_size = Tokenizer.load(vocabulary).vocab_size if isinstance(vocabulary, Path) else vocabulary
    return equalize_sizes(entries, baseline, kind, vocab_size, length, dtype_of(settings.precision))


def _check(plan: ComparisonPlan) -> None:
    """Raise ConfigError for a setting that training would reject, before any training starts."""
    Settings(steps=1, **shared(plan, Settings))
    multiple = plan.max_length_multiple
    if multiple < 1 or multiple & (multiple - 1):
        raise ConfigError(f"--extrapolate {multiple}: must be a power of two; 1 turns the test off")
    if min(plan.speed_contexts) < 1:
        raise ConfigError("--speed-context-length: must be at least 1")
    check_tuning(plan)


# Print a comparison to the terminal: a row for each design, effects of varied fields, the verdict, caveats.

JUDGMENT_STYLES = {"better": "bold green", "worse": "bold red"}
HEADER_LINES = 3
PLAIN_WIDTH = 100  # columns, where the output is not a terminal
LONGEST_NAME = 24  # columns of a name that is not folded


def print_report(report: Report, console: Console | None = None) -> None:
    """Print to standard output; as plain text of 100 columns where that is not a terminal."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
    console.print(report_tables(report))


def report_tables(report: Report) -> RenderableType:
    """All tables and sentences. Strings such as design names are never interpreted as rich markup."""
    parts: list[RenderableType] = [_design_table(report), Text()]
    # a single field's rows would repeat those of the designs
    fields = report.effects.fields
    for field in fields if len(fields) > 1 else []:
        parts += [_text_table(effect_table(field)), Text()]
    if report.equal_size:
        sizes = equal_size_table(report)
        titled = TextTable(["equal size: design", *sizes.header[1:]], sizes.rows)
        parts += [_text_table(titled), Text()]
    unresolved = resolution_table(report)
    if unresolved is not None:
        parts += [_text_table(unresolved), Text()]
    parts += [Text(sentence) for sentence in report.verdict]
    parts += [Text(sentence) for sentence in left_out_sentences(report)]
    parts += [Text(sentence) for sentence in (report.tuning.sentences if report.tuning else ())]
    if report.progress.stop_reason:
        parts.append(Text(report.progress.stop_reason))
    if report.warnings:
        parts.append(Text("\nCaveats:", style="bold yellow"))
        parts += [Text(f"• {warning}") for warning in report.warnings]
    return Group(*parts)


def _new_table() -> Table:
    return Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False, pad_edge=False)


def _text_table(text_table: TextTable) -> Table:
    table = _new_table()
    rows = [[row[0].replace(" − ", " −\n"), *row[1:]] for row in text_table.rows]
    are_short = all(len(line) <= LONGEST_NAME for row in rows for line in row[0].split("\n"))
    for index, title in enumerate(text_table.header):
        is_whole = index < 2 and are_short  # rich breaks numbers, too, where the last column could have been wrapped
        table.add_column(Text(title), justify="right" if index else "left", overflow="fold", no_wrap=is_whole)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _design_table(report: Report) -> Table:
    """The designs, lowest bits per byte first."""
    table = _new_table()
    costs = cost_columns(report)
    single = len(report.designs) == 1
    probe = first_probe(report)
    table.add_column("\n\ndesign", overflow="fold", min_width=14)
    table.add_column("\nbits per\nbyte", justify="right", no_wrap=True)
    if not single:
        baseline = Text(report.baseline)
        baseline.truncate(14, overflow="ellipsis")  # as wide as a difference
        table.add_column(Text("\ndifference to\n").append(baseline), no_wrap=True)
    if probe is not None:
        table.add_column(Text(f"\nright\n{probe[1].title}"), justify="right", no_wrap=True)
    for column in costs:
        table.add_column(_cost_header(column), justify="right", no_wrap=True)
    seeds = seed_counts(report)
    for design in ranked_designs(report):
        name = Text(design.name, style="bold")
        name.append(f"\n{format_number(design.parameters)} parameters", style="not bold dim")
        if len(set(seeds.values())) > 1:
            count = seeds[design.name]
            name.append(f"\n{count} seed{'' if count == 1 else 's'}", style="not bold dim")
        loss = Text(format_bits(mean_loss(design)))
        half = half_width(design.bits_per_byte)
        if half is not None:
            loss.append(f"\n±{half:.3f}", style="dim")
        cells = [] if single else [_difference_cell(report, design)]
        if probe is not None:
            cells.append(Text(format_percent(recall_accuracy(design, probe[0]))))
        # the header already has the unit of speeds
        cells += [_cost_cell(column, design.name) for column in costs]
        table.add_row(name, loss, *cells)
    return table


def _cost_header(column: CostColumn) -> Text:
    """Up to three short lines, aligned at the bottom: "decode", "tok/s", "at 8k"."""
    lines = column.name.lower().replace("training", "train").split()
    if column.format is format_rate:
        lines.append("tok/s")
    if column.context is not None:
        lines.append(f"at {format_context(column.context)}")
    return Text("\n" * (HEADER_LINES - len(lines)) + "\n".join(lines))


def _cost_cell(column: CostColumn, name: str) -> Text:
    """The value, and below it the range of its measurements where it has one."""
    cell, ends = Text(column.format(column.values[name]).replace(" tok/s", "")), column.range_text(name)
    # on two lines: beside each other they leave no room for the other costs
    return cell.append("\n" + ends.replace(" to ", "–\n"), style="dim") if ends else cell


def _difference_cell(report: Report, design: Design) -> Text:
    if design.name == report.baseline:
        return Text("baseline", style="dim")
    difference = difference_to_baseline(report, design.name)
    word = judgment(difference)
    style = JUDGMENT_STYLES.get(word.partition(",")[0], "dim")
    return Text(f"{format_difference(difference)}\n").append(word, style=style)
