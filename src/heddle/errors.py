"""Errors a user can cause, or a machine. Each message is one sentence: what is wrong, the value, the remedy."""


class HeddleError(Exception):
    """A user's mistake: the command line prints the message alone and exits with 2."""

    exit_code = 2


class ConfigError(HeddleError):
    """A design or an option that cannot be built."""


class DataError(HeddleError):
    """A text, tokenizer or token file that cannot be used."""


class CheckpointError(HeddleError):
    """A model or training folder that is missing, incomplete, altered or another's."""


class MachineError(HeddleError):
    """The machine failed (full disk, read-only folder, no memory): exit code 1."""

    exit_code = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused: torch has a class of its own for a GPU, and for a CPU only words."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "allocate memory" in str(error))
