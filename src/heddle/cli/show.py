"""`heddle show`: what a design is and what it costs, read off the model built without memory."""

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.options import (
    DEFAULT_VOCABULARY,
    Device,
    Json,
    Kernel,
    Overrides,
    PartFile,
    Precision,
    dtype_of,
    open_session,
    read_config,
    with_vocabulary,
)
from heddle.errors import ConfigError
from heddle.progress import amount

if TYPE_CHECKING:
    from heddle.model.config import ModelConfig
    from heddle.model.size import Size


def show(  # noqa: PLR0913 - one parameter an option
    design: Annotated[str | None, typer.Argument(metavar="DESIGN", help="A file, preset:NAME or a folder.")] = None,
    overrides: Overrides = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", metavar="N", help="Tokens of context; repeat. [2048 …]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", help="Rows.")] = 1,
    memory: Annotated[
        int | None, typer.Option("--memory", metavar="N", help="Tokens that cross-attention reads. [the context]")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of designs, for editors.")] = False,
    device: Device = "auto",
    precision: Precision = "fp32",
    kernel: Kernel = None,
    part: PartFile = None,
    as_json: Json = False,
) -> None:
    """Layers, parameters, FLOPs, state bytes, and the kernel chosen for each operation with the reasons."""
    with ExitStack() as stack:
        runtime = open_session(stack, device=device, kernels=kernel, parts=part)
        if schema:
            from heddle.model.schema import schema as make_schema

            print(json.dumps(make_schema(), indent=2))
            return
        if design is None:
            raise ConfigError("DESIGN: is missing; give a file, preset:NAME or a checkpoint folder")
        contexts = context or [2048, 8192, 32768, 131072]
        if min(contexts) < 1 or batch < 1 or (memory is not None and memory < 1):
            raise ConfigError("show: --context, --batch and --memory must be at least 1")
        config = with_vocabulary(read_config(design, overrides), DEFAULT_VOCABULARY)
        facts = measure(config, contexts, batch, dtype_of(precision), runtime.device, memory)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(design, facts)


def measure(
    config: "ModelConfig", contexts: list[int], batch: int, dtype: Any, device: str, memory: int | None = None
) -> dict[str, Any]:
    """Everything `show` prints, as plain data; `memory` None reads one as long as each context."""
    from heddle.exchange.fit import service
    from heddle.model.size import choices, size

    sizes = [size(config, context, batch, dtype, memory) for context in contexts]
    first: Size = sizes[0]
    calls = {"training": (contexts[0], -1), "decode": (1, contexts[0])}
    chosen = {}
    for name, (queries, past) in calls.items():
        if past >= 0 and first.state_bytes == 0:
            continue
        counted = choices(config, queries, past, dtype, device, memory)
        chosen[name] = [
            {"operation": c.operation, "form": c.form, "calls": n, "against": [list(pair) for pair in c.against]}
            for c, n in counted.items()
        ]
    return {
        "design": config.dump(),
        "parameters": first.parameters,
        "active_parameters": first.active_parameters,
        "embedding_parameters": first.embedding_parameters,
        "encoder": [vars(layer) for layer in first.encoder],
        "layers": [vars(layer) for layer in first.layers],
        "batch": batch,
        "contexts": [
            {
                "context": one.context,
                "memory": one.memory,
                "flops_per_token": one.flops_per_token,
                "state_bytes": one.state_bytes,
                "state_bytes_per_token": one.state_bytes_per_token,
                "table_bytes": one.table_bytes,
            }
            for one in sizes
        ],
        "kernels": chosen,
        "serves_as": service(config).lines(),
    }


def _print(design: str, facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    config = facts["design"]
    console.print(f"[bold]{escape(design)}[/bold]")
    active = facts["active_parameters"]
    used = "all active" if active == facts["parameters"] else f"{active:,} active"
    console.print(
        f"{facts['parameters']:,} parameters, {used} for each token, {facts['embedding_parameters']:,} in the embedding"
    )
    head = "tied" if config["head"]["tied"] else "untied"
    console.print(f"width {config['width']}, vocabulary {config['vocab_size']:,}, {head} head\n")
    layers = Table(box=None, pad_edge=False)
    layers.add_column("layers", justify="right")
    layers.add_column("mixer and feed-forward", overflow="fold")
    for name in ("parameters", f"state at {facts['contexts'][0]['context']:,}"):
        layers.add_column(name, justify="right")
    for name in ("encoder", "layers"):
        for row in facts[name]:
            parts = escape(f"{row['mixer']}\n{row['feedforward']}")
            kept = "encoder" if name == "encoder" else amount(row["state_bytes"], "bytes")
            layers.add_row(f"{row['count']} ×", parts, f"{row['parameters']:,}", kept)
    console.print(layers)
    costs = Table(box=None, pad_edge=False)
    for name in ("context", "FLOPs per token", "state", "of it positions", "each further token"):
        costs.add_column(name, justify="right")
    for one in facts["contexts"]:
        state = (amount(one[name], "bytes") for name in ("state_bytes", "table_bytes", "state_bytes_per_token"))
        costs.add_row(f"{one['context']:,}", f"{one['flops_per_token'] / 1e6:,.1f} M", *state)
    rows = "one row" if facts["batch"] == 1 else f"{facts['batch']} rows"
    read = sorted({one["memory"] for one in facts["contexts"]} - {0})
    beside = f" beside a memory of {' or '.join(f'{length:,}' for length in read)} tokens" if read else ""
    console.print(f"\ncost of {rows}{beside}; FLOPs of a forward pass, training takes 3 times as many")
    console.print(costs)
    console.print()
    for line in facts["serves_as"]:
        console.print(line, markup=False, soft_wrap=True)
    for name, chosen in facts["kernels"].items():
        console.print(f"\nkernels in {name}")
        for one in chosen:
            calls = "1 call" if one["calls"] == 1 else f"{one['calls']} calls"
            console.print(f"  {one['operation']} = {one['form']}, {calls}")
            for form, reason in one["against"]:
                console.print(f"      not {form}: {reason}", markup=False, soft_wrap=True)
