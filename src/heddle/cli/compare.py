"""`heddle compare`: train designs on the same data and measure their quality, its uncertainty, and their cost."""

import json
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.calls import ComparedDesigns
from heddle.cli.counts import token_count
from heddle.cli.devices import Devices, RunProcesses, Share, WorkerCount, choose_devices, parse_process_share
from heddle.cli.durations import parse_budget, parse_stopping
from heddle.cli.live_page import open_live_page
from heddle.cli.options import (
    CudaOptions,
    Data,
    Deterministic,
    Device,
    Json,
    LrScale,
    OptimizerName,
    PartFile,
    Quiet,
    Schedule,
    Tf32,
    Threads,
    TokenizerFile,
    TrainingPrecision,
    VocabSize,
    Warmup,
    dtype_of,
    open_session,
    parse_scales,
)
from heddle.cli.train_options import Track, Transfer, trackers_of, transfer_width_of
from heddle.errors import ConfigError
from heddle.progress import print_text, terminal_safe
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from heddle.analysis.comparison.plan import ComparisonPlan
    from heddle.analysis.comparison.tuning_fields import TuningPlan

DEFAULT_TUNING_BUDGET = "1"  # as much training as the comparison itself


def compare(
    context: typer.Context,
    designs: Annotated[
        list[str],
        typer.Argument(metavar="DESIGN|FIELD=VALUE", help="The first is the baseline; overrides apply to all."),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="FIELD=VALUE,VALUE", help="Train one design per value; repeat for every combination."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="The design that all others are compared with.")
    ] = None,
    equal: Annotated[
        str | None,
        typer.Option("--equal", metavar="SIZE", help="Equal parameters, active-parameters, flops, state or state@N."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The comparison's folder.")] = Path(
        "runs/compare"
    ),
    data: Data = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", parser=token_count, help="Training tokens of each run. [100k]"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="X", help="Or the training time of each run.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option("--flops", metavar="X", help="Or the training FLOPs of each run.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs of each design, with random seeds 0 to N-1.")
    ] = 3,
    until_resolved: Annotated[
        float | None,
        typer.Option(
            "--until-resolved", metavar="X", help="Then more seeds, until each difference to the best is known to ± X."
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Of all training until resolved: 90s, 30m, 2h.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Sequences per step.")] = 4,
    sequence_length: Annotated[int, typer.Option("--sequence-length", metavar="N", help="Tokens per sequence.")] = 256,
    lr: Annotated[float, typer.Option("--lr", metavar="X", help="Peak learning rate.")] = 3e-3,
    lr_scale: LrScale = None,
    transfer: Transfer = None,
    optimizer: OptimizerName = "adamw",
    schedule: Schedule = "wsd",
    warmup: Warmup = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            "--tune", metavar="FIELD=VALUES", help="Tune for each design: lr=0.001..0.02 or lr=0.001,0.004; repeatable."
        ),
    ] = None,
    tune_budget: Annotated[
        str | None,
        typer.Option("--tune-budget", metavar="X", help="Of the comparison's training, or a time such as 10m. [1]"),
    ] = None,
    speed_context_length: Annotated[
        list[int] | None,
        typer.Option("--speed-context-length", metavar="N", help="Context length for the speed test; repeatable."),
    ] = None,
    recall: Annotated[
        str, typer.Option("--recall", metavar="NAMES", help="Recall tasks: auto, all, none, mqar, parity …")
    ] = "auto",
    extrapolate: Annotated[
        int, typer.Option("--extrapolate", metavar="N", help="Test texts up to N sequence lengths: 1 (off), 2, 4, 8 …")
    ] = 8,
    track: Track = None,
    device: Device = "auto",
    devices: Devices = None,
    share: Share = None,
    precision: TrainingPrecision = "fp32",
    tf32: Tf32 = False,
    deterministic: Deterministic = False,
    threads: Threads = None,
    workers: WorkerCount = None,
    nproc: RunProcesses = 1,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Port of the live report on 127.0.0.1. [any free one]")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the live report in the browser.")] = False,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> ComparedDesigns:
    """Train designs on the same text in the same order, measure them, and write report.html and report.json."""
    with ExitStack() as stack:
        cuda = CudaOptions(tf32, deterministic)
        names = choose_devices(devices, device, workers, nproc)
        process_share = parse_process_share(share, os.environ)
        device = names[0] if names else device
        runtime = open_session(stack, device=device, threads=threads, parts=part, quiet=quiet, cuda=cuda)
        from heddle.analysis.comparison.plan import ComparisonPlan, choose_baseline, load_entries, shared_vocab_size
        from heddle.analysis.comparison.probes import select_probes
        from heddle.analysis.comparison.run import compare as run
        from heddle.analysis.comparison.tasks import choose_workers
        from heddle.analysis.comparison.terminal import print_report
        from heddle.analysis.comparison.tuning_fields import tuned_paths
        from heddle.analysis.comparison.variation import parse_varied_fields
        from heddle.runtime import kind_of_device
        from heddle.tokenization.tokenizer import Tokenizer

        budget_kind, budget_value = parse_budget(tokens, seconds, flops)
        if not 1 <= seeds <= 100:
            raise ConfigError(f"--seeds {seeds}: must be from 1 to 100")
        half_width, time_budget = parse_stopping(until_resolved, budget, seeds)
        recall_probes = select_probes(recall)
        if tokenizer is not None:
            Tokenizer.load(tokenizer)  # one that cannot be read must not become part of a comparison
        sources = [design for design in designs if "=" not in design or Path(design).exists()]
        overrides = [design for design in designs if design not in sources]
        scales = parse_scales(lr_scale)
        tuning = _tuning(context, tune, tune_budget)
        paths = (*scales, *(tuned_paths(tuning.fields) if tuning is not None else ()))
        entries = load_entries(sources, overrides, varied_fields=parse_varied_fields(vary or []), scales=paths)
        baseline_name = choose_baseline(entries, baseline)
        vocabulary = tokenizer or shared_vocab_size(entries, vocab_size, DEFAULT_VOCAB_SIZE)
        if equal is not None:
            equal = f"{equal}@{sequence_length}" if equal == "state" else equal
            entries = _equalize(entries, baseline_name, equal, vocabulary, sequence_length, precision)
        plan = ComparisonPlan(
            entries=entries,
            baseline=baseline_name,
            equal_size=equal,
            data=tuple(data or ["stdlib"]),
            budget_kind=budget_kind,
            budget_value=budget_value,
            seeds=tuple(range(seeds)),
            batch_size=batch_size,
            sequence_length=sequence_length,
            learning_rate=lr,
            optimizer=optimizer,
            schedule=schedule,
            warmup=warmup,
            lr_scale=scales,
            precision=precision,
            vocab_size=vocabulary if isinstance(vocabulary, int) else None,
            tokenizer=None if tokenizer is None else os.path.realpath(tokenizer),
            device=kind_of_device(runtime.device),
            threads=threads,
            part_files=tuple(os.path.realpath(file) for file in part or []),
            speed_contexts=tuple(sorted(set(speed_context_length or [512, 2048, 8192]))),
            recall_probes=recall_probes,
            max_length_multiple=extrapolate,
            tuning=tuning,
            until_resolved=half_width,
            time_budget=time_budget,
            transfer_width=transfer_width_of(transfer),
            tf32=tf32,
            deterministic=deterministic,
            trackers=trackers_of(track),
        )
        _check(plan)
        chosen = choose_workers(plan, runtime, count=workers, devices=names, share=process_share, ranks=nproc)
        is_served = open_page or port is not None or not (quiet or process_share)
        live = open_live_page(stack, port, open_page, "the report") if is_served else None
        report = run(plan, out, runtime, shlex.join(["heddle", *sys.argv[1:]]), workers=chosen, live=live)
    if as_json:
        print_text(json.dumps(report, indent=2))
    else:
        print_report(_terminal_safe(report))
        print_text(f"report: {out / 'report.html'}")
    return ComparedDesigns(out, report)


def _tuning(context: typer.Context, tune: list[str] | None, budget: str | None) -> "TuningPlan | None":
    """What is tuned, or None. An option that a tuned field replaces is refused, since it would have no effect."""
    from heddle.analysis.comparison.tuning_fields import TuningPlan, parse_tuned_fields, parse_tuning_budget

    if not tune:
        if budget is not None:
            raise ConfigError(f"--tune-budget {budget}: nothing is tuned; name a field with --tune")
        return None
    fields = parse_tuned_fields(tune)
    for field in fields:
        source = context.get_parameter_source(field.name)
        if source is not None and source.name == "COMMANDLINE":
            flag = f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"{flag} and --tune {field.name}: both set {field.name}; leave one out")
    return TuningPlan(fields, *parse_tuning_budget(budget or DEFAULT_TUNING_BUDGET))


def _terminal_safe(data: Any) -> Any:
    """The same data, in which every text may be shown on a terminal: designs are named after files."""
    if isinstance(data, dict):
        return {key: _terminal_safe(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_terminal_safe(value) for value in data]
    return terminal_safe(data) if isinstance(data, str) else data


def _equalize(
    entries: Any, baseline: str, kind: str, vocabulary: Path | int, sequence_length: int, precision: str
) -> Any:
    """The entries with new widths, or with new fields of mixers, such that all designs have the same size."""
    from heddle.analysis.comparison.equal_size import equalize_sizes
    from heddle.tokenization.tokenizer import Tokenizer

    if sequence_length < 1:  # sizes are measured at this length, before the plan is checked
        raise ConfigError(f"--sequence-length {sequence_length}: must be at least 1")
    vocab_size = Tokenizer.load(vocabulary).vocab_size if isinstance(vocabulary, Path) else vocabulary
    return equalize_sizes(entries, baseline, kind, vocab_size, sequence_length, dtype_of(precision))


def _check(plan: "ComparisonPlan") -> None:
    """Raise ConfigError for a setting that training would refuse, before any training starts."""
    from heddle.analysis.comparison.tuning import check_tuning
    from heddle.training.settings import Settings

    Settings(
        steps=1,
        batch_size=plan.batch_size,
        sequence_length=plan.sequence_length,
        learning_rate=plan.learning_rate,
        optimizer=plan.optimizer,
        schedule=plan.schedule,
        warmup=plan.warmup,
        lr_scale=plan.lr_scale,
        precision=plan.precision,
    )
    multiple = plan.max_length_multiple
    if multiple < 1 or multiple & (multiple - 1):
        raise ConfigError(f"--extrapolate {multiple}: must be a power of two; 1 turns the test off")
    if min(plan.speed_contexts) < 1:
        raise ConfigError("--speed-context-length: must be at least 1")
    check_tuning(plan)
