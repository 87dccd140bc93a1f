"""The `heddle` command and its subcommands; errors are one sentence on stderr.

Heavy modules, such as torch, are imported only when a subcommand runs.
"""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from heddle import __version__
from heddle.distributed import is_first_rank, is_rank
from heddle.errors import (
    ConfigError,
    HeddleError,
    OtherRankFailed,
    home_folder,
    is_out_of_memory,
    lacks_compiler,
    nondeterministic_operation,
)
from heddle.progress import printable
from heddle.settings import Argument, Setting, VerbSettings, settings_of
from heddle.signals import Interrupted, interrupted_on_stop_signals

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# A verb's command, made from its settings: parameters, help, and the call of its function.

CONFIG, PRINT_CONFIG = "config", "print_config"


class Text(click.types.StringParamType):
    """A string, parsed by the settings; completes subcommands, else file names."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = tuple(words)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        """Return the subcommands with this prefix, or file completion if there is none."""
        from click.shell_completion import CompletionItem

        words = [CompletionItem(word) for word in self.words if incomplete and word.startswith(incomplete)]
        return words or [CompletionItem(incomplete, type="file")]


class VerbCommand(click.Command):
    """`heddle VERB`: reads settings and calls the verb's function with them; its docstring is the help."""

    def __init__(
        self, name: str, function: Callable[[Any], Any], settings: type[VerbSettings], subcommands: Mapping[str, str]
    ) -> None:
        self.function, self.settings, self.subcommands = function, settings, subcommands
        self.hidden_options: set[str] = set()  # from --help, not from --help-all
        found = list(settings_of(settings).values())
        arguments = [_argument(setting, subcommands) for setting in found if isinstance(setting.option, Argument)]
        options = [_option(setting) for setting in found if not isinstance(setting.option, Argument)]
        if shown := list(settings.SHOWN):
            options.sort(key=lambda option: shown.index(option.name) if option.name in shown else len(shown))
            self.hidden_options = {str(option.name) for option in options[len(shown) :]}
            options += self._options_of_all()
        super().__init__(name, params=[*arguments, *options], help=function.__doc__)

    def _options_of_all(self) -> list[click.Option]:
        """The options of every verb that hides some from --help."""
        read = "Read options from a YAML file or a run's folder; the command line overrides them."
        write = "Print all options as such a file and exit."
        return [
            click.Option([CONFIG, "--config"], metavar="FILE", type=Text(), help=read),
            click.Option([PRINT_CONFIG, "--print-config"], is_flag=True, help=write),
            _switch("--help-all", self._help_all, "Show all options."),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, or print its options."""
        settings = self.read_settings(ctx)
        if ctx.params.get(PRINT_CONFIG):
            import yaml

            options = settings.dump_for_any_folder()
            print(yaml.safe_dump(options, sort_keys=False, width=100, allow_unicode=True), end="")
            return None
        return self.function(settings)

    def read_settings(self, ctx: click.Context) -> VerbSettings:
        """Merge the command line over its --config file. Raises ConfigError for an unknown, missing or wrong option."""
        given = {
            name.rstrip("_"): value
            for name, value in ctx.params.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and name not in (CONFIG, PRINT_CONFIG)
        }
        file = ctx.params.get(CONFIG)
        if file is None:
            return self.settings.read(given)
        from heddle.storage.run_log import read_options

        return self.settings.read({**read_options(file), **given}, file)

    def _help_all(self, ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            self.hidden_options = set()
            print(self.get_help(ctx))
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, shown options and subcommands, in this order."""
        found = settings_of(self.settings).values()
        arguments = [(s.option.metavar, s.help) for s in found if isinstance(s.option, Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]  # arguments are listed above
        shown = [p for p in options if p.name not in self.hidden_options]
        with formatter.section("Options"):
            formatter.write_dl([record for p in shown if (record := p.get_help_record(ctx)) is not None])
        if self.subcommands:
            with formatter.section("Subcommands"):
                formatter.write_dl(list(self.subcommands.items()))


def _argument(setting: Setting, words: Iterable[str]) -> click.Argument:
    metavar = setting.option.metavar if setting.is_required else f"[{setting.option.metavar}]"
    return click.Argument(
        [setting.field],
        nargs=-1 if setting.repeats else 1,
        required=False,  # the settings say what is missing
        metavar=f"{metavar}..." if setting.repeats else metavar,
        type=Text(words),
    )


def _option(setting: Setting) -> click.Option:
    option, flag = setting.option, setting.flag
    is_switch = not option.metavar
    if is_switch and setting.default is None:
        flag = f"{flag}/{setting.off_flag}"
    return click.Option(
        [setting.field, flag, *([f"-{option.short}"] if option.short else [])],
        help=setting.help,
        metavar=option.metavar or None,
        is_flag=is_switch or None,
        multiple=setting.repeats,
        hidden=option.hidden,
        type=None if is_switch else Text(),
    )


# Completion in a shell: click's script, printed or installed.

COMPLETE = "_HEDDLE_COMPLETE"
# Where the script of each shell goes, and the line of its startup file that reads it.
_PLACES = {
    "bash": (".bash_completions/heddle.sh", ".bashrc", "source ~/.bash_completions/heddle.sh"),
    "zsh": (".zfunc/_heddle", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/heddle.fish", None, ""),
}


def completion_script() -> tuple[str, str]:
    """Return the name of the shell in $SHELL and its completion script. Raises ConfigError for an unsupported shell."""
    from click.shell_completion import get_completion_class

    shell = Path(os.environ.get("SHELL", "")).name
    found = get_completion_class(shell)
    if found is None or shell not in _PLACES:
        raise ConfigError(f"SHELL {shell}: completion is not supported; set SHELL to one of {', '.join(_PLACES)}")
    return shell, found(click.Group("heddle"), {}, "heddle", COMPLETE).source()


def show_completion(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the completion script."""
    if is_asked:
        print(completion_script()[1])
        context.exit()


def install_completion(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Write the completion script to the home folder, and source it in the shell's startup file."""
    if not is_asked:
        return
    from heddle.storage.file_io import write_file

    shell, script = completion_script()
    place, startup, line = _PLACES[shell]
    file = home_folder() / place
    write_file(file, script, "free space, or check your permissions")
    if startup is not None:
        startup_file = home_folder() / startup
        text = startup_file.read_text(encoding="utf-8") if startup_file.exists() else ""
        if line not in text.splitlines():
            with startup_file.open("a", encoding="utf-8") as stream:
                stream.write(f"\n{line}\n")
    print(f"{shell} completion is in {file}; open a new shell to use it")
    context.exit()


# The verbs that `heddle --help` lists, by purpose. The function of `show` is `heddle.cli.show.show`.
VERBS = {
    "Design": {
        "show": "Print a design's layers, parameters and costs.",
        "check": "Run the correctness tests on a design.",
        "plan": "Predict memory and speed on many GPUs.",
    },
    "Train": {"train": "Train a design, or resume a run.", "runs": "List runs and how they differ."},
    "Compare": {"compare": "Train designs side by side and report."},
    "Use": {
        "generate": "Generate text from prompts.",
        "chat": "Chat with a model, or two side by side.",
        "serve": "Serve a model over an OpenAI-compatible API.",
    },
    "Exchange": {
        "convert": "Convert a trained model to another design.",
        "import": "Import a transformers folder or a GGUF.",
        "export": "Convert a model for transformers or llama.cpp.",
    },
}
# Their subcommands. Each also works as a verb: `heddle ladder` is `heddle compare ladder`.
SUBCOMMANDS = {
    "show": {
        "presets": "List the presets, or print one.",
        "explore": "Choose parts on a page; see sizes and costs.",
        "inspect": "Plot attention maps.",
        "doctor": "Print this machine's limits and kernels.",
    },
    "runs": {"watch": "Follow runs on a live page.", "verify": "Check that a folder's files are intact."},
    "compare": {
        "judge": "Judge a stream of proposals, one by one.",
        "ladder": "Train designs at several sizes; predict larger.",
        "bench": "Measure the speed of designs on this machine.",
        "loss": "Measure trained models on a text.",
    },
    "export": {"conformance": "Check an engine with small models of each family."},
}
COMMANDS = [verb for verbs in (*VERBS.values(), *SUBCOMMANDS.values()) for verb in verbs]
MAX_SENTENCE = 400  # characters of an error message, not counting the paths in it
MAX_LIST = 3000  # characters of an error message that lists choices


class Heddle(click.Group):
    """The command: a verb's module is imported when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All verbs."""
        return COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A verb's command; None for an unknown one."""
        if cmd_name not in COMMANDS:
            return None
        name = "import_" if cmd_name == "import" else cmd_name
        function = getattr(import_module(f"heddle.cli.{name}"), name)
        settings = next(iter(function.__annotations__.values()))
        return VerbCommand(cmd_name, function, settings, SUBCOMMANDS.get(cmd_name, {}))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """`compare ladder …` is the verb ladder, and its help says so."""
        if len(args) > 1 and args[1] in SUBCOMMANDS.get(args[0], {}):
            return args[1], self.get_command(ctx, args[1]), args[2:]
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.exceptions.NoSuchCommand(args[0], possibilities=COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by purpose, then their subcommands."""
        for group, verbs in VERBS.items():
            with formatter.section(group):
                formatter.write_dl([(verb.ljust(8), summary) for verb, summary in verbs.items()])
        with formatter.section("More, alone or after its verb (`heddle show doctor`)"):
            formatter.write_dl([(verb.ljust(8), ", ".join(words)) for verb, words in SUBCOMMANDS.items()])


def _print_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        print(f"heddle {__version__}")
        context.exit()


def _switch(name: str, callback: Any, text: str) -> click.Option:
    return click.Option([name], is_flag=True, expose_value=False, is_eager=True, callback=callback, help=text)


app = Heddle(
    name="heddle",
    help="""Interchangeable, verified parts of language models: size, check, train, compare, generate, exchange.

    A design is a YAML, TOML or JSON file, preset:NAME or a checkpoint folder, with path.to.field=value overrides.""",
    params=[
        _switch("--version", _print_version, "Print the version and exit."),
        _switch("--install-completion", install_completion, "Install completion for the shell of $SHELL."),
        _switch("--show-completion", show_completion, "Print the completion script."),
    ],
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: 0 on success, 1 on a machine failure, 2 on a user error, 128 + N on signal N."""
    _replace_closed_streams()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if sys.getfilesystemencoding() == "ascii":  # a locale that says nothing, such as C
                stream.reconfigure(encoding="utf-8", errors="strict")
            if stream is not sys.stdin:  # characters that the terminal cannot show must not raise
                stream.reconfigure(errors="backslashreplace")
    sys.exit(run_command(sys.argv[1:] if arguments is None else list(arguments)))


def _replace_closed_streams() -> None:
    """Open closed standard streams on /dev/null, so that no file of ours gets descriptor 0, 1 or 2."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
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
        result = _invoke(arguments or ["--help"])
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
        return _handle_other(error, arguments)
    return result


def _invoke(arguments: list[str]) -> int:
    """Complete words, or run a verb; returns the exit code."""
    if instruction := os.environ.get(COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(app, {}, "heddle", COMPLETE, instruction)
    try:
        with app.make_context("heddle", list(arguments), obj=arguments) as context:
            app.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return 0


def _check_one_process(arguments: Sequence[str]) -> None:
    """Raise ConfigError under torchrun: each of its processes would do the same work and write the same files."""
    if is_rank() and arguments[:1] != ["train"]:
        raise ConfigError(
            f"WORLD_SIZE {os.environ['WORLD_SIZE']}: only train runs on several ranks; start this command "
            "without torchrun"
        )


def _flush_or_discard() -> None:
    """Flush stdout. If that fails, discard the rest, so that it does not fail again when the interpreter exits."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _handle_other(error: BaseException, arguments: Sequence[str]) -> int:
    """Exit codes of usage errors and of a lack of memory. Any other error is a bug and is raised again."""
    if isinstance(error, click.ClickException) and not is_first_rank():
        return 2  # every rank fails alike; only the first prints it
    if isinstance(error, click.ClickException):
        context, sentence = getattr(error, "ctx", None), error.format_message().rstrip(".")
        # click's parser does not say whose option it could not read
        verb = [name for name in arguments[:1] if name in COMMANDS]
        see = f"see {context.command_path if context else ' '.join(['heddle', *verb])} --help"
        return _print_error(f"{sentence} S{see[1:]}" if sentence.endswith("?") else f"{sentence}; {see}", 2)
    if is_out_of_memory(error):
        where = "".join(f" {note}" for note in getattr(error, "__notes__", ()))  # the rank
        return _print_error(f"out of memory{where}; try a smaller batch size, sequence length or design", 1)
    if lacks_compiler(error):
        remedy = "install one (g++ or clang), or leave --compile out"
        return _print_error(f"--compile: no C++ compiler works here; {remedy}", 1)
    if (operation := nondeterministic_operation(error)) is not None:
        remedy = "leave --deterministic out, or use --device cpu"
        return _print_error(f"--deterministic: torch has no deterministic form of {operation} here; {remedy}", 1)
    raise error


def _print_error(sentence: str, code: int) -> int:
    limit = MAX_LIST if "choices: " in sentence or sentence.count(", ") > 10 else MAX_SENTENCE
    paths = sum(len(word) for word in sentence.split(" ") if "/" in word and len(word) <= MAX_SENTENCE)
    if len(sentence) - paths > limit:  # it quotes a value too long to read
        start = re.sub(r"\s\S{0,60}$", "", sentence[: limit * 2 // 3])  # between words, where they are short
        end = re.sub(r"^\S{0,60}\s", "", sentence[-limit // 4 :])
        sentence = f"{start} … {end}"
    # A closed or full stderr must not change the exit code.
    with contextlib.suppress(OSError, ValueError):
        print(f"heddle: {printable(sentence)}", file=sys.stderr, flush=True)
    return code
