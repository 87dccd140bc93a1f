"""`heddle show`: the layers, parameters and costs of a design, measured on a model without weights."""

import json
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.options import (
    Deterministic,
    Device,
    Json,
    Kernel,
    Overrides,
    PartFile,
    Precision,
    dtype_of,
    parse_kernels,
    with_vocab_size,
)
from heddle.cli.run_config import plain_design
from heddle.errors import ConfigError
from heddle.progress import format_amount, terminal_safe
from heddle.tokenization import DEFAULT_VOCAB_SIZE

if TYPE_CHECKING:
    from rich.console import Console

    from heddle.model.config import ModelConfig
    from heddle.model.decoder import Decoder

Profile = Annotated[bool, typer.Option("--profile", help="Measure where the time of a step goes on this CPU.")]
CONTEXT_LENGTHS = [2048, 8192, 32768, 131072]
MAX_COUNT = 10**9
PROFILED_LENGTH = 512  # tokens of a profiled text, where no context length was asked for
PRINTED_OPERATIONS = 12


def show(
    design: Annotated[
        Any, typer.Argument(metavar="DESIGN", parser=plain_design, help="A file, preset:NAME or a folder.")
    ] = None,
    overrides: Overrides = None,
    context_length: Annotated[
        list[int] | None,
        typer.Option("--context-length", metavar="N", help="Tokens in the context; repeatable. [2048 8192 …]"),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", help="Sequences in the batch.")] = 1,
    encoder_length: Annotated[
        int | None,
        typer.Option("--encoder-length", metavar="N", help="Tokens that cross-attention reads. [the context length]"),
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of designs, for editors.")] = False,
    profile: Profile = False,
    device: Device = "auto",
    precision: Precision = "fp32",
    deterministic: Deterministic = False,
    kernel: Kernel = None,
    part: PartFile = None,
    as_json: Json = False,
) -> dict[str, Any] | None:
    """Print a design's layers, parameters, FLOPs and state size, and the kernel of each operation with the reasons."""
    from heddle.config import load_part

    for file in part or []:
        load_part(file)
    if schema:
        from heddle.model.config import schema as make_schema

        print(json.dumps(make_schema(), indent=2))
        return None
    if design is None:
        raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a checkpoint folder")
    context_lengths = context_length or CONTEXT_LENGTHS
    counts = [*context_lengths, batch_size, 1 if encoder_length is None else encoder_length]
    if min(counts) < 1 or max(counts) > MAX_COUNT:
        reason = "at least 1" if min(counts) < 1 else "at most 10^9"
        raise ConfigError(f"show: --context-length, --batch-size and --encoder-length must be {reason}")
    from heddle.model.load_config import load_config, read_design

    data = read_design(design, overrides or [])  # a design that is too large is refused before torch is imported
    from heddle.exchange.family_match import family_lines
    from heddle.exchange.imported_checkpoint import imported_family
    from heddle.model.config import refuse_overflow
    from heddle.numerics.dispatch import choose_deterministic
    from heddle.numerics.kernels import kernels
    from heddle.runtime import device_name

    equal_bits = choose_deterministic() if deterministic else nullcontext()
    with kernels(**parse_kernels(kernel)), refuse_overflow(), equal_bits:
        config = with_vocab_size(load_config(data), DEFAULT_VOCAB_SIZE)
        # Kernels are chosen as on the device, which this machine need not have.
        facts = measure(config, context_lengths, batch_size, dtype_of(precision), device_name(device), encoder_length)
        facts["exports_as"] = family_lines(config, imported_family(design) if isinstance(design, str) else None)
        if profile:
            facts["profile"] = _profile(config, precision, batch_size, context_length)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print_facts(str(design), facts)
    return facts


def _profile(
    config: "ModelConfig", precision: str, rows: int, context_length: list[int] | None
) -> list[dict[str, Any]]:
    """Profile a training step and a token on this CPU; returns the tables as plain data."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler writes lines of its own to stderr
    from heddle.lab.profile import profile_design
    from heddle.runtime import set_up_runtime

    set_up_runtime("cpu")
    profiles = profile_design(config, rows, (context_length or [PROFILED_LENGTH])[0], precision)
    return [
        {
            "step": profile.name,
            "seconds": profile.seconds,
            "profiled_seconds": profile.profiled_seconds,
            "limit_share": profile.limit_share,
            "operations": [operation._asdict() for operation in profile.operations],
        }
        for profile in profiles
    ]


def print_profile(profiles: list[dict[str, Any]]) -> None:
    """Print the operations that take most of each profiled step."""
    for profile in profiles:
        share = f"{profile['limit_share']:.0%} of this machine's limit"
        print(f"\n{profile['step']}: {1e3 * profile['seconds']:,.2f} ms, {share}")
        for operation in profile["operations"][:PRINTED_OPERATIONS]:
            where = f"{operation['part']}, {operation['phase']}"
            line = f"{operation['share']:5.1%} {1e3 * operation['seconds']:9.3f} ms  {operation['operation'][:30]:30}"
            print(f"  {line}  {where[:26]}")


def measure(
    config: "ModelConfig",
    context_lengths: list[int],
    batch_size: int,
    dtype: Any,
    device: str,
    encoder_length: int | None = None,
) -> dict[str, Any]:
    """Everything `show` prints, as plain data. encoder_length None: as many tokens as each context."""
    from heddle.model.size import build_distinct_layers, measure_size

    model = build_distinct_layers(config, dtype)
    sizes = [measure_size(model, length, batch_size, encoder_length) for length in context_lengths]
    first = sizes[0]
    kernels = kernels_by_phase(model, context_lengths[0], device, encoder_length)
    return {
        "design": config.dump(),
        "parameters": first.parameters,
        "active_parameters": first.active_parameters,
        "embedding_parameters": first.embedding_parameters,
        "encoder": [vars(layer) for layer in first.encoder],
        "layers": [vars(layer) for layer in first.layers],
        "batch_size": batch_size,
        "contexts": [
            {
                "context_length": context.context_length,
                "encoder_length": context.encoder_length,
                "flops_per_token": context.flops_per_token,
                "state_bytes": context.state_bytes,
                "state_bytes_per_token": context.state_bytes_per_token,
                "position_table_bytes": context.position_table_bytes,
            }
            for context in sizes
        ],
        "device": device,
        "kernels": kernels,
    }


def kernels_by_phase(
    model: "Decoder", context_length: int, device: str, encoder_length: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The kernels of a meta model on a device, as plain data: in training, and in decoding if it has a state."""
    from heddle.model.size import measure_kernel_choices

    phases = {"training": (context_length, -1), "decode": (1, context_length)}
    kernels = {}
    for phase, (queries, cached_tokens) in phases.items():
        if cached_tokens >= 0 and not model.causal:
            continue
        counts = measure_kernel_choices(model, queries, cached_tokens, device, encoder_length)
        kernels[phase] = [
            {
                "operation": choice.operation,
                "kernel": choice.kernel,
                "calls": calls,
                "rejected": [list(pair) for pair in choice.rejected],
            }
            for choice, calls in counts.items()
        ]
    return kernels


def _print_facts(design: str, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    config = facts["design"]
    console.print(f"[bold]{escape(terminal_safe(design))}[/bold]")
    active = facts["active_parameters"]
    active_text = "all active" if active == facts["parameters"] else f"{active:,} active"
    embedding = facts["embedding_parameters"]
    console.print(f"{facts['parameters']:,} parameters, {active_text} for each token, {embedding:,} in the embedding")
    head = "tied" if config["head"]["tied"] else "untied"
    console.print(f"width {config['width']}, vocabulary {config['vocab_size']:,}, {head} head\n")
    _print_layers(console, facts)
    _print_contexts(console, facts)
    console.print()
    for line in facts["exports_as"]:
        console.print(terminal_safe(line), markup=False, soft_wrap=True)
    print_kernels(facts["kernels"])
    print_profile(facts.get("profile", []))


def print_kernels(phases: dict[str, list[dict[str, Any]]]) -> None:
    """Print the kernel of each operation in each phase, and why better ones were rejected."""
    for phase, choices in phases.items():
        print(f"\nkernels in {phase}")
        for choice in choices:
            calls = "1 call" if choice["calls"] == 1 else f"{choice['calls']} calls"
            print(f"  {choice['operation']} = {choice['kernel']}, {calls}")
            for kernel, reason in choice["rejected"]:
                print(terminal_safe(f"      not {kernel}: {reason}"))


def _print_layers(console: "Console", facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("layers", justify="right")
    table.add_column("mixer and feed-forward", overflow="fold")
    for name in ("parameters", f"state at {facts['contexts'][0]['context_length']:,}"):
        table.add_column(name, justify="right")
    for stack in ("encoder", "layers"):
        for layer in facts[stack]:
            parts = escape(terminal_safe(f"{layer['mixer']}\n{layer['feedforward']}"))
            state = "encoder" if stack == "encoder" else format_amount(layer["state_bytes"], "bytes")
            table.add_row(f"{layer['count']} ×", parts, f"{layer['parameters']:,}", state)
    console.print(table)


def _print_contexts(console: "Console", facts: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("context", "FLOPs per token", "state", "of it positions", "each further token"):
        table.add_column(name, justify="right")
    for context in facts["contexts"]:
        names = ("state_bytes", "position_table_bytes", "state_bytes_per_token")
        amounts = (format_amount(context[name], "bytes") for name in names)
        table.add_row(f"{context['context_length']:,}", f"{context['flops_per_token'] / 1e6:,.1f} M", *amounts)
    rows = "one sequence" if facts["batch_size"] == 1 else f"{facts['batch_size']} sequences"
    lengths = sorted({context["encoder_length"] for context in facts["contexts"]} - {0})
    encoder = f" and an encoder output of {' or '.join(f'{length:,}' for length in lengths)} tokens" if lengths else ""
    console.print(f"\ncost of {rows}{encoder}; FLOPs of a forward pass, training takes 3 times as many")
    console.print(table)
