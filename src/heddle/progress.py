"""What is said on stderr while work runs: a bar on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 5.0

_quiet_depth = 0
_shown: Progress | None = None


class Bar(Protocol):
    """One piece of work under way."""

    def advance(self, n: int, note: str = "") -> None:
        """Count `n` more units; `note` replaces the text at the end of the line when it is not empty."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence `bar` and `say` in this process until the block ends."""
    global _quiet_depth  # noqa: PLW0603 - one process has one stderr
    _quiet_depth += 1
    try:
        yield
    finally:
        _quiet_depth -= 1


def is_quiet() -> bool:
    """Whether this process was silenced, so that one it starts can be too."""
    return _quiet_depth > 0


def say(text: str) -> None:
    """Print one line on stderr, above any bar, unless quiet. Control characters are shown escaped."""
    if _quiet_depth:
        return
    line = printable(text)
    if _shown is not None:
        _shown.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    # A closed stderr must not stop the work that is being reported on.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def bar(description: str, total: int | None, unit: str, done: int = 0) -> Iterator[Bar]:
    """Show how far a piece of work is.

    `total` is in units (None: unknown), of which `done` were done before. The unit "bytes" is printed as KB,
    MB or GB. On a terminal a bar is drawn on stderr and removed at the end; elsewhere a line is printed at most
    every five seconds, so that short work prints nothing. Bars may be nested.
    """
    if _quiet_depth:
        yield _Silent()
    elif _on_terminal():
        with _terminal_bar(description, total, unit, done) as shown:
            yield shown
    else:
        lines = _Lines(description, total, unit, done)
        yield lines
        lines.close()


def printable(text: str) -> str:
    """`text` on one line that any terminal can take: control characters and lone surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def amount(n: float, unit: str) -> str:
    """A count with its unit: 1,234 tokens; 31.5 MB for the unit "bytes"."""
    if unit != "bytes":
        return f"{int(n):,} {unit}"
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if n >= size:
            return f"{n / size:.1f} {name}"
    return f"{int(n)} bytes"


def duration(seconds: float) -> str:
    """A time to wait: 45 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Silent:
    def advance(self, n: int, note: str = "") -> None:
        pass


class _Lines:
    def __init__(self, description: str, total: int | None, unit: str, done: int) -> None:
        self.description, self.total, self.unit = description, total, unit
        self.done, self.before, self.note = done, done, ""
        self.started = self.last = time.monotonic()
        self.printed_at = 0

    def advance(self, n: int, note: str = "") -> None:
        self.done += n
        self.note = note or self.note
        now = time.monotonic()
        if now - self.last >= LINE_SECONDS:
            self.last = now
            self.print_line(now)

    def print_line(self, now: float) -> None:
        """One line: how much, of how much, how fast."""
        self.printed_at = self.done
        counted = amount(self.done, self.unit)
        if self.total:
            share = f"of {amount(self.total, self.unit)} ({self.done / self.total:.0%})"
            counted = f"{counted if self.unit == 'bytes' else f'{self.done:,}'} {share}"
        rate = (self.done - self.before) / max(now - self.started, 1e-9)
        end = f", {self.note}" if self.note else ""
        if self.total and rate and self.done < self.total:
            end += f", {duration((self.total - self.done) / rate)} left"
        say(f"{self.description}: {counted}, {amount(rate, self.unit)}/s{end}")

    def close(self) -> None:
        """The last count, if any line was printed before it."""
        if 0 < self.printed_at < self.done:
            self.print_line(time.monotonic())


class _Terminal:
    def __init__(self, progress: Progress, total: int | None, description: str, unit: str, done: int) -> None:
        self.progress, self.total, self.unit = progress, total, unit
        self.done, self.before, self.note = done, done, ""
        self.started = time.monotonic()
        self.task = progress.add_task(printable(description), total=total, completed=done, text="")

    def advance(self, n: int, note: str = "") -> None:
        self.done += n
        self.note = note or self.note
        rate = (self.done - self.before) / max(time.monotonic() - self.started, 1e-9)
        # Of a known total the bar shows the part, and 80 columns hold little.
        text = (
            f"{amount(rate, self.unit)}/s"
            if self.total
            else f"{amount(self.done, self.unit)}, {amount(rate, self.unit)}/s"
        )
        text += f", {printable(self.note)}" if self.note else ""
        self.progress.update(self.task, completed=self.done, text=text)


def _on_terminal() -> bool:
    # stderr is None under pythonw and can be closed by a parent.
    try:
        return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False


@contextlib.contextmanager
def _terminal_bar(description: str, total: int | None, unit: str, done: int) -> Iterator[Bar]:
    global _shown  # noqa: PLW0603 - rich allows one live display, which nested bars share
    if _shown is not None:
        nested = _Terminal(_shown, total, description, unit, done)
        try:
            yield nested
        finally:
            _shown.remove_task(nested.task)
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
        _shown = progress
        try:
            yield _Terminal(progress, total, description, unit, done)
        finally:
            _shown = None
