"""Errors caused by the user or by the machine. Each message is one sentence: what is wrong, the value, the remedy."""

import errno
import os
import stat
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

MAX_NAMED_CHARACTERS = 2**26  # of a file that an option names
MAX_NAME_CHARACTERS = 100  # of an unknown name; finding its nearest match takes quadratic time
FILE_TYPES = {
    stat.S_IFREG: "is a file",
    stat.S_IFDIR: "is a folder",
    stat.S_IFIFO: "is a named pipe",
    stat.S_IFSOCK: "is a socket",
    stat.S_IFCHR: "is a device",
    stat.S_IFBLK: "is a device",
    stat.S_IFLNK: "is a symbolic link",
}


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


class RankLost(MachineError):
    """Another rank of a training run exited or hangs. Exit code 75: the same command continues the run."""

    exit_code = 75


class OtherRankFailed(HeddleError):
    """Another rank failed first and reports why. This one exits with the same code, and prints nothing."""

    def __init__(self, sentence: str, exit_code: int) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


ROOT = Path(__file__).resolve().parents[2]  # of a checkout


def pip_install(extra: str, root: Path = ROOT) -> str:
    """The pip command that installs an extra of heddle.

    root: the root of a checkout, if this is one; otherwise the command names the published package.
    """
    is_checkout = (root / "pyproject.toml").is_file() and (root / "src" / "heddle").is_dir()
    return f"pip install -e '{root}[{extra}]'" if is_checkout else f"pip install 'heddle-lm[{extra}]'"


def choices_hint(value: str, choices: Iterable[str], prefix: str = "") -> str:
    """End a message about an unknown name: `did you mean 'heads'? choices: depth, heads`.

    Suggested is a choice that `value` begins with (`shared_experts`: `shared`), else the closest; if none is close, the
    question is omitted. `prefix` is put before the suggested choice.
    """
    names = list(choices)
    begins = [name for name in names if name and value.startswith(f"{name}_")]
    near = begins or get_close_matches(value[:MAX_NAME_CHARACTERS], names, n=1)
    question = f"did you mean '{prefix}{max(near, key=len)}'? " if near else ""
    return f"{question}choices: {', '.join(names)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory. torch has an exception class for it on GPUs, but only a message on CPUs."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def nondeterministic_operation(error: BaseException) -> str | None:
    """The operation that torch refused for lack of a deterministic algorithm; None for any other error."""
    operation, refused, _ = str(error).partition(" does not have a deterministic implementation")
    return operation.rpartition("\n")[2] if refused and isinstance(error, RuntimeError) else None


def lacks_compiler(error: BaseException) -> bool:
    """Whether torch.compile failed because it found no working C++ compiler."""
    return "InvalidCxxCompiler" in (type(error).__name__, str(error).partition(":")[0])


def home_folder() -> Path:
    """The user's home folder. Raises ConfigError for a user who has none and no $HOME, as in some containers."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError("HOME: is not set, and this user has no home folder; set it, or HEDDLE_CACHE") from None


def read_named_file(name: str, path: Path, remedy: str) -> str:
    """The text of a file that an option names; `<(command)` is one, too. Raises ConfigError, which ends with `remedy`.

    name: of the file in the error, such as `--token-file key.txt`.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_NAMED_CHARACTERS + 1)  # a device may never end
        if len(text) <= MAX_NAMED_CHARACTERS:
            return text
        reason = f"has more than {MAX_NAMED_CHARACTERS:,} characters"
    except UnicodeDecodeError:
        reason = "is not UTF-8 text"
    except ValueError:
        reason = "is not a valid name"
    except OSError as error:
        reason = what if (what := describe_path(path)) != "is a file" else f"cannot be read ({error.strerror})"
    raise ConfigError(f"{name}: {reason}; {remedy}")


def describe_path(path: str | Path) -> str:
    """Say what is at a path, links followed: "is a folder", "is a named pipe", "does not exist"."""
    try:
        return describe_file_type(os.stat(path).st_mode)
    except ValueError:
        return "is not a valid name"
    except OSError as error:
        is_link, number = os.path.islink(path), error.errno
    if number == errno.ELOOP:
        return f"{'is' if is_link else 'lies below'} a symbolic link that leads back to itself"
    if number == errno.ENOENT:
        return "is a symbolic link to nothing" if is_link else "does not exist"
    reasons = {errno.ENOTDIR: "lies below a file", errno.ENAMETOOLONG: "is too long a name"}
    return reasons.get(number or 0, f"cannot be reached ({os.strerror(number or 0)})")


def describe_file_type(mode: int) -> str:
    """Say what a file of this st_mode is: "is a file", "is a socket"."""
    return FILE_TYPES.get(stat.S_IFMT(mode), "is neither a file nor a folder")


def no_folder_reason(path: str | Path) -> str:
    """Say why a path is not a folder: "there is no such folder", "is a socket, not a folder"."""
    what = describe_path(path)
    return "there is no such folder" if what == "does not exist" else f"{what}, not a folder"


def parse_error_reason(error: ValueError | RecursionError) -> str:
    """Explain in the user's terms why Python's JSON or TOML parser rejected a text."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return "an integer has more than 4300 digits" if "set_int_max_str_digits" in str(error) else str(error)


def describe_value(value: object) -> str:
    """Write a value of a design with what it is: `'4' (text)`."""
    names = {
        str: "text",
        bool: "a truth value",
        int: "a whole number",
        float: "a number",
        list: "a list",
        dict: "a table",
        type(None): "nothing",
    }
    return f"{shorten_value(value)} ({names.get(type(value), type(value).__name__)})"


def shorten_value(value: object) -> str:
    """Return the value as Python writes it, at most 60 characters of it."""
    text = repr(value[:60]) if isinstance(value, str) else ""
    if isinstance(value, int) and value.bit_length() > 4000:  # Python refuses to write more than 4,300 digits
        text = hex(value)
    text = text or repr(value)
    return text if len(text) < 60 else text[:57] + "…"
