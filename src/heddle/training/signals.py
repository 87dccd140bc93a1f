"""Ctrl-C and SIGTERM: the first asks the loop to save and end, a second one ends at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# One wish may arrive several times: from the terminal and from a program that hands it on, or from Linux, which
# tells a worker of its parent's death once for each of the parent's threads.
SAME = 0.5  # seconds


class Interrupted(BaseException):
    """A run was asked to end and has saved; `exit_code` is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Wish:
    """Whether, by which signal, and when the run was asked to end."""

    number: int | None = None
    since: float = 0.0


@contextmanager
def listening() -> Iterator[Wish]:
    """Within the block a first signal is kept as a wish; outside the main thread nothing is caught."""
    wish = Wish()
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if wish.number is None:
            wish.number, wish.since = number, time.monotonic()
        elif time.monotonic() - wish.since > SAME:
            raise Interrupted(number)

    watched = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in watched}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
