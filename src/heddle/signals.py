"""Ctrl-C, SIGTERM and SIGHUP: a command ends with a one-line message and its own exit code.

In training, the first signal asks the loop to save and stop; a second one stops at once.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# One request may arrive several times: from the terminal and from a program that forwards it, or from Linux, which
# signals the death of a worker's parent once per thread of the parent.
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

    If the block ends without acting on the first signal, which came too late, raises Interrupted after it. Signals that
    were ignored when the process started, as under nohup, stay ignored. Does nothing outside the main thread.
    """
    stop_request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop_request.signal_number is None:
            stop_request.signal_number, stop_request.requested_at = number, time.monotonic()
        elif time.monotonic() - stop_request.requested_at > SAME_REQUEST_SECONDS:
            raise Interrupted(number, f"ended by {signal.Signals(number).name}; what was saved before remains")

    with _handling(handle):
        yield stop_request
    if stop_request.signal_number is not None:
        name = signal.Signals(stop_request.signal_number).name
        raise Interrupted(stop_request.signal_number, f"ended by {name}; the same command continues")


@contextmanager
def interrupted_on_stop_signals(sentence: str | None = None) -> Iterator[None]:
    """Within the block, a signal raises Interrupted, so that unfinished files are removed.

    sentence: what it says; None: which signal ended the work. Signals that were ignored stay ignored. Does nothing
    outside the main thread.
    """

    stop_request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if stop_request.signal_number is None or now - stop_request.requested_at > SAME_REQUEST_SECONDS:
            stop_request.signal_number, stop_request.requested_at = number, now
            raise Interrupted(number, sentence)

    with _handling(handle):
        yield


@contextmanager
def delayed_stop_signals() -> Iterator[None]:
    """Within the block, signals wait for its end, so that files that belong together are all written."""
    arrived: list[int] = []
    with _handling(lambda number, frame: arrived.append(number)):
        yield
    for number in arrived[:1]:
        signal.raise_signal(number)


def end_on_stop_signals() -> None:
    """From now on, a signal exits the process at once with a message; once its threads have ended, signals are ignored.

    For a process whose work is done. Does nothing outside the main thread.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        os.write(2, f"heddle: ended by {signal.Signals(number).name}; what was saved before remains\n".encode())
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for number in _not_ignored():
            signal.signal(number, handle)
        atexit.register(_ignore_stop_signals)


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def masked_stop_signals() -> Iterator[None]:
    """Block stop signals within the block. A process started in it inherits the mask, and unblocks them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _not_ignored() -> list[signal.Signals]:
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _handling(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: signal.signal(number, handle) for number in _not_ignored()}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            if signal.getsignal(number) is handle:  # else `end_on_stop_signals` was called
                signal.signal(number, handler)
