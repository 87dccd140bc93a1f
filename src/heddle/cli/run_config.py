"""A whole training as a file of options: `heddle train --config FILE`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from heddle.errors import ConfigError, choices_hint

NOT_OF_A_RUN = ("config", "print_config", "help")  # options that say how to read the others
_OPTIONS = "options"  # of run.json


def plain_design(value: Any) -> Any:
    """A design of the command line or of a file of options, which may be a name or a table."""
    return value


def options_of(context: typer.Context) -> dict[str, Any]:
    """The options of a command that are set or have a default, by their names in a file of options."""
    names = option_names(context.command).items()
    values = {name: _plain(context.params[parameter]) for name, parameter in names if parameter in context.params}
    return {name: value for name, value in values.items() if value is not None and name not in NOT_OF_A_RUN}


def print_options(context: typer.Context) -> None:
    """Print the options of a command as a file of options."""
    import yaml

    print(yaml.safe_dump(options_of(context), sort_keys=False, width=100, allow_unicode=True), end="")


def _read_config(context: typer.Context, value: Path | None) -> Path | None:
    """Let the options of a file be the defaults of the others; called before these are read."""
    if value is not None:
        defaults = defaults_of(context.command, option_names(context.command), _read_options(value), str(value))
        context.default_map = {**defaults, **(context.default_map or {})}
    return value


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=_read_config,
        is_eager=True,
        help="Read options from a YAML file, or from a run's folder; others override them.",
    ),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print all options as such a file, and train nothing.")
]


def _read_options(path: Path) -> Mapping[str, Any]:
    from heddle.model.load_config import parse_yaml
    from heddle.storage.file_io import read_json_file
    from heddle.storage.run_log import RUN_FILE

    if path.is_dir():
        options = read_json_file(path / RUN_FILE).get(_OPTIONS)
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: its {RUN_FILE} holds no options; write them to a YAML file")
        return options
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"{path}: cannot be read ({reason}); name a YAML file of options") from error
    options = parse_yaml(text, str(path))
    if not isinstance(options, dict):
        raise ConfigError(f"{path}: is no table of options; write lines such as steps: 200")
    return options


def option_names(command: Any) -> dict[str, str]:
    """The parameters of a command by the names of their options: `batch_size` for --batch-size."""
    return {
        (
            parameter.opts[0].lstrip("-").replace("-", "_") if parameter.param_type_name == "option" else parameter.name
        ): (parameter.name)
        for parameter in command.params
    }


def defaults_of(command: Any, names: dict[str, str], options: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """The values of options by parameter, as the command line would give them. Raises ConfigError."""
    parameters = {parameter.name: parameter for parameter in command.params}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        name = str(key).rstrip("_")
        if name not in names or (source != "options" and name in NOT_OF_A_RUN):
            choices = [choice for choice in names if choice not in NOT_OF_A_RUN]
            question, mark, _ = choices_hint(name, choices).partition("? ")
            hint = f"{question}?" if mark else "--print-config lists all"
            raise ConfigError(f"{source}: {name}: unknown option; {hint}")
        parameter = parameters[names[name]]
        if value is None:
            continue
        if parameter.nargs == -1 or getattr(parameter, "multiple", False):
            values = value if isinstance(value, list | tuple) else [value]
            defaults[names[name]] = [str(item) for item in values]
        elif isinstance(value, list | tuple | dict) and name != "design":
            raise ConfigError(f"{source}: {name}: takes one value; write a word or a number")
        elif isinstance(value, bool) and not getattr(parameter, "is_flag", False):
            raise ConfigError(f"{source}: {name}: takes a word or a number, and is {str(value).lower()}")
        else:
            defaults[names[name]] = value if isinstance(value, bool | dict) else str(value)
    return defaults


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value] or None
    return str(value) if isinstance(value, Path) else value
