"""`heddle bench`: training, prefill and decoding speed of designs on this machine, side by side and beside a peer."""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from heddle.errors import ConfigError, MachineError
from heddle.progress import format_amount, print_status, print_text, terminal_safe
from heddle.session import ALL_NEEDS, open_session
from heddle.settings import Argument, Json, Option, SessionSettings, TrainingPrecision, parse_length
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from heddle.lab.bench.run import Bench, MeasuredWorkload, Measurement, Quartiles
    from heddle.model.config import ModelConfig

SEQUENCE_LENGTH, CONTEXT_LENGTHS = 512, (128, 2048)
MAX_ROUNDS, MAX_LENGTH = 1000, 2**20
_TRAINED_BYTES = 16  # of a float32 weight, its gradient and AdamW's two moments


@dataclass(frozen=True, kw_only=True)
class BenchSettings(SessionSettings):
    """Settings of `heddle bench`."""

    designs: Annotated[
        tuple[str, ...], Argument("DESIGN|FIELD=VALUE", "Designs, compared with the first; overrides apply to all.")
    ]
    peer: Annotated[
        str | None, Option("NAME", "transformers: also measure its model of each design, with its defaults and tuned.")
    ] = None
    batch_size: Annotated[int, Option("N", "Sequences per training step.")] = 4
    sequence_length: Annotated[
        int | None, Option("N", "Tokens per sequence. [512, or fewer learned positions]", parse_length)
    ] = None
    context_length: Annotated[
        tuple[int, ...], Option("N", "Tokens before the decoded one; repeatable. [128 2048]", parse_length)
    ] = ()
    rounds: Annotated[int, Option("N", "Measurements of each workload.")] = 9
    precision: TrainingPrecision = "fp32"
    json: Json = False


def bench(settings: BenchSettings) -> None:
    """Measure training, prefill and decoding in rounds; print medians, quartiles and shares of the machine's limits.

    Each design runs in its own process. Run nothing else meanwhile.
    """
    for option, values, most in (
        ("--batch-size", [settings.batch_size], MAX_LENGTH),
        ("--sequence-length", [] if settings.sequence_length is None else [settings.sequence_length], MAX_LENGTH),
        ("--context-length", settings.context_length, MAX_LENGTH),
        ("--rounds", [settings.rounds], MAX_ROUNDS),
    ):
        for value in values:
            if not 1 <= value <= most:
                raise ConfigError(f"{option} {value}: must be from 1 to {most:,}")
    with ExitStack() as stack:
        runtime = open_session(stack, settings)
        from heddle.lab.bench.run import (
            PEER_PROCESSES,
            PREFILL,
            TOKEN,
            TOKENS,
            TRAINING,
            Bench,
            Workload,
            check_peer,
            measure_limits,
            run_bench,
        )
        from heddle.lab.compare.plan import load_entries, split_designs
        from heddle.machine import with_measured_choices
        from heddle.model.load_config import with_vocab_size

        entries = load_entries(*split_designs(settings.designs))
        configs = {entry.name: with_vocab_size(entry.config, DEFAULT_VOCAB_SIZE) for entry in entries}
        check_peer(settings.peer, configs)
        _check_memory(configs, len(PEER_PROCESSES[settings.peer]), runtime.device)
        shortest = min(configs.values(), key=lambda config: config.position_limit or MAX_LENGTH)
        length = settings.sequence_length or shortest.usual_length(SEQUENCE_LENGTH)
        usual = {shortest.usual_length(context, TOKENS) for context in CONTEXT_LENGTHS}
        contexts = sorted(set(settings.context_length) or usual)
        training = Workload(TRAINING, settings.batch_size, length)
        decoding = [Workload(kind, 1, context) for context in contexts for kind in (PREFILL, TOKEN)]
        runtime = with_measured_choices(runtime, settings.threads, ALL_NEEDS)
        asked = Bench(
            designs=configs,
            measured=[training, *decoding],
            rounds=settings.rounds,
            precision=settings.precision,
            peer=settings.peer,
            device=runtime.device,
            threads=runtime.threads,
            choices=runtime.choices.dump(),
            part_files=[str(file) for file in settings.part],
        )
        limits = measure_limits(runtime.device)
        if not (settings.json or settings.quiet):
            print_status(_describe_limits(limits, asked))
        results = run_bench(asked, limits, (lambda _: None) if settings.json else _print_workload)
    if settings.json:
        facts = [_facts(result) for result in results]
        print_text(json.dumps({"limits": limits, "results": facts}, indent=2))


def _check_memory(configs: "dict[str, ModelConfig]", sides: int, device: str) -> None:
    """Raise MachineError if the processes together need more memory for weights and moments than the device has."""
    import torch

    from heddle.model.size import build_distinct_layers, parameter_counts
    from heddle.training.job import device_memory

    with torch.no_grad():
        counts = [parameter_counts(build_distinct_layers(config, torch.float32))[0] for config in configs.values()]
    needed, memory = sides * _TRAINED_BYTES * sum(counts), device_memory(device)
    if needed > memory:
        raise MachineError(
            f"bench: {sides * len(counts)} models in training take {format_amount(needed, 'bytes')} or more, "
            f"and the device has {format_amount(memory, 'bytes')}; name fewer or smaller designs"
        )


def _describe_limits(limits: dict[str, float], asked: "Bench") -> str:
    products = limits["fp32_flops_per_second" if asked.precision == "fp32" else "bf16_flops_per_second"]
    return (
        f"{asked.device}, {asked.threads} threads: matmuls reach {products / 1e9:,.0f} GFLOP/s, "
        f"memory is read at {limits['read_bytes_per_second'] / 1e9:,.0f} GB/s"
    )


def _print_workload(result: "MeasuredWorkload") -> None:
    """Print a table of one workload."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    again = f"; measured again: {result.repeated}" if result.repeated else ""
    unsteady = "; the machine was busy, do not rely on this" if result.is_noisy else ""
    table = Table(box=None, pad_edge=False, title=f"{result.workload.name}{again}{unsteady}", title_justify="left")
    table.add_column("design", overflow="fold")
    for name in ("ms (quartiles)", "tokens/s", "of the limit", "time vs. the first"):
        table.add_column(name, justify="right")
    for row in result.measurements:
        name = row.design if row.side == "heddle" else f"{row.design}, {row.side}"
        seconds = _format(row.seconds, 1e3)
        table.add_row(escape(terminal_safe(name)), seconds, f"{row.tokens_per_second:,.0f}", f"{row.limit_share:.0%}",
                      _ratio(row))  # fmt: skip
    Console(highlight=False).print("", table)


def _format(values: "Quartiles", scale: float) -> str:
    digits = 1 if values.median * scale >= 10 else 3
    median, low, high = (f"{value * scale:,.{digits}f}" for value in values)
    return f"{median} ({low}–{high})"


def _ratio(row: "Measurement") -> str:
    median, low, high = row.ratio
    return "" if low == high == 1 else f"{median:.2f} ({low:.2f}–{high:.2f})"


def _facts(result: "MeasuredWorkload") -> dict[str, Any]:
    """A measured workload as plain values."""
    return {
        "workload": result.workload._asdict(),
        "turns_taken_again": result.repeated,
        "is_noisy": result.is_noisy,
        "measurements": [
            row._asdict() | {"seconds": row.seconds._asdict(), "ratio": row.ratio._asdict()}
            for row in result.measurements
        ],
    }
