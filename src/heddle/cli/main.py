"""The `heddle` command and its subcommands; errors are one sentence on stderr.

Heavy modules, such as torch, are imported only when a subcommand runs.
"""

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from heddle import __version__
from heddle.cli.bench import bench
from heddle.cli.chat import chat
from heddle.cli.check import check
from heddle.cli.compare import compare
from heddle.cli.convert import convert
from heddle.cli.doctor import doctor
from heddle.cli.explore import explore
from heddle.cli.export import export
from heddle.cli.generate import generate
from heddle.cli.import_ import import_
from heddle.cli.inspect import inspect
from heddle.cli.ladder import ladder
from heddle.cli.plan import plan
from heddle.cli.presets import presets
from heddle.cli.ranks import is_first_rank, is_rank
from heddle.cli.runs import runs
from heddle.cli.serve import serve
from heddle.cli.show import show
from heddle.cli.train import train
from heddle.cli.verify import verify
from heddle.cli.watch import watch
from heddle.errors import ConfigError, HeddleError, OtherRankFailed, is_out_of_memory, nondeterministic_operation
from heddle.progress import printable
from heddle.signals import Interrupted, interrupted_on_stop_signals

app = typer.Typer(
    name="heddle",
    help="Interchangeable, verified parts of language models: size, check, train, compare, generate, exchange.",
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[Callable[..., object], str] = {
    show: "Print a design's layers, parameters and costs.",
    presets: "List the presets, or print one.",
    check: "Run the correctness tests on a design.",
    doctor: "Print this machine's limits and kernels.",
    bench: "Measure the speed of designs here.",
    train: "Train a design, or resume a run.",
    compare: "Train designs side by side and report.",
    ladder: "Train designs at several sizes; predict more.",
    runs: "List runs, and what differs.",
    watch: "Follow runs on a live page.",
    verify: "Say whether a folder's files are intact.",
    plan: "Predict memory and speed on many GPUs.",
    generate: "Generate text from prompts.",
    chat: "Talk to a model, or to two side by side.",
    serve: "Answer requests over HTTP as OpenAI does.",
    convert: "Convert a trained model to another design.",
    explore: "Choose parts on a page; see what follows.",
    inspect: "Plot attention maps.",
    import_: "Convert a transformers checkpoint.",
    export: "Convert a model for transformers or llama.cpp.",
}
MAX_SENTENCE = 400  # characters of an error, without the paths that it names
MAX_LIST = 3000  # characters of one that lists choices

for command, summary in COMMANDS.items():
    app.command(command.__name__.rstrip("_"), short_help=summary)(command)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"heddle {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A design is a YAML, TOML or JSON file, preset:NAME or a checkpoint folder, with path.to.field=value overrides."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and exit: 0 on success, 2 on a user's error, 1 on a machine's failure, 128 + its number on a signal."""
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character the terminal cannot show is no error
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:] if arguments is None else list(arguments)))


def _replace_closed_streams() -> None:
    """Let closed standard streams lead nowhere, so that no file of ours gets the number of one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def run_command(arguments: list[str]) -> int:
    """Run a command line; returns its exit code."""
    try:
        with interrupted_on_stop_signals():
            return _run_command(arguments)
    except Interrupted as interrupted:
        _flush_or_discard()
        return _print_error(interrupted.sentence, interrupted.exit_code)


def _run_command(arguments: list[str]) -> int:
    try:
        _check_one_process(arguments)
        result = app(arguments or ["--help"], prog_name="heddle", standalone_mode=False, obj=arguments)
        sys.stdout.flush()
    except OtherRankFailed as error:
        return error.exit_code
    except HeddleError as error:
        return _print_error(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _print_error("interrupted", 130)
    except BrokenPipeError:  # such as `heddle … | head`
        _flush_or_discard()
        return 0
    except OSError as error:
        _flush_or_discard()
        file = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return _print_error(f"{file}{error.strerror}; choose another name", 2)
        return _print_error(f"{file}{error.strerror or error}; check the disk, its space and your permissions", 1)
    except Interrupted:
        raise
    except BaseException as error:
        return _handle_other(error)
    return result if isinstance(result, int) else 0


def _check_one_process(arguments: Sequence[str]) -> None:
    """Raise ConfigError under torchrun: each of its processes would do the same work and write the same files."""
    if is_rank() and arguments[:1] != ["train"]:
        raise ConfigError(
            f"WORLD_SIZE {os.environ['WORLD_SIZE']}: of all commands only train runs on several ranks; start it "
            "without torchrun"
        )


def _flush_or_discard() -> None:
    """Flush stdout. If that fails, discard the rest, so that it does not fail again when the interpreter exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _handle_other(error: BaseException) -> int:
    """Exit codes of usage errors and lack of memory. Any other error is a bug and is raised again."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):  # typer caught it first
        return 0
    if isinstance(error, SystemExit) and not error.code:  # completion has printed what it knows
        return 0
    code = getattr(error, "exit_code", None)
    message = getattr(error, "format_message", None)
    if callable(message) and not is_first_rank():
        return 2  # all ranks find it, and the first one says it
    if callable(message):
        context = getattr(error, "ctx", None)
        return _print_error(f"{message().rstrip('.')}; see {context.command_path if context else 'heddle'} --help", 2)
    if type(error).__name__ == "Abort":
        return _print_error("interrupted", 130)
    if isinstance(code, int):
        return code
    if is_out_of_memory(error):
        return _print_error("out of memory; try a smaller batch size, sequence length or design", 1)
    if (operation := nondeterministic_operation(error)) is not None:
        remedy = "leave --deterministic out, or use --device cpu"
        return _print_error(f"--deterministic: torch has no deterministic form of {operation} here; {remedy}", 1)
    raise error


def _print_error(sentence: str, code: int) -> int:
    limit = MAX_LIST if "choices: " in sentence or sentence.count(", ") > 10 else MAX_SENTENCE
    paths = sum(len(word) for word in sentence.split(" ") if "/" in word and len(word) <= MAX_SENTENCE)
    if len(sentence) - paths > limit:  # it quotes a value that nobody can read
        sentence = f"{sentence[: limit * 2 // 3]} … {sentence[-limit // 4 :]}"
    # A closed or full stderr must not change the exit code.
    with contextlib.suppress(OSError, ValueError):
        print(f"heddle: {printable(sentence)}", file=sys.stderr, flush=True)
    return code
