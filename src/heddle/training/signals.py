"""Ctrl-C and SIGTERM: the first signal asks the training loop to save and stop, a second one stops at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# One request may arrive several times: from the terminal and from a program that forwards it, or from Linux, which
# signals a worker's parent's death once for each of the parent's threads.
SAME_REQUEST_SECONDS = 0.5


class Interrupted(BaseException):
    """A run has stopped on request, after saving. `exit_code` is 128 plus the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class StopRequest:
    """The signal that asked the run to stop (None: none yet), and when it arrived, in time.monotonic() seconds."""

    signal_number: int | None = None
    requested_at: float = 0.0


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Within the block, record the first signal in the StopRequest. Outside the main thread nothing is caught."""
    stop_request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop_request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop_request.signal_number is None:
            stop_request.signal_number, stop_request.requested_at = number, time.monotonic()
        elif time.monotonic() - stop_request.requested_at > SAME_REQUEST_SECONDS:
            raise Interrupted(number)

    watched = (signal.SIGINT, signal.SIGTERM)
    previous_handlers = {number: signal.signal(number, handle) for number in watched}
    try:
        yield stop_request
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
