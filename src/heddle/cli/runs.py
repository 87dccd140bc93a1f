"""`heddle runs`: list the runs below a folder with their progress, losses and speed, and the fields that differ."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from heddle.errors import CheckpointError, ConfigError
from heddle.progress import format_amount, print_status, print_text, print_warning, printable, terminal_safe
from heddle.settings import Argument, Json, Option, VerbSettings

if TYPE_CHECKING:
    from heddle.lab.runs import RunSummary

_ORDERS = ("name", "time", "training", "validation", "final", "tokens", "tokens_per_second")
MAX_DIFFERENCES = 6  # fields shown for a run; JSON has all
WIDTH = 140  # characters of the table


@dataclass(frozen=True, kw_only=True)
class RunsSettings(VerbSettings):
    """Settings of `heddle runs`."""

    folder: Annotated[Path, Argument("FOLDER", "A folder of runs. [runs]")] = Path("runs")
    sort: Annotated[str, Option("NAME", f"Sort by {', '.join(_ORDERS)}.")] = "name"
    plot: Annotated[Path | None, Option("FILE", "Write a page with the curves of all runs: FILE.html.")] = None
    compare: Annotated[bool, Option("", "One column per run, with every field that differs.")] = False
    prune: Annotated[int | None, Option("N", "Delete all but the N newest checkpoints of each run.")] = None
    yes: Annotated[bool, Option("", "Delete without asking.")] = False
    json: Json = False


def runs(settings: RunsSettings) -> None:
    """List the runs below a folder, and the fields in which they differ.

    Training is the mean of the last 20 steps, validation its newest value, final the evaluation after the last step;
    speed is the median step's. Only --prune changes anything: it asks first, and leaves runs alone that are training,
    damaged checkpoints, and foreign files.
    """
    from heddle.lab.runs import find_runs, summarize, varied_fields

    folder, order = settings.folder, settings.sort
    if settings.prune is not None:
        if settings.compare or settings.plot is not None or settings.json:
            raise ConfigError(f"--prune {settings.prune}: only deletes; leave --compare, --plot and --json out")
        prune_runs(find_runs(folder), settings.prune, settings.yes)
        return
    if settings.yes:
        raise ConfigError("--yes: is for --prune; leave it out")
    if order not in _ORDERS:
        raise ConfigError(f"--sort: '{printable(order)}' is not a column; choose from {', '.join(_ORDERS)}")
    summaries = []
    found = find_runs(folder)
    for path in found:
        try:
            summaries.append(summarize(path, folder))
        except CheckpointError as error:  # the others can still be listed
            print_warning(str(error))
    summaries.sort(key=lambda run: (getattr(run, order) is None, getattr(run, order)))
    varying = varied_fields(summaries)
    if settings.plot is not None:
        from heddle.lab.pages.runs import write_runs_page

        write_runs_page(summaries, [_shown(fields) for fields in varying], settings.plot)
        print_status(f"page: {settings.plot}")
    if settings.json:
        rows = [asdict(run) | {"differences": fields} for run, fields in zip(summaries, varying, strict=True)]
        print(json.dumps(rows, indent=1))
    elif summaries and settings.compare:
        _print_columns(summaries, varying)
    elif summaries:
        _print_table(summaries, varying)
    elif not found:
        print_warning(f"{folder}: holds no runs; heddle train writes one")


def _print_table(summaries: Sequence["RunSummary"], varying: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from heddle.lab.runs import reading_note

    table = Table(box=None, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("step", "tokens", "training", "validation", "final", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("differs in", overflow="fold")
    for run, fields in zip(summaries, varying, strict=True):
        step = f"{run.step:,}" + (f" of {run.steps:,}" if run.steps and run.steps != run.step else "")
        speed = "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}"
        numbers = (step, f"{run.tokens:,}", _number(run.training), _number(run.validation), _number(run.final), speed)
        table.add_row(escape(terminal_safe(run.name)), *numbers, escape(terminal_safe(_shown(fields))))
    console = Console(highlight=False, width=WIDTH)
    console.print(table)
    metrics = sorted({run.metric.replace("_", " ") for run in summaries})
    console.print(f"training, validation and final: {' or '.join(metrics)}")
    console.print(escape(terminal_safe(reading_note(summaries))))


def _print_columns(summaries: Sequence["RunSummary"], varying: Sequence[dict[str, Any]]) -> None:
    """The same, transposed, with every field in which the runs differ."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from heddle.lab.runs import at_equal_tokens, reading_note

    tokens, values = at_equal_tokens(summaries)
    sizes = [run.peak_memory_bytes for run in summaries]
    rows: dict[str, list[str]] = {
        "step": [f"{run.step:,}" for run in summaries],
        "tokens": [f"{run.tokens:,}" for run in summaries],
        "training": [_number(run.training) for run in summaries],
        f"training at {tokens:,} tokens": [_number(value) for value in values],
        "validation": [_number(run.validation) for run in summaries],
        "final": [_number(run.final) for run in summaries],
        "tokens/s": ["" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}" for run in summaries],
        "memory": ["" if size is None else format_amount(size, "bytes") for size in sizes],
    } | {path: [_value(fields[path]) for fields in varying] for path in varying[0]}
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for run in summaries:
        table.add_column(escape(terminal_safe(run.name)), justify="right", overflow="fold")
    for title, cells in rows.items():
        table.add_row(*(escape(terminal_safe(text)) for text in (title, *cells)))
    console = Console(highlight=False, width=WIDTH)
    console.print(table)
    console.print(escape(terminal_safe(reading_note(summaries))))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _shown(fields: dict[str, Any]) -> str:
    """`seed=1, width=64 and 3 more`, without fields that are off in this run, unless all are."""
    on = {path: value for path, value in fields.items() if value is not None and value is not False} or fields
    texts = [f"{path.partition('.')[2]}={_value(value)}" for path, value in on.items()]
    rest = f" and {len(texts) - MAX_DIFFERENCES} more" if len(texts) > MAX_DIFFERENCES else ""
    return ", ".join(texts[:MAX_DIFFERENCES]) + rest


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


# `heddle runs --prune`: delete old checkpoints of runs, after asking.


def prune_runs(runs: Sequence[Path], keep: int, is_confirmed: bool) -> None:
    """Delete all but the `keep` newest intact checkpoints of each run that no process is using.

    Raises ConfigError if it must ask but stdin is not a terminal.
    """
    from heddle.storage.checkpoints import checkpoint_folder, checkpoint_steps, prune_checkpoints
    from heddle.storage.lock import InUseError, RunLock, is_locked

    if keep < 1:
        raise ConfigError(f"--prune {keep}: the newest checkpoint of a run is always kept; give at least 1")
    old = {run: [checkpoint_folder(run, step) for step in checkpoint_steps(run)[:-keep]] for run in runs}
    for run in runs:
        if old[run] and is_locked(run):
            print_status(f"{run}: is training; its checkpoints are kept")
            del old[run]
    count, size = sum(map(len, old.values())), sum(_bytes(path) for paths in old.values() for path in paths)
    if not count:
        print_status(f"runs: none has more than {keep} checkpoint{'s' if keep > 1 else ''} that could be deleted")
        return
    question = f"delete up to {count} checkpoints of {len([run for run in old if old[run]])} runs, "
    if not is_confirmed and not _is_agreed(f"{question}{format_amount(size, 'bytes')}?"):
        print_status("runs: nothing was deleted")
        return
    for run in filter(old.get, old):
        try:
            with RunLock(run):
                for path in prune_checkpoints(run, keep):
                    print_text(str(path))
        except InUseError as error:  # training started meanwhile
            print_warning(str(error))


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _is_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("--prune: asks before it deletes, but stdin is not a terminal; give --yes")
    print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
