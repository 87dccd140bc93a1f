"""What a command prints: progress and warnings on stderr, results on stdout.

Progress is a bar on a terminal, plain lines elsewhere, nothing when quiet. Control characters never reach a terminal.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from heddle.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 5.0
# Characters that move the cursor, color, beep or reorder text: control characters except newlines and tabs, overrides
# and isolates of text direction, and lone surrogates.
CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_quiet_depth = 0
_silent_depth = 0
_display: Progress | None = None


class ProgressBar(Protocol):
    """The progress of one task."""

    def advance(self, n: int, note: str = "", rate: float | None = None) -> None:
        """Add `n` units.

        A non-empty `note` replaces the text at the end of the line. rate: units per second to show, instead of the
        average since the start.
        """


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence `progress_bar` and `print_status` in this process until the block ends."""
    global _quiet_depth  # noqa: PLW0603 - one process has one stderr
    _quiet_depth += 1
    try:
        yield
    finally:
        _quiet_depth -= 1


@contextlib.contextmanager
def silent(silenced: bool = True) -> Iterator[None]:
    """Silence warnings and results of this process, too: another rank prints them."""
    global _silent_depth  # noqa: PLW0603 - as above
    if not silenced:
        yield
        return
    _silent_depth += 1
    try:
        with quiet():
            yield
    finally:
        _silent_depth -= 1


def is_quiet() -> bool:
    """Whether this process is silenced, so that a child process can be silenced too."""
    return _quiet_depth > 0


def print_status(text: str) -> None:
    """Print one line on stderr, above any bar, unless quiet. Control characters are shown escaped."""
    if not _quiet_depth:
        _print_line(text)


def print_warning(text: str) -> None:
    """Print one line on stderr that begins with "warning: ", even when quiet."""
    _print_line(f"warning: {text}")


def print_text(text: str, end: str = "\n") -> None:
    """Print text on stdout: unchanged to a file or pipe, with control characters escaped on a terminal."""
    if not _silent_depth:
        print(terminal_safe(text), end=end, flush=True)


def terminal_safe(text: str) -> str:
    """`text` with control characters escaped, such as \\u001b, if stdout is a terminal; newlines and tabs stay."""
    if not _is_terminal(sys.stdout):
        return text
    return CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _print_line(text: str) -> None:
    if _silent_depth:
        return
    line = printable(text)
    if _display is not None:
        _display.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    # A closed stderr must not stop the work.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(description: str, total: int | None, unit: str, initial: int = 0) -> Iterator[ProgressBar]:
    """Show the progress of a task.

    `total` is in units (None: unknown), of which `initial` were done before. The unit "bytes" is printed as kB, MB or
    GB. On a terminal a bar is drawn on stderr and removed at the end; elsewhere a line is printed at most every five
    seconds, so short tasks print nothing. Bars may be nested.
    """
    if _quiet_depth:
        yield _SilentBar()
    elif _is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
        with _terminal_bar(description, total, unit, initial) as terminal_bar:
            yield terminal_bar
    else:
        lines = _LineBar(description, total, unit, initial)
        yield lines
        lines.close()


def printable(text: str) -> str:
    """`text` on one line that is safe for any terminal: control characters and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def format_amount(n: float, unit: str) -> str:
    """A count with its unit: 1,234 tokens; 31.5 MB for the unit "bytes"."""
    if unit != "bytes":
        return f"{int(n):,} {unit}"
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if n >= size:
            return f"{n / size:.1f} {name}"
    return f"{int(n)} bytes"


def format_rate(rate: float, unit: str) -> str:
    """Units per second: 1,234 tokens/s, 31.5 MB/s; below 10, two significant digits, such as 0.14 layers/s."""
    few = unit != "bytes" and 0 < rate < 10
    return f"{rate:.2g} {unit}/s" if few else f"{format_amount(rate, unit)}/s"


def format_duration(seconds: float) -> str:
    """A duration: 45 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


SECONDS_PER_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str, option: str) -> float:
    """Seconds of a time such as 90s, 30m, 1.5h or 1d. Raises ConfigError naming the option."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd])", text.strip())
    seconds = float(match[1]) * SECONDS_PER_UNIT[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{option} {text}: must be a time above 0, such as 90s, 30m, 2h or 1d")
    return seconds


class _SilentBar:
    def advance(self, n: int, note: str = "", rate: float | None = None) -> None:
        pass


class _LineBar:
    def __init__(self, description: str, total: int | None, unit: str, initial: int) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done, self.initial, self.note = initial, initial, ""
        self.started = self.last_line_time = time.monotonic()
        self.printed_at = 0
        self.rate: float | None = None

    def advance(self, n: int, note: str = "", rate: float | None = None) -> None:
        self.done += n
        self.note, self.rate = note or self.note, rate
        now = time.monotonic()
        if now - self.last_line_time >= LINE_SECONDS:
            self.last_line_time = now
            self.print_line(now)

    def print_line(self, now: float) -> None:
        """Print one line: the count, the total and the rate."""
        self.printed_at = self.done
        count = format_amount(self.done, self.unit)
        if self.total:
            of_total = f"of {format_amount(self.total, self.unit)} ({self.done / self.total:.0%})"
            count = f"{count if self.unit == 'bytes' else f'{self.done:,}'} {of_total}"
        rate = (self.done - self.initial) / max(now - self.started, 1e-9)
        suffix = f", {self.note}" if self.note else ""
        if self.total and rate and self.done < self.total:
            suffix += f", {format_duration((self.total - self.done) / rate)} left"
        shown = rate if self.rate is None else self.rate
        print_status(f"{self.description}: {count}, {format_rate(shown, self.unit)}{suffix}")

    def close(self) -> None:
        """Print the final count, if any line was printed before it."""
        if 0 < self.printed_at < self.done:
            self.print_line(time.monotonic())


class _TerminalBar:
    def __init__(self, progress: Progress, total: int | None, description: str, unit: str, initial: int) -> None:
        self.progress, self.total, self.unit = progress, total, unit
        self.done, self.initial, self.note = initial, initial, ""
        self.started = time.monotonic()
        self.task = progress.add_task(printable(description), total=total, completed=initial, text="")

    def advance(self, n: int, note: str = "", rate: float | None = None) -> None:
        self.done += n
        self.note = note or self.note
        if rate is None:
            rate = (self.done - self.initial) / max(time.monotonic() - self.started, 1e-9)
        # With a known total the bar itself shows the fraction; leave the count out, since 80 columns are narrow.
        text = (
            format_rate(rate, self.unit)
            if self.total
            else f"{format_amount(self.done, self.unit)}, {format_rate(rate, self.unit)}"
        )
        text += f", {printable(self.note)}" if self.note else ""
        self.progress.update(self.task, completed=self.done, text=text)


def _is_terminal(stream: TextIO | None) -> bool:
    # A stream is None under pythonw and can be closed by a parent.
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


@contextlib.contextmanager
def _terminal_bar(description: str, total: int | None, unit: str, initial: int) -> Iterator[ProgressBar]:
    global _display  # noqa: PLW0603 - rich allows one live display, which nested bars share
    if _display is not None:
        nested = _TerminalBar(_display, total, description, unit, initial)
        try:
            yield nested
        finally:
            _display.remove_task(nested.task)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with progress:
        _display = progress
        try:
            yield _TerminalBar(progress, total, description, unit, initial)
        finally:
            _display = None
