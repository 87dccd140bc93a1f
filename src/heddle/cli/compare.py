"""`heddle compare`: which design serves you, how sure that is, and at what cost."""

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from heddle.cli.options import (
    DEFAULT_VOCABULARY,
    Data,
    Device,
    Json,
    LrScale,
    OptimizerName,
    PartFile,
    Precision,
    Quiet,
    Schedule,
    Threads,
    TokenizerFile,
    VocabSize,
    Warmup,
    open_session,
    parse_scales,
)
from heddle.errors import ConfigError

DEFAULT_TOKENS = 100_000


def compare(  # noqa: PLR0913 - one parameter an option
    designs: Annotated[
        list[str],
        typer.Argument(metavar="DESIGN|FIELD=VALUE", help="The first is the baseline; overrides reach all."),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="FIELD=VALUE,VALUE", help="Train a variant of each value; repeat: of each pair."
        ),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option("--baseline", metavar="NAME", help="The design that the others are compared with.")
    ] = None,
    equal: Annotated[
        str | None,
        typer.Option(
            "--equal", metavar="SIZE", help="Widths of the baseline's parameters, active-parameters or flops."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="The comparison's folder.")] = Path(
        "runs/compare"
    ),
    data: Data = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", help="Training tokens of each run. [100000]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="X", help="Or training seconds of each run.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option("--flops", metavar="X", help="Or training operations of each run.")
    ] = None,
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs of each design; seeds pair the designs.")
    ] = 3,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Rows of a step.")] = 4,
    context: Annotated[int, typer.Option("--context", metavar="N", help="Tokens of a row.")] = 256,
    lr: Annotated[float, typer.Option("--lr", metavar="X", help="Highest learning rate.")] = 3e-3,
    lr_scale: LrScale = None,
    optimizer: OptimizerName = "adamw",
    schedule: Schedule = "wsd",
    warmup: Warmup = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option("--speed-context", metavar="N", help="Context at which speed is measured; repeat."),
    ] = None,
    recall: Annotated[
        str, typer.Option("--recall", metavar="NAME", help="Probes of recall: mqar, all or none.")
    ] = "mqar",
    extrapolate: Annotated[
        int, typer.Option("--extrapolate", metavar="N", help="Longest text read, in contexts: 1 (off), 2, 4, 8 …")
    ] = 8,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train designs on the same text in the same order, measure them, and write report.html and report.json."""
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, parts=part, quiet=quiet)
        from heddle.analysis.comparison.plan import Plan, choose_baseline, read_entries, shared_vocabulary
        from heddle.analysis.comparison.probes import chosen
        from heddle.analysis.comparison.run import compare as run
        from heddle.analysis.comparison.table import print_table
        from heddle.analysis.comparison.variation import read_axes

        budget, value = _budget(tokens, seconds, flops)
        if not 1 <= seeds <= 100:
            raise ConfigError(f"--seeds {seeds}: must be from 1 to 100")
        probes = chosen(recall)
        named = [design for design in designs if "=" not in design or Path(design).exists()]
        overrides = [design for design in designs if design not in named]
        scales = parse_scales(lr_scale)
        entries = read_entries(named, overrides, axes=read_axes(vary or []), scales=scales)
        first = choose_baseline(entries, baseline)
        vocabulary = tokenizer or shared_vocabulary(entries, vocab_size, DEFAULT_VOCABULARY)
        if equal is not None:
            entries = _equalise(entries, first, equal, vocabulary, context)
        plan = Plan(
            entries=entries,
            baseline=first,
            equal=equal,
            data=tuple(data or ["stdlib"]),
            budget=budget,
            value=value,
            seeds=tuple(range(seeds)),
            batch_size=batch_size,
            context=context,
            learning_rate=lr,
            optimizer=optimizer,
            schedule=schedule,
            warmup=warmup,
            lr_scale=scales,
            precision=precision,
            vocab_size=vocabulary if isinstance(vocabulary, int) else None,
            tokenizer=None if tokenizer is None else str(tokenizer.resolve()),
            device=runtime.device,
            threads=threads,
            parts=tuple(str(file.resolve()) for file in part or []),
            contexts=tuple(sorted(set(contexts or [512, 2048, 8192]))),
            recall=probes,
            extrapolate=extrapolate,
        )
        _check(plan)
        report = run(plan, out, runtime, shlex.join(["heddle", *sys.argv[1:]]))
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
        print(f"report: {out / 'report.html'}")


def _budget(tokens: int | None, seconds: float | None, flops: float | None) -> tuple[str, float]:
    given = {"tokens": tokens, "seconds": seconds, "flops": flops}
    named: dict[str, float] = {name: value for name, value in given.items() if value is not None}
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(f'--{name}' for name in named)}: all say how long to train; give one of them")
    name, value = next(iter(named.items()), ("tokens", float(DEFAULT_TOKENS)))
    if not 0 < value < float("inf"):
        raise ConfigError(f"--{name} {value:g}: must be a number above 0")
    return name, value


def _equalise(entries: Any, baseline: str, kind: str, vocabulary: Path | int, context: int) -> Any:
    from heddle.analysis.comparison.equal import equalise
    from heddle.tokenization.tokenizer import Tokenizer

    if context < 1:  # before anything is measured at it
        raise ConfigError(f"--context {context}: must be at least 1")
    tokens = Tokenizer.load(vocabulary).vocab_size if isinstance(vocabulary, Path) else vocabulary
    return equalise(entries, baseline, kind, tokens, context)


def _check(plan: Any) -> None:
    from heddle.training.settings import Settings

    Settings(
        steps=1,
        batch_size=plan.batch_size,
        context=plan.context,
        learning_rate=plan.learning_rate,
        optimizer=plan.optimizer,
        schedule=plan.schedule,
        warmup=plan.warmup,
        lr_scale=plan.lr_scale,
        precision=plan.precision,
    )
    if plan.extrapolate < 1 or plan.extrapolate & (plan.extrapolate - 1):
        raise ConfigError(f"--extrapolate {plan.extrapolate}: must be a power of two; 1 reads nothing longer")
    if min(plan.contexts) < 1:
        raise ConfigError("--speed-context: must be at least 1")
