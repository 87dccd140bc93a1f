"""Ctrl-C, SIGTERM and SIGHUP: a command ends in a sentence and an exit code of its own.

In training the first signal asks the loop to save and stop, and a second one stops at once.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# One request may arrive several times: from the terminal and from a program that forwards it, or from Linux, which
# signals a worker's parent's death once for each of the parent's threads.
SAME_REQUEST_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal has ended the work. `exit_code` is 128 plus its number; `sentence` says what remains."""

    def __init__(self, number: int, sentence: str | None = None) -> None:
        self.sentence = sentence or f"ended by {signal.Signals(number).name} before it was done"
        super().__init__(self.sentence)
        self.exit_code = 128 + number


class StopRequest:
    """The signal that asked the run to stop (None: none yet), and when it arrived, in time.monotonic() seconds."""

    signal_number: int | None = None
    requested_at: float = 0.0


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Within the block, record the first signal in the StopRequest; a second one raises Interrupted.

    Signals that the process was started to ignore stay ignored, as under nohup. Outside the main thread nothing is
    caught.
    """
    stop_request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop_request.signal_number is None:
            stop_request.signal_number, stop_request.requested_at = number, time.monotonic()
        elif time.monotonic() - stop_request.requested_at > SAME_REQUEST_SECONDS:
            raise Interrupted(number, f"ended by {signal.Signals(number).name}; what was saved before remains")

    with _handling(handle):
        yield stop_request


@contextmanager
def interrupted_on_stop_signals() -> Iterator[None]:
    """Within the block, a signal raises Interrupted, so that unfinished files are removed. Ignored ones stay ignored.

    Outside the main thread nothing is caught.
    """

    stop_request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if stop_request.signal_number is None or now - stop_request.requested_at > SAME_REQUEST_SECONDS:
            stop_request.signal_number, stop_request.requested_at = number, now
            raise Interrupted(number)

    with _handling(handle):
        yield


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watched = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous_handlers = {number: signal.signal(number, handle) for number in watched}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
