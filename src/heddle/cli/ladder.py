"""`heddle ladder`: train designs at several sizes, and predict their loss and its cost at a larger one."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.counts import parse_count
from heddle.cli.options import (
    Data,
    Device,
    Json,
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
)
from heddle.errors import ConfigError
from heddle.progress import format_duration, print_text
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from heddle.lab.compare.tables import TextTable
    from heddle.lab.ladder.run import Ladder

MAX_COUNT = 20  # a larger number given as sizes is a number of parameters
DEFAULT_TOKENS = "20"
IRREDUCIBLE = ("shared", "separate")


def ladder(
    designs: Annotated[
        list[str],
        typer.Argument(metavar="DESIGN|FIELD=VALUE", help="The first is the baseline; overrides apply to all."),
    ],
    sizes: Annotated[
        str,
        typer.Option("--sizes", metavar="N|N,N,...", help="How many, by halves from the first design down; or sizes."),
    ] = "5",
    tokens_per_parameter: Annotated[
        str | None,
        typer.Option(
            "--tokens-per-parameter",
            metavar="X|X,X,...",
            help="Training tokens of each run per parameter; several give L(N, D), as branches of one run. [20]",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="N", help="Parameters to predict, such as 20M. [10 times the largest size]"),
    ] = None,
    target_tokens: Annotated[
        str | None,
        typer.Option(
            "--target-tokens", metavar="D", help="Tokens to predict. [the most per parameter, times --target]"
        ),
    ] = None,
    target_flops: Annotated[
        str | None,
        typer.Option("--target-flops", metavar="C", help="Budget whose best size is predicted. [6·N·D of the target]"),
    ] = None,
    irreducible: Annotated[
        str, typer.Option("--irreducible", metavar="NAME", help="The loss that no size removes: shared or separate.")
    ] = "shared",
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="Runs of each size, with random seeds 0 to N-1.")
    ] = 2,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="The ladder's folder; a later call may add to it.")
    ] = Path("runs/ladder"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, tokens and the time they take; train nothing.")
    ] = False,
    data: Data = None,
    tokenizer: TokenizerFile = None,
    vocab_size: VocabSize = None,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Sequences per step.")] = 4,
    sequence_length: Annotated[int, typer.Option("--sequence-length", metavar="N", help="Tokens per sequence.")] = 256,
    lr: Annotated[
        float, typer.Option("--lr", metavar="X", help="Peak learning rate at each design's own width.")
    ] = 3e-3,
    lr_exponent: Annotated[
        float,
        typer.Option("--lr-exponent", metavar="X", help="At other widths --lr is in proportion to width to the -X."),
    ] = 0.5,
    optimizer: OptimizerName = "adamw",
    schedule: Schedule = "wsd",
    warmup: Warmup = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: Threads = None,
    part: PartFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train designs at several sizes, fit loss over size, and predict a larger size with intervals.

    Writes ladder.html and ladder.json. The same call continues; another adds designs, sizes or seeds.
    """
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, threads=threads, parts=part, quiet=quiet)
        from heddle.lab.compare.plan import load_entries, shared_vocab_size
        from heddle.lab.ladder.plan import LadderPlan, LadderSettings
        from heddle.lab.ladder.run import prepare_ladder, run_ladder
        from heddle.tokenization.tokenizer import Tokenizer

        if irreducible not in IRREDUCIBLE:
            raise ConfigError(f"--irreducible {irreducible}: unknown choice; choices: {', '.join(IRREDUCIBLE)}")
        if tokenizer is not None:
            Tokenizer.load(tokenizer)  # one that cannot be read must not become part of a ladder
        sources = [design for design in designs if "=" not in design or Path(design).exists()]
        entries = load_entries(sources, [design for design in designs if design not in sources])
        plan = LadderPlan(
            entries=entries,
            sizes=parse_sizes(sizes),
            seeds=seeds,
            target=None if target is None else parse_count("--target", target),
            target_tokens=None if target_tokens is None else parse_count("--target-tokens", target_tokens, "tokens"),
            target_flops=None if target_flops is None else parse_count("--target-flops", target_flops, "FLOPs"),
            names_tokens=tokens_per_parameter is not None,
            share_irreducible=irreducible != "separate",
            threads=threads,
            settings=LadderSettings(
                data=tuple(data or ["stdlib"]),
                tokens_per_parameter=parse_ratios(tokens_per_parameter or DEFAULT_TOKENS),
                batch_size=batch_size,
                sequence_length=sequence_length,
                learning_rate=lr,
                rate_exponent=lr_exponent,
                optimizer=optimizer,
                schedule=schedule,
                warmup=warmup,
                precision=precision,
                vocab_size=None if tokenizer else shared_vocab_size(entries, vocab_size, DEFAULT_VOCAB_SIZE),
                tokenizer=None if tokenizer is None else os.path.realpath(tokenizer),
                device=runtime.device,
                part_files=tuple(os.path.realpath(file) for file in part or []),
            ),
        )
        if dry_run:
            _print_estimate(prepare_ladder(plan, out, runtime), as_json)
            return
        report = run_ladder(plan, out, runtime, shlex.join(["heddle", *sys.argv[1:]]))
    if as_json:
        print_text(json.dumps(report, indent=2))
    else:
        _print_report(report)
        print_text(f"report: {out / 'ladder.html'}")


def parse_ratios(text: str) -> tuple[float, ...]:
    """Parse `20` or `5,10,20`, in any order. Raises ConfigError."""
    try:
        return tuple(sorted({float(ratio) for ratio in text.split(",")}))
    except ValueError:
        raise ConfigError(f"--tokens-per-parameter {text}: must be numbers such as 20, or 5,10,20") from None


def parse_sizes(text: str) -> int | tuple[float, ...]:
    """Parse `5` as a count, and `60k,120k` or a number above 20 as sizes. Raises ConfigError."""
    if text.isdecimal() and len(text) <= 2 and int(text) <= MAX_COUNT:
        return int(text)
    return tuple(parse_count("--sizes", size.strip()) for size in text.split(","))


def _print_estimate(ladder: "Ladder", as_json: bool) -> None:
    """The sizes, tokens and seconds of each run, and of all."""
    from heddle.lab.compare.tables import TextTable, format_number
    from heddle.lab.ladder.run import time_steps

    seconds, seeds = time_steps(ladder), ladder.plan.seeds
    rows: list[dict[str, Any]] = [
        {
            "design": name,
            "parameters": rung.parameters,
            "width": rung.width,
            "tokens": ladder.steps(rung, ratio) * ladder.plan.settings.tokens_per_step,
            "learning_rate": ladder.learning_rate(name, rung),
            "seconds": seconds[name][index] * ladder.new_steps(rung, ratio),
        }
        for name, rungs in ladder.rungs.items()
        for index, rung in enumerate(rungs)
        for ratio in ladder.ratios
    ]
    count = ladder.workers.count
    total = seeds * sum(row["seconds"] for row in rows) / count
    if as_json:
        print_text(json.dumps({"runs": rows, "seeds": seeds, "workers": count, "seconds": total}, indent=2))
        return
    header = ["design", "parameters", "width", "tokens", "rate", "seconds a run"]
    cells = [
        [
            row["design"],
            format_number(row["parameters"]),
            str(row["width"]),
            format_number(row["tokens"]),
            f"{row['learning_rate']:.2g}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    _print_table(TextTable(header, cells, ""))
    workers = f", {count} at once" if count > 1 else ""
    print_text(f"{seeds * len(rows)} runs{workers}: about {format_duration(total)}. Nothing was trained.")


def _print_report(report: dict[str, Any]) -> None:
    from heddle.lab.ladder.report import best_size_table, cost_table, held_out_table, prediction_table, rung_table

    for design in report["designs"]:
        print_text(design["name"])
        _print_table(rung_table(design))
    if report["predictions"]:
        _print_table(prediction_table(report))
    if report["best_sizes"]:
        _print_table(best_size_table(report))
    if report["equal_loss"]:
        _print_table(cost_table(report))
    if report["held_out"]:
        _print_table(held_out_table(report))
    for sentence in report["verdict"]:
        print_text(sentence)
    print_text("\nCaveats:")
    for warning in report["warnings"]:
        print_text(f"• {warning}")


def _print_table(table: "TextTable") -> None:
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
