"""Recall probes: a small copy of a design learns a task within a fixed budget; its share of right answers is measured.

The copy has the design's width, residual wiring and mixers, and the task's vocabulary. A run of equal layers is cut to
two, and a repeating pattern of layers is kept once. For recall tasks the feed-forwards are left out, as Arora et al.
(2023) do, because they look at no other token. All copies start from weights of variance 1 / width and are trained
alike.
"""

from dataclasses import dataclass
from typing import Any

from heddle.data.recall import TaskStream, parse_recall
from heddle.errors import ConfigError, choices_hint
from heddle.model.config import LayerConfig, ModelConfig
from heddle.training.settings import Settings

MAX_REPEAT = 2


@dataclass(frozen=True)
class RecallProbe:
    """A task and its training budget. mixers_only: whether the copy leaves out the feed-forwards."""

    title: str
    source: str
    question: str
    steps: int
    batch_size: int = 32
    learning_rate: float = 2e-3
    mixers_only: bool = True

    @property
    def task_stream(self) -> TaskStream:
        """The task that `source` names."""
        return parse_recall(self.source)

    def settings(self) -> Settings:
        """The training settings of every copy."""
        return Settings(
            steps=self.steps,
            batch_size=self.batch_size,
            sequence_length=self.task_stream.task.length,
            learning_rate=self.learning_rate,
            evaluate_every=max(1, self.steps // 10),
        )

    def small_copy(self, config: ModelConfig) -> ModelConfig:
        """The small copy of a design. Raises DesignError where it cannot be built."""
        layers = [layer for _, layer in config.expand()]
        if self.mixers_only and any(layer.mixer is not None for layer in layers):
            layers = [layer.replace(feedforward=None) for layer in layers if layer.mixer is not None]
        return config.replace(
            layers=shorten_layers(layers),
            vocab_size=self.task_stream.vocab_size,
            initialization=config.initialization.replace(std=config.width**-0.5),
        )

    def summary(self) -> dict[str, Any]:
        """The probe as plain data for the report."""
        stream = self.task_stream
        return {
            "title": self.title,
            "source": stream.argument,
            "question": self.question,
            "chance": stream.task.chance_accuracy,
            "sequence_length": stream.task.length,
            "steps": self.steps,
            "batch_size": self.batch_size,
            "train_tokens": self.steps * self.batch_size * stream.task.length,
        }


RECALL_PROBES = {
    "mqar": RecallProbe(
        "MQAR", "recall:mqar", "12 keys are shown with their values. Which value belongs to each key?", 450
    ),
    "induction": RecallProbe(
        "Induction", "recall:induction", "A block of tokens is repeated. Which token is next?", 450
    ),
    "copying": RecallProbe(
        "Copying", "recall:copying", "8 letters stand among blanks. Which letters were they, in order?", 450
    ),
    "needle": RecallProbe(
        "Needle", "recall:needle", "4 marked words are hidden among 124 others. Which word had which mark?", 450
    ),
    "parity": RecallProbe("Parity", "recall:parity", "Is the number of ones so far odd?", 450, mixers_only=False),
    "s5": RecallProbe("S5", "recall:s5", "In which order are 5 items after each permutation?", 450, mixers_only=False),
}
DEFAULT_PROBE = "mqar"
PROBE_SETS = {DEFAULT_PROBE: (DEFAULT_PROBE,), "all": tuple(RECALL_PROBES), "none": ()}


def select_probes(name: str) -> tuple[str, ...]:
    """The names of a set of probes: mqar, all or none. Raises ConfigError for another name."""
    if name not in PROBE_SETS:
        raise ConfigError(f"recall {name}: unknown choice; {choices_hint(name, PROBE_SETS)}")
    return PROBE_SETS[name]


def shorten_layers(layers: list[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Shorten a stack: two layers where all are equal, else one of each run, and a repeating pattern once."""
    runs: list[LayerConfig] = []
    for layer in layers:
        single = layer.replace(repeat=1)
        if runs and runs[-1].replace(repeat=1) == single:
            runs[-1] = single.replace(repeat=min(MAX_REPEAT, runs[-1].repeat + 1))
        else:
            runs.append(single)
    if len(runs) == 1:
        return tuple(runs)
    kinds = [run.replace(repeat=1) for run in runs]
    for period in range(1, len(runs)):
        if all(run == runs[index % period] for index, run in enumerate(runs)):
            return tuple(kinds[:period])
    return tuple(kinds)
