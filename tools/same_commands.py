"""What a checkout reads command lines as, without running them: the part of tools/same.py that knows heddle's inside.

A rewritten command line needs a `described` (of OLD, to draw lines from) and a `parsed` of its own here, chosen by what
the checkout has. What was renamed, moved or removed stands in `tools/same_options.json` under "options":

    {"old": "runs --prune", "new": "runs prune --keep", "reason": "…"}      an option; its values are compared as before
    {"old": "inspect", "new": "show attention", "reason": "…"}              a verb
    {"old": "compare --recall", "new": null, "reason": "…", "remedy": "…"}  gone: lines are read without it
"""

import enum
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple


class Word(NamedTuple):
    """An option of a verb, or an argument. metavar: None for a flag. negative: the name that turns a flag off."""

    name: str
    metavar: str | None
    is_option: bool = True
    is_required: bool = False
    is_repeatable: bool = False
    negative: str | None = None


Line = list[list[str]]  # the verb; then an option with its value, or an argument, each a list of its own


def described() -> dict[str, list[Word]]:
    """The verbs of this checkout with their options and arguments."""
    commands = _settings_commands() if find_spec("heddle.settings") else _typer_commands()
    return {verb: [_word(parameter) for parameter in command.params] for verb, command in commands.items()}


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Exit code and values by option: what the verb would get. Nothing runs."""
    return _parsed_settings(arguments) if find_spec("heddle.settings") else _parsed_typer(arguments)


def _parsed_settings(arguments: list[str]) -> dict[str, Any]:
    """By verbs whose settings are typed classes. What a class checks among its options is not asked."""
    import click

    from heddle.cli.main import app
    from heddle.settings import Argument, VerbSettings, settings_of

    try:
        with click.Context(app, info_name="heddle") as root:
            name, command, rest = app.resolve_command(root, list(arguments))
            verb: Any = command
            with verb.make_context(name, rest, parent=root) as context:
                verb.settings = type(verb.settings.__name__, (verb.settings,), {"read": VerbSettings.__dict__["read"]})
                settings = verb.read_settings(context)
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        return {"code": code}
    named = {
        setting.field if isinstance(setting.option, Argument) else setting.flag: getattr(settings, setting.field)
        for setting in settings_of(type(settings)).values()
    }
    more = {"--config": context.params.get("config"), "--print-config": context.params.get("print_config")}
    named |= more if arguments[0] == "train" else {}  # no other verb of OLD has them
    return {"code": 0, "values": {name: plain(named[name]) for name in sorted(named)}}


def _parsed_typer(arguments: list[str]) -> dict[str, Any]:
    command = _typer_commands().get(arguments[0])
    if command is None:
        return {"code": 2}
    try:
        with command.make_context(arguments[0], arguments[1:], obj=arguments) as context:
            named = {_word(parameter).name: context.params.get(parameter.name) for parameter in command.params}
            return {"code": 0, "values": {name: plain(named[name]) for name in sorted(named)}}
    except Exception as error:
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        return {"code": code}


def _settings_commands() -> dict[str, Any]:
    import click

    from heddle.cli.main import app

    with click.Context(app, info_name="heddle") as root:
        commands = {verb: app.get_command(root, verb) for verb in app.list_commands(root)}
    for command in commands.values():
        assert command is not None
        command.params = [parameter for parameter in command.params if parameter.expose_value]
    return commands


def _typer_commands() -> dict[str, Any]:
    import typer

    from heddle.cli import main

    app: Any = main.app
    commands: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    return commands


def _word(parameter: Any) -> Word:
    is_option = parameter.param_type_name == "option"
    metavar = None if getattr(parameter, "is_flag", False) else parameter.metavar or "N"
    repeats = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    negative = next(iter(parameter.secondary_opts), None)
    return Word(parameter.opts[0], metavar, is_option, parameter.required, repeats, negative)


# What follows knows no layout.


def plain(value: Any) -> Any:
    """Paths as texts, choices as their values, tuples as lists; an empty list is no value."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value] or None
    return str(value) if isinstance(value, Path) else value


def random_lines(
    verbs: dict[str, list[Word]], samples: dict[str, list[str]], number: int, seed: int
) -> dict[str, list[Line]]:
    """Command lines: {"read": each option of each verb at least once, "refused": with a mistake in each}.

    samples: values by `verb --option`, `--option` or metavar.
    """
    draw = random.Random(seed)

    def group(verb: str, word: Word) -> list[str]:
        if word.metavar is None:
            return [draw.choice([word.name, word.negative or word.name])]
        names = (f"{verb} {word.name}", word.name, word.metavar, word.metavar.strip("[]."))
        value = draw.choice(next(samples[name] for name in names if name in samples))
        return [word.name, value] if word.is_option else [value]

    def line(verb: str, chosen: list[Word]) -> Line:
        words = [word for word in verbs[verb] if word.is_required or (not word.is_option and draw.random() < 0.5)]
        words += [word for word in chosen for _ in range(1 + (word.is_repeatable and draw.random() < 0.5))]
        return [[verb], *(group(verb, word) for word in words)]

    deals: list[tuple[str, list[Word]]] = []
    while len(deals) < number:
        for verb, words in verbs.items():
            options = [word for word in words if word.is_option and not word.is_required]
            draw.shuffle(options)
            while options:
                size = draw.randint(1, 6)
                deals.append((verb, options[:size]))
                del options[:size]
    read = [line(verb, chosen) for verb, chosen in deals[:number]]
    refused: list[Line] = [[["weave"]]]
    for verb, words in verbs.items():
        numbers = [word.name for word in words if word.is_option and word.metavar in ("N", "X")]
        mistakes = [["--weave"], ["--json=maybe"], *([name, "many"] for name in numbers[:2])]
        refused += [[*line(verb, []), mistake] for mistake in mistakes]
        refused += [[[verb]]] if any(word.is_required for word in words) else []
    return {"read": read, "refused": refused}


def translated(line: Line, entries: list[dict[str, Any]]) -> list[str]:
    """The words of a line of OLD as NEW's command line takes them; options that are gone are left out."""
    renamed = {entry["old"]: entry["new"] for entry in entries}
    verb, words = line[0][0], []
    target = (renamed.get(verb) or verb).split()
    for name, *value in line[1:]:
        new = renamed.get(f"{verb} {name}", name)
        if new is not None:
            *path, option = new.split() if value or name.startswith("-") else [name]
            target = path or target
            words += [option, *value]
    return [*target, *words]


def facts(lines: dict[str, list[Line]], entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What each line of OLD is read as here, with the names of OLD; of lines with a mistake the exit code alone.

    entries: of the declared map; none where this checkout is OLD itself.
    """
    read: dict[str, Any] = {}
    for line in lines["read"]:
        verb = line[0][0]
        olds = {new.split()[-1]: old.split()[-1] for old, new in _renamed_options(verb, entries)}
        result = parsed(translated(line, entries))
        values = {olds.get(name, name): value for name, value in result.get("values", {}).items()}
        read[title(line)] = {"code": result["code"], "values": values}
    refused = {title(line): parsed(translated(line, entries))["code"] for line in lines["refused"]}
    return {"read": read, "refused": refused}


def _renamed_options(verb: str, entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(entry["old"], entry["new"]) for entry in entries if entry["new"] and entry["old"].startswith(f"{verb} ")]


def title(line: Line) -> str:
    """A line as one text."""
    return " ".join(word for group in line for word in group)
