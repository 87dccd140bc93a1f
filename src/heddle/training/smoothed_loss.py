"""The training loss as it is shown beside the progress bar."""

from typing import Any

LOSS_DECAY = 0.9  # of the smoothed loss, per step


class SmoothedLoss:
    """The text beside the progress bar: the training loss, smoothed, since one step's loss depends on its batch."""

    def __init__(self) -> None:
        self.total = self.weight = 0.0

    def note(self, line: dict[str, Any]) -> str:
        """The mean of the losses so far, in which each step weighs `LOSS_DECAY` times the next."""
        if line["loss"] is None:
            return f"step {line['step']} skipped: its loss is not finite"
        bits = line.get("bits_per_byte")
        self.total = LOSS_DECAY * self.total + (line["loss"] if bits is None else bits)
        self.weight = LOSS_DECAY * self.weight + 1
        return f"{self.total / self.weight:.3f} {'nats per answer' if bits is None else 'bits per byte'}"
