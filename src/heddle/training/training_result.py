"""What a training returns: the model, its scores on held-out data, and how it went."""

from dataclasses import dataclass

from heddle.model.decoder import Decoder
from heddle.training.checkpoint import TrainingProgress
from heddle.training.evaluation.scores import Scores, ratio_of_sums


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    scores: of the final evaluation, (bits, bytes) of each window of text or (right answers, scored targets) of each
    row of a task. tokens_per_second: of the median step, without evaluations and checkpoints.
    """

    model: Decoder
    scores: Scores
    progress: TrainingProgress
    tokens_per_second: float

    @property
    def bits_per_byte(self) -> float:
        """Return the bits per byte of the held-out text. Only for text and chats."""
        return ratio_of_sums(self.scores)

    @property
    def task_accuracy(self) -> float:
        """Return the fraction of a task's held-out targets that the model predicts right. Only for tasks."""
        return ratio_of_sums(self.scores)
