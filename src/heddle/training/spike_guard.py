"""A loss far above those before it, after which a run goes back to its last checkpoint and past the data since then.

Chowdhery et al. (2022, PaLM, section 5.1) restarted about 100 steps before a spike and left out 200 to 500 batches.
"""

import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heddle.errors import MachineError
from heddle.storage.run_log import read_log
from heddle.training.settings import Settings

WINDOW = 128  # losses that a loss is compared with
MIN_LOSSES = 16  # before there are as many, no loss is a spike
MIN_SPREAD = 0.01  # of the median: losses that hardly differ would make any loss a spike
MAX_REWINDS = 3  # in a row to one checkpoint
NORMAL_SPREAD = 1.4826  # the standard deviation of normal numbers over their median absolute deviation


class SpikeGuard:
    """Finds spikes: losses above median + deviations · 1.4826 · median absolute deviation of the losses before them.

    deviations: None finds none. first_checkpoint: no step up to it is a spike, since there is nothing to go back to.
    """

    def __init__(self, deviations: float | None, first_checkpoint: int = 0) -> None:
        self.deviations, self.first_checkpoint = deviations, first_checkpoint
        self.losses: deque[float] = deque(maxlen=WINDOW)
        self.rewinds = self.rewind_step = 0  # how often in a row the run went back to this step

    @classmethod
    def of_run(cls, settings: Settings, run: Path) -> "SpikeGuard":
        """The guard of a run after the steps in its log: a continued run finds the spikes that it would have found."""
        guard = cls(settings.spike_guard, settings.save_every or 0)
        guard.read(run)
        return guard

    def read(self, run: Path) -> None:
        """Take the losses of a run's log, and no others."""
        self.losses.clear()
        for line in read_log(run) if self.deviations is not None else []:
            self.is_spike(line)

    def is_spike(self, line: Mapping[str, Any]) -> bool:
        """Whether the loss in a line of the log is a spike; any other finite loss is remembered."""
        if self.deviations is None or line["loss"] is None or line["skipped"]:
            return False
        can_be_spike = line["step"] > self.first_checkpoint and len(self.losses) >= MIN_LOSSES
        if can_be_spike and line["loss"] > self.limit:
            return True
        self.losses.append(line["loss"])
        return False

    @property
    def limit(self) -> float:
        """The largest loss that is no spike."""
        assert self.deviations is not None
        median = statistics.median(self.losses)
        spread = NORMAL_SPREAD * statistics.median(abs(loss - median) for loss in self.losses)
        return median + self.deviations * max(spread, MIN_SPREAD * abs(median))

    def count_rewind(self, run: Path, step: int) -> None:
        """Count one more return to the checkpoint of a step. Raises MachineError after too many in a row."""
        self.rewinds = self.rewinds + 1 if step == self.rewind_step else 1
        self.rewind_step = step
        if self.rewinds > MAX_REWINDS:
            raise MachineError(
                f"{run}: after each of {MAX_REWINDS} returns to step {step} the loss rose far above those before it "
                "again; try a lower learning rate in another folder"
            )
