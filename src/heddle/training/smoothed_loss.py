"""The training loss and the speed as they are shown beside the progress bar, and wherever else a run is shown."""

import statistics
from collections.abc import Sequence
from typing import Any

LOSS_DECAY = 0.9  # of the smoothed loss, per step
RATE_STEPS = 100  # the speed beside the progress bar is that of the last steps


class SmoothedLoss:
    """The training loss, smoothed, since one step's loss depends on its batch."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def add(self, loss: float) -> float:
        """The mean of the losses so far, in which each step weighs `LOSS_DECAY` times the next: of about 10 steps."""
        self.total = LOSS_DECAY * self.total + loss
        self.weight = LOSS_DECAY * self.weight + 1
        return self.total / self.weight

    def note(self, line: dict[str, Any]) -> str:
        """The text beside the progress bar for a step's line of the log."""
        if line["loss"] is None:
            return f"step {line['step']} skipped: its loss is not finite"
        bits = line.get("bits_per_byte")
        smoothed = self.add(line["loss"] if bits is None else bits)
        return f"training {smoothed:.3f} {'nats per answer' if bits is None else 'bits per byte'} over ~10 steps"


def step_speed(tokens: int, seconds: Sequence[float], last: int | None = None) -> float:
    """Tokens per second, in one meaning everywhere: the tokens of a step over the median seconds of a step.

    seconds: of each step, without evaluations and checkpoints. The first one, which may compile, counts only where it
    is alone. last: only so many newest steps count.
    """
    counted = seconds[1:] or seconds
    return tokens / statistics.median(counted if last is None else counted[-last:])
