"""Errors caused by the user or by the machine. Each message is one sentence: what is wrong, the value, the remedy."""

from collections.abc import Iterable
from difflib import get_close_matches


class HeddleError(Exception):
    """A user's mistake. The command line prints only the message and exits with code 2."""

    exit_code = 2


class ConfigError(HeddleError):
    """A design or an option that cannot be built."""


class DataError(HeddleError):
    """A text, tokenizer or token file that cannot be used."""


class CheckpointError(HeddleError):
    """A model or training folder that is missing, incomplete or altered, or that belongs to another run."""


class MachineError(HeddleError):
    """The machine failed (full disk, read-only folder, no memory): exit code 1."""

    exit_code = 1


def choices_hint(value: str, choices: Iterable[str], prefix: str = "") -> str:
    """End a message about an unknown name: `did you mean 'heads'? choices: depth, heads`.

    The question is left out where no choice is close to `value`. `prefix` is put before the choice it asks about.
    """
    names = list(choices)
    near = get_close_matches(value, names, n=1)
    question = f"did you mean '{prefix}{near[0]}'? " if near else ""
    return f"{question}choices: {', '.join(names)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. torch has an exception class for a GPU, but only a message for a CPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
