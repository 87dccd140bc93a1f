"""Recall probes: a small copy of a design learns a task within a fixed budget; the share of its right answers.

The copy has the design's width, wiring and mixers, and a vocabulary of the task's own. A run of equal layers is cut to
two, and a pattern of layers that repeats stands once. Where recall is asked, feed-forwards are left out, as Arora et
al. (2023) do: they look at no other token. All copies start from weights of variance 1 / width and train alike.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from heddle.data.recall import Practice, open_recall
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.training.settings import Settings

LONGEST_RUN = 2


@dataclass(frozen=True)
class Probe:
    """A task and its budget. mixing: whether the copy keeps its mixers alone."""

    title: str
    source: str
    asks: str
    steps: int
    rows: int = 32
    learning_rate: float = 2e-3
    mixing: bool = True

    @property
    def practice(self) -> Practice:
        """The task."""
        return open_recall(self.source)

    def settings(self) -> Settings:
        """How every copy is trained."""
        return Settings(
            steps=self.steps,
            batch_size=self.rows,
            context=self.practice.task.length,
            learning_rate=self.learning_rate,
            evaluate_every=max(1, self.steps // 10),
        )

    def copy(self, config: ModelConfig) -> ModelConfig:
        """The small copy of a design. Raises DesignError where it cannot be built."""
        layers = [layer for _, layer in config.expand()]
        if self.mixing and any(layer.mixer is not None for layer in layers):
            layers = [layer.replace(feedforward=None) for layer in layers if layer.mixer is not None]
        start = config.initialisation.replace(std=config.width**-0.5)
        return config.replace(layers=shortened(layers), vocab_size=self.practice.vocab_size, initialisation=start)

    def describe(self) -> dict[str, Any]:
        """Plain data for the report."""
        practice = self.practice
        tokens = self.steps * self.rows * practice.task.length
        told = {"title": self.title, "source": practice.spelling, "asks": self.asks, "chance": practice.task.chance}
        return told | {"length": practice.task.length, "steps": self.steps, "rows": self.rows, "train_tokens": tokens}


PROBES = {
    "mqar": Probe("MQAR", "recall:mqar", "12 keys are told with their values; which value belongs to each?", 450),
    "induction": Probe("Induction", "recall:induction", "A block of tokens comes again; which is next?", 450),
    "copying": Probe("Copying", "recall:copying", "8 letters stand among blanks; which were they, in order?", 450),
    "needle": Probe("Needle", "recall:needle", "4 marked words hide in 124 others; which word had which mark?", 450),
    "parity": Probe("Parity", "recall:parity", "Were the ones so far odd in number?", 450, mixing=False),
    "s5": Probe("S5", "recall:s5", "Which order have 5 things after each reordering?", 450, mixing=False),
}
FIRST = "mqar"
CHOICES = {FIRST: (FIRST,), "all": tuple(PROBES), "none": ()}


def chosen(word: str) -> tuple[str, ...]:
    """The probes that --recall asks for. Raises ConfigError for another word."""
    if word not in CHOICES:
        near = get_close_matches(word, CHOICES, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise ConfigError(f"--recall {word}: unknown choice; {hint}choices: {', '.join(CHOICES)}")
    return CHOICES[word]


def shortened(layers: list[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Equal layers cut to two; of unlike ones each run to one, and of a pattern that fills the rest, once."""
    runs: list[LayerConfig] = []
    for layer in layers:
        alone = layer.replace(repeat=1)
        if runs and runs[-1].replace(repeat=1) == alone:
            runs[-1] = alone.replace(repeat=min(LONGEST_RUN, runs[-1].repeat + 1))
        else:
            runs.append(alone)
    if len(runs) == 1:
        return tuple(runs)
    single = [run.replace(repeat=1) for run in runs]
    for period in range(1, len(runs)):
        if all(run == runs[place % period] for place, run in enumerate(runs)):
            return tuple(single[:period])
    return tuple(single)
