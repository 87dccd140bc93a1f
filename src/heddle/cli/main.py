"""The `heddle` command: verbs, and errors as one sentence on stderr. Nothing heavy is imported before a verb runs."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from heddle import __version__
from heddle.cli.check import check
from heddle.cli.compare import compare
from heddle.cli.export import export
from heddle.cli.generate import generate
from heddle.cli.import_ import import_
from heddle.cli.inspect import inspect
from heddle.cli.show import show
from heddle.cli.train import train
from heddle.errors import HeddleError, is_out_of_memory
from heddle.progress import printable

app = typer.Typer(
    name="heddle",
    help="Interchangeable, verified parts of language models: size, check, train, compare, generate, exchange.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
VERBS: dict[Callable[..., None], str] = {
    show: "What a design is and what it costs.",
    check: "Hold a design to every law.",
    train: "Train a design on a text, or continue.",
    compare: "Train designs side by side and report.",
    generate: "Write on from prompts.",
    inspect: "Draw what every head looks at.",
    import_: "Read a model of transformers.",
    export: "Write a model for transformers and others.",
}
for verb, summary in VERBS.items():
    app.command(verb.__name__.rstrip("_"), short_help=summary)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"heddle {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A design is a YAML, TOML or JSON file, preset:NAME or a checkpoint folder, with path.to.field=value overrides."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and exit: 0 on success, 2 on a user's mistake, 1 on the machine's failure, 130 and 143 on signals."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot write a character must not end the work
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit code."""
    try:
        result = app(arguments or ["--help"], prog_name="heddle", standalone_mode=False)
        sys.stdout.flush()
    except HeddleError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # the reader has seen enough
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        place = f"{error.filename}: " if error.filename else ""
        return _say(f"{place}{error.strerror or error}; check the disk, its space and your permissions", 1)
    except BaseException as error:
        return _other(error)
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """What could not be written must not fail again when the interpreter ends."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _other(error: BaseException) -> int:
    """Usage errors, signals that were answered with a save, and a machine without memory; others are bugs."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # typer met it first
        return 0
    code = getattr(error, "exit_code", None)
    message = getattr(error, "format_message", None)
    if callable(message):
        context = getattr(error, "ctx", None)
        return _say(f"{message().rstrip('.')}; see {context.command_path if context else 'heddle'} --help", 2)
    if type(error).__name__ == "Abort":
        return _say("interrupted", 130)
    if isinstance(code, int):
        return code
    if is_out_of_memory(error):
        return _say("out of memory; try a smaller --batch-size, --context or design", 1)
    raise error


def _say(sentence: str, code: int) -> int:
    # A closed or full stderr must not change the exit code.
    with contextlib.suppress(OSError, ValueError):
        print(f"heddle: {printable(sentence)}", file=sys.stderr, flush=True)
    return code
