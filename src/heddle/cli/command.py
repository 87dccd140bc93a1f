"""A verb's command, made from its settings: parameters, help, and the call of its function."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from heddle.settings import Argument, Setting, VerbSettings, settings_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

CONFIG, PRINT_CONFIG = "config", "print_config"


class Text(click.types.StringParamType):
    """A text, which the settings read; completed by subcommands, or as a file's name."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = tuple(words)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
        """The words that begin so; a file where none does."""
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
        """The options of every verb with many others."""
        read = "Read options from a YAML file, or from a run's folder; others override them."
        return [
            click.Option([CONFIG, "--config"], metavar="FILE", type=Text(), help=read),
            click.Option(
                [PRINT_CONFIG, "--print-config"], is_flag=True, help="Print all options as such a file, and end."
            ),
            click.Option(
                ["--help-all"],
                is_flag=True,
                expose_value=False,
                is_eager=True,
                callback=self._help_all,
                help="Show all options.",
            ),
        ]

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb, or print its options."""
        settings = self.read_settings(ctx)
        if ctx.params.get(PRINT_CONFIG):
            import yaml

            print(yaml.safe_dump(settings.dump(), sort_keys=False, width=100, allow_unicode=True), end="")
            return None
        return self.function(settings)

    def read_settings(self, ctx: click.Context) -> VerbSettings:
        """The settings of a command line, with those of its --config."""
        given = {
            name.rstrip("_"): value
            for name, value in ctx.params.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE and name not in (CONFIG, PRINT_CONFIG)
        }
        file = ctx.params.get(CONFIG)
        if file is None:
            return self.settings.read(given)
        from heddle.storage.options_file import read_options

        return self.settings.read({**read_options(file), **given}, file)

    def _help_all(self, ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            self.hidden_options = set()
            print(self.get_help(ctx))
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments first; then the options that are shown."""
        found = settings_of(self.settings).values()
        arguments = [(s.option.metavar, s.help) for s in found if isinstance(s.option, Argument)]
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        shown = [p for p in self.get_params(ctx) if p.name not in self.hidden_options]
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
