"""`heddle show`: the layers, parameters and costs of a design, measured on a model without weights."""

import json
import shlex
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from heddle.lab.show import ShowSettings
from heddle.progress import format_amount, terminal_safe
from heddle.session import load_parts

if TYPE_CHECKING:
    from rich.console import Console

PRINTED_OPERATIONS = 12
WIDTH = 80  # characters of a line


def show(settings: ShowSettings) -> None:
    """Print a design's layers, parameters, FLOPs and state size, and the kernel of each operation with the reasons."""
    if settings.schema:
        from heddle.model.config import schema

        load_parts(settings.part)
        print(json.dumps(schema(), indent=2))
        return
    from heddle.lab.show import show

    facts = show(settings).facts
    if settings.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_facts(settings, facts)


def print_profile(profiles: list[dict[str, Any]]) -> None:
    """Print the most expensive operations of each profiled step."""
    for profile in profiles:
        share = f"{profile['limit_share']:.0%} of this machine's limit"
        print(f"\n{profile['step']}: {1e3 * profile['seconds']:,.2f} ms, {share}")
        for operation in profile["operations"][:PRINTED_OPERATIONS]:
            where = f"{operation['part']}, {operation['phase']}"
            line = f"{operation['share']:5.1%} {1e3 * operation['seconds']:9.3f} ms  {operation['operation'][:30]:30}"
            print(f"  {line}  {where[:26]}")


def _print_facts(settings: ShowSettings, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console, design = Console(highlight=False), str(settings.design)
    config = facts["design"]
    console.print(f"[bold]{escape(terminal_safe(design))}[/bold]")
    active = facts["active_parameters"]
    active_text = "all active" if active == facts["parameters"] else f"{active:,} active"
    embedding = facts["embedding_parameters"]
    console.print(f"{facts['parameters']:,} parameters, {active_text} per token, {embedding:,} in the embedding")
    head = "tied" if config["head"]["tied"] else "untied"
    assumed = " assumed (vocab_size is not set)" if facts["vocab_size_assumed"] else ""
    console.print(f"width {config['width']}, vocabulary {config['vocab_size']:,}{assumed}, {head} head")
    around = ", ".join(f"{name} {phrase}" for name, phrase in facts["around_layers"].items())
    console.print(f"{escape(terminal_safe(around))}\n")
    _print_layers(console, facts)
    _print_contexts(console, facts)
    _print_engines(console, facts)
    console.print()
    for line in facts["exports_as"]:
        print(textwrap.fill(terminal_safe(line), WIDTH, subsequent_indent="    ", break_on_hyphens=False))
    print_kernels(facts["kernels"], with_reasons=False)
    parts = (word for part in settings.part for word in ("--part", str(part)))
    words = ["heddle", "doctor", design, *settings.overrides, *parts]
    print(f"\n{terminal_safe(shlex.join(words))} says why other kernels are not used.")
    print_profile(facts.get("profile", []))


def print_kernels(phases: dict[str, list[dict[str, Any]]], with_reasons: bool = True) -> None:
    """Print the kernel of each operation in each phase, and why better ones were rejected.

    Unused C++ operators are not mentioned; `heddle doctor` lists the ones in use.
    """
    from heddle.numerics.native import NOT_IN_USE

    for phase, choices in phases.items():
        print(f"\nkernels in {phase}")
        counts: Counter[tuple[str, str, tuple[tuple[str, ...], ...]]] = Counter()
        for choice in choices:  # they differ in operation, kernel and reasons
            reasons = tuple(map(tuple, choice["rejected"])) if with_reasons else ()
            counts[choice["operation"], choice["kernel"], reasons] += choice["calls"]
        for (operation, used, reasons), count in counts.items():
            print(f"  {operation} = {used}, {count} call{'s' * (count != 1)}")
            by_reason: dict[str, list[str]] = {}
            for kernel, reason in reasons:
                if reason != NOT_IN_USE:
                    by_reason.setdefault(reason, []).append(kernel)
            for reason, kernels in by_reason.items():
                print(terminal_safe(f"      not {', '.join(kernels)}: {reason}"))


def _print_layers(console: "Console", facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from heddle.model.size import visits_of

    table = Table(box=None, pad_edge=False)
    table.add_column("layers", justify="right")
    table.add_column("mixer and feed-forward", overflow="fold")
    length, rows = facts["contexts"][0]["context_length"], facts["batch_size"]
    for name in (
        "parameters of each",
        f"state of each\nat {length:,}{f', batch {rows}' * (rows > 1)}, {facts['dtype']}",
    ):
        table.add_column(name, justify="right")
    for stack in ("encoder", "layers", "multi_token"):
        block, times = _repeated(facts[stack])
        if times > 1:
            table.add_row(f"{times} times", "", "", "")
        for layer in block:
            parts = escape(terminal_safe(f"{layer['mixer']}\n{layer['feedforward']}"))
            state = "encoder" if stack == "encoder" else format_amount(layer["state_bytes"], "bytes")
            if stack == "multi_token":
                parts, state = f"multi-token {parts}", f"{state} in drafts"
            table.add_row(f"{visits_of(layer['count'], layer['weights'])} ×", parts, f"{layer['parameters']:,}", state)
    console.print(table)


def _repeated(layers: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The shortest block of entries of which `layers` is made, and how often it is repeated."""
    for length in range(1, len(layers) + 1):
        times, rest = divmod(len(layers), length)
        if not rest and layers[:length] * times == layers:
            return layers[:length], times
    return layers, 1


def _print_contexts(console: "Console", facts: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    further = "each further token" if facts["batch_size"] == 1 else "a token more of each"
    for name in ("context", "FLOPs per token", "FLOPs to decode one", "state", "position tables", further):
        table.add_column(name, justify="right")
    for context in facts["contexts"]:
        names = ("state_bytes", "position_table_bytes", "state_bytes_per_token")
        sequences = (1, 1, facts["batch_size"])  # a further token of each
        amounts = (format_amount(context[name] * count, "bytes") for name, count in zip(names, sequences, strict=True))
        flops = (context["flops_per_token"], context["decode_flops"])
        shown = ("–" if value is None else f"{value / 1e6:,.1f} M" for value in flops)
        table.add_row(f"{context['context_length']:,}", *shown, *amounts)
    rows = "one sequence" if facts["batch_size"] == 1 else f"{facts['batch_size']} sequences"
    lengths = sorted({context["encoder_length"] for context in facts["contexts"]} - {0})
    encoder = f" and an encoder output of {' or '.join(f'{length:,}' for length in lengths)} tokens" if lengths else ""
    console.print(f"\ncost of {rows}{encoder} in {facts['dtype']}")
    ahead = facts["contexts"][0]["multi_token_flops_per_token"]
    added = f", with {ahead / 1e6:,.1f} M more per token for multi-token modules" if ahead else ""
    console.print(f"forward FLOPs, the mean over the context; training takes 3 times as many{added}")
    if facts["contexts"][0]["decode_flops"] is not None:
        console.print("FLOPs to decode one: the last token, with the others in the state")
    if any(context["position_table_bytes"] for context in facts["contexts"]):
        console.print("the state includes the position tables")
    console.print(table)
    weights, longest = facts["weight_bytes"], facts["contexts"][-1]
    total = format_amount(weights + longest["state_bytes"], "bytes")
    both = f"; with the state at {longest['context_length']:,}: {total}" if longest["state_bytes"] else ""
    console.print(f"weights in {facts['dtype']}: {format_amount(weights, 'bytes')}{both}")


def _print_engines(console: "Console", facts: dict[str, Any]) -> None:
    """One row for each engine: what it allocates for the state in each context, or why it cannot."""
    from rich.table import Table

    if not facts["engines"]:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("state in engines", overflow="fold")
    for context in facts["contexts"]:
        table.add_column(f"{context['context_length']:,}", justify="right")
    for engine in facts["engines"]:
        name = (
            f"{engine['engine']}: {engine['reason']}" if engine["reason"] else f"{engine['engine']}, {engine['dtype']}"
        )
        table.add_row(name, *(format_amount(each, "bytes") for each in engine["state_bytes"]))
    console.print()
    console.print(table)
