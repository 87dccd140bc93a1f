"""Completion in a shell: click's script, printed or installed."""

import os
from pathlib import Path

import click

from heddle.errors import ConfigError, home_folder

COMPLETE = "_HEDDLE_COMPLETE"
# Where the script of each shell goes, and the line of its startup file that reads it.
_PLACES = {
    "bash": (".bash_completions/heddle.sh", ".bashrc", "source ~/.bash_completions/heddle.sh"),
    "zsh": (".zfunc/_heddle", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/heddle.fish", None, ""),
}


def completion_script() -> tuple[str, str]:
    """The shell's name, of the variable SHELL, and its script. Raises ConfigError for a shell without one."""
    from click.shell_completion import get_completion_class

    shell = Path(os.environ.get("SHELL", "")).name
    found = get_completion_class(shell)
    if found is None or shell not in _PLACES:
        raise ConfigError(f"SHELL {shell}: has no completion; set SHELL to one of {', '.join(_PLACES)}")
    return shell, found(click.Group("heddle"), {}, "heddle", COMPLETE).source()


def show_completion(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the script."""
    if is_asked:
        print(completion_script()[1])
        context.exit()


def install_completion(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Write the script into the home folder, and let the shell read it when it starts."""
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
    print(f"{shell} completion is in {file}; it works in the next shell")
    context.exit()
