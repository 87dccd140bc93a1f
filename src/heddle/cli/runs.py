"""`heddle runs`: the runs below a folder: how far, how good, how fast, and in what they differ."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heddle.cli.options import Json
from heddle.errors import CheckpointError, ConfigError
from heddle.progress import print_warning, printable, terminal_safe

if TYPE_CHECKING:
    from heddle.analysis.runs import RunSummary

_ORDERS = ("name", "time", "training", "validation", "tokens", "tokens_per_second")
MAX_DIFFERENCES = 6  # fields shown for a run; JSON has all
WIDTH = 140  # characters of the table


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder of runs. [runs]")] = Path("runs"),
    order: Annotated[str, typer.Option("--sort", metavar="NAME", help=f"By {', '.join(_ORDERS)}.")] = "name",
    page: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Write a page with the curves of all runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the runs below a folder, and the fields in which they differ.

    Training is the mean of the last 20 steps, validation its newest value; speed
    is the median of all steps. No run is changed.
    """
    from heddle.analysis.runs import find_runs, summarize, varied_fields

    if order not in _ORDERS:
        raise ConfigError(f"--sort: '{printable(order)}' is no column; choose from {', '.join(_ORDERS)}")
    summaries = []
    for path in find_runs(folder):
        try:
            summaries.append(summarize(path, folder))
        except CheckpointError as error:  # the others can still be listed
            print_warning(str(error))
    summaries.sort(key=lambda run: (getattr(run, order) is None, getattr(run, order)))
    varying = varied_fields(summaries)
    if page is not None:
        from heddle.analysis.pages.runs import write_runs_page

        write_runs_page(summaries, [_shown(fields) for fields in varying], page)
    if as_json:
        rows = [asdict(run) | {"differences": fields} for run, fields in zip(summaries, varying, strict=True)]
        print(json.dumps(rows, indent=1))
    elif summaries:
        _print_table(summaries, varying)
    else:
        print_warning(f"{folder}: holds no runs; heddle train writes one")


def _print_table(summaries: Sequence["RunSummary"], varying: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("step", "tokens", "training", "validation", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("differs in", overflow="fold")
    for run, fields in zip(summaries, varying, strict=True):
        step = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps and run.steps != run.step else "")
        speed = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        numbers = (step, f"{run.tokens:,}", _number(run.training), _number(run.validation), speed)
        table.add_row(escape(terminal_safe(run.name)), *numbers, escape(terminal_safe(_shown(fields))))
    console = Console(highlight=False, width=WIDTH)
    console.print(table)
    metrics = sorted({run.metric.replace("_", " ") for run in summaries})
    console.print(f"training and validation: {' or '.join(metrics)}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _shown(fields: dict[str, Any]) -> str:
    """`settings.seed=1, design.width=64 and 3 more`."""
    values = (
        (path, f"{value:.4g}" if isinstance(value, float) else json.dumps(value)) for path, value in fields.items()
    )
    texts = [f"{path.partition('.')[2]}={value}" for path, value in values]
    rest = f" and {len(texts) - MAX_DIFFERENCES} more" if len(texts) > MAX_DIFFERENCES else ""
    return ", ".join(texts[:MAX_DIFFERENCES]) + rest
