"""The `heddle` command: verbs, and errors as one sentence on stderr. Nothing heavy is imported before a verb runs."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from heddle import __version__
from heddle.cli.check import check
from heddle.cli.compare import compare
from heddle.cli.generate import generate
from heddle.cli.show import show
from heddle.cli.train import train
from heddle.errors import HeddleError

app = typer.Typer(
    name="heddle",
    help="Interchangeable, verified parts of language models: size, check, train, compare, generate.",
    no_args_is_help=True,
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
}
for verb, summary in VERBS.items():
    app.command(short_help=summary)(verb)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"heddle {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """A design is a YAML, TOML or JSON file, preset:NAME or a checkpoint folder, with path.to.field=value overrides."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and exit: 0 on success, 2 on a user's mistake, 1 on the machine's failure, 130 and 143 on signals."""
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run a command line; returns its exit code."""
    try:
        result = app(arguments, prog_name="heddle", standalone_mode=False)
    except HeddleError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _say(f"{place}{error.strerror or error}; check the disk, its space and your permissions", 1)
    except MemoryError:
        return _say("out of memory; try a smaller --batch-size, --context or design", 1)
    except BaseException as error:
        return _other(error)
    return result if isinstance(result, int) else 0


def _other(error: BaseException) -> int:
    """Usage errors, signals that were answered with a save, and an accelerator without memory; others are bugs."""
    code = getattr(error, "exit_code", None)
    message = getattr(error, "format_message", None)
    if callable(message):
        return _say(f"{message().rstrip('.')}; see heddle --help", 2)
    if type(error).__name__ == "Abort":
        return _say("interrupted", 130)
    if isinstance(code, int):
        return code
    if type(error).__name__ == "OutOfMemoryError":
        return _say("the device is out of memory; try a smaller --batch-size, --context or design", 1)
    raise error


def _say(sentence: str, code: int) -> int:
    print(f"heddle: {sentence}", file=sys.stderr)
    return code
