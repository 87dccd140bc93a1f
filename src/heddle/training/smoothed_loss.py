"""The smoothed training loss and the speed, as shown beside the progress bar and wherever a run is shown."""

import statistics
from collections.abc import Sequence
from typing import Any

LOSS_DECAY = 0.9  # of the smoothed loss, per step
RATE_STEPS = 100  # the speed beside the progress bar is over the last steps


class SmoothedLoss:
    """The training loss, smoothed, since one step's loss depends on its batch."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, loss: float) -> float:
        """Add a loss and return the bias-corrected exponential moving average, over about 10 steps."""
        self.total = LOSS_DECAY * self.total + loss
        self.weight = LOSS_DECAY * self.weight + 1
        return self.total / self.weight

    def note(self, line: dict[str, Any]) -> str:
        """Return the text beside the progress bar for a step's log line."""
        if line["loss"] is None:
            return f"step {line['step']} skipped: its loss is not finite"
        bits = line.get("bits_per_byte")
        smoothed = self.add(line["loss"] if bits is None else bits)
        return f"training loss {smoothed:.3f} {'nats per answer' if bits is None else 'bits per byte'} (last ~10 steps)"


def step_speed(tokens: int, seconds: Sequence[float], last: int | None = None) -> float:
    """Return tokens per second: the tokens of a step over the median seconds of a step.

    seconds: of each step, without evaluations and checkpoints. The first step, which may compile, counts only if it is
    the only one. last: only this many newest steps count.
    """
    counted = seconds[1:] or seconds
    return tokens / statistics.median(counted if last is None else counted[-last:])
