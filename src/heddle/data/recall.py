"""`recall:TASK,OPTION=VALUE,…`: synthetic tasks as training data, with rows generated on demand."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from heddle.data.recall_mixture import MqarMixture
from heddle.data.recall_tasks import TASKS as SINGLE_TASKS
from heddle.data.recall_tasks import Task as SingleTask
from heddle.data.samples import Batch
from heddle.errors import DataError, choices_hint

RECALL_PREFIX = "recall:"
VALIDATION_SEED = -1  # the seed of the validation rows; no training run uses it
Task = SingleTask | MqarMixture
TASKS: dict[str, type[Task]] = {**SINGLE_TASKS, "mqar_mixture": MqarMixture}


@dataclass(frozen=True)
class TaskStream:
    """An endless stream of rows of a task. A row is a function of a seed and the row's number."""

    name: str
    task: Task
    causal: ClassVar[bool] = True  # a later token may be the answer, so attention must not see it

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self.task.length

    @property
    def argument(self) -> str:
        """The data argument that names this task, with every option written out."""
        return ",".join([RECALL_PREFIX + self.name, *(f"{key}={value}" for key, value in asdict(self.task).items())])

    def batch(self, seed: int, first_row: int, num_rows: int) -> Batch:
        """Rows `first_row` to `first_row + num_rows − 1` of a seed, each one document, or packed with several."""
        sample_indices = np.arange(first_row, first_row + num_rows, dtype=np.int64)
        inputs, labels = self.task.draw_rows(seed, sample_indices)
        tokens = np.pad(inputs, ((0, 0), (0, 1)))  # a last column that no label reads
        doc_lengths: tuple[tuple[int, ...], ...] = ((self.task.length,),) * num_rows
        if isinstance(self.task, MqarMixture):
            doc_lengths = self.task.doc_lengths(sample_indices)
        return Batch(tokens, doc_lengths, sample_indices, labels=labels)

    def validation_batches(self, num_rows: int, batch_size: int) -> Iterator[Batch]:
        """The first `num_rows` validation rows, the same for every training run."""
        for first in range(0, num_rows, batch_size):
            yield self.batch(VALIDATION_SEED, first, min(batch_size, num_rows - first))

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the task uses."""
        return self.task.vocab_size

    def check_vocab_size(self, vocab_size: int | None) -> None:
        """Raise DataError where a model's `vocab_size` is below the task's (None: the model takes the task's)."""
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise DataError(
                f"{self.argument} has {self.vocab_size} tokens, but vocab_size is {vocab_size}: "
                f"set vocab_size to at least {self.vocab_size}, or leave it out."
            )

    def describe(self) -> dict[str, Any]:
        """Plain data: the task, its options and the accuracy of guessing."""
        summary = {"task": self.name, "options": asdict(self.task), "vocab_size": self.vocab_size}
        return summary | {"chance": self.task.chance_accuracy}


def is_recall_argument(argument: str) -> bool:
    """Whether a data argument names a synthetic task; write ./recall:… for a file of that name."""
    return argument.startswith(RECALL_PREFIX)


def parse_recall(argument: str) -> TaskStream:
    """Parse a task such as `recall:mqar` or `recall:mqar,pairs=8,length=64`. Raises DataError with the nearest name."""
    name, *option_texts = argument.removeprefix(RECALL_PREFIX).split(",")
    if name not in TASKS:
        raise DataError(f"data {argument}: unknown task '{name}'; {choices_hint(name, list(TASKS))}")
    option_names = [field.name for field in fields(TASKS[name])]
    options: dict[str, int] = {}
    for text in option_texts:
        key, _, value = text.partition("=")
        if key not in option_names:
            raise DataError(f"data {argument}: {name} has no option '{key}'; {choices_hint(key, option_names)}")
        if key in options:
            raise DataError(f"data {argument}: gives {key} twice; keep one")
        if not (value.isascii() and value.isdigit() and len(value) < 10):
            raise DataError(f"data {argument}: {key}={value}: expected an integer, such as {key}=8")
        options[key] = int(value)
    try:
        return TaskStream(name, TASKS[name](**options))
    except DataError as error:
        raise DataError(f"data {argument}: {error}") from None
