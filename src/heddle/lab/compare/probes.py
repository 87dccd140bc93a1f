"""Recall probes: a small copy of a design learns a task within a fixed budget; its accuracy is measured.

The copy has the design's width, residual wiring and mixers, and the task's vocabulary. A run of equal layers is cut to
two, and a repeating pattern of layers is kept once. For recall tasks the feed-forwards are left out, as Arora et al.
(2023) do, because they look at no other token. All copies start from weights of variance 1 / width and are trained
alike.
"""

from dataclasses import dataclass
from typing import NamedTuple

from heddle.data.recall import TaskStream, parse_recall
from heddle.errors import ConfigError, choices_hint
from heddle.lab.compare.results import ProbeSummary
from heddle.model.config import LayerConfig, ModelConfig
from heddle.training.evaluation.scores import EvaluationBudget
from heddle.training.loop import FINAL_EVALUATION_TOKENS, INTERIM_EVALUATION_TOKENS
from heddle.training.settings import Settings

# How often, and on how much text, a run is evaluated during training: in total at most a tenth of its training tokens.


MAX_SHARE = 1 / 10  # of the batches that are trained on
MAX_POINTS = 10  # of a learning curve


class Evaluations(NamedTuple):
    """interval: steps between evaluations, None for no evaluation. batches: per evaluation, as large as a step's."""

    interval: int | None
    batches: int


def plan_evaluations(steps: int, tokens_per_step: int) -> Evaluations:
    """The evaluations of a run: at most `MAX_POINTS`, the last one after the last step.

    A run of fewer than 10 steps has none. A long run reads at most `INTERIM_EVALUATION_TOKENS` each time.
    """
    affordable = int(MAX_SHARE * steps + 1e-9)
    if affordable < 1:
        return Evaluations(None, 0)
    interval = -(-steps // min(MAX_POINTS, affordable))
    points = -(-steps // interval)
    return Evaluations(interval, min(affordable // points, max(1, INTERIM_EVALUATION_TOKENS // tokens_per_step)))


def interim_tokens(settings: Settings, text_tokens: int) -> int:
    """The held-out tokens to ask the training loop for at each evaluation of a run.

    The loop reads every n-th batch of `text_tokens` tokens, with n rounded down; this is a number of tokens
    for which it reads no more batches than planned.
    """
    planned = max(1, plan_evaluations(settings.steps, settings.tokens_per_step).batches)
    available = -(-text_tokens // settings.tokens_per_step)
    return max(1, available * settings.tokens_per_step // -(-available // planned))


# The evaluation at the end of a run may take about a tenth of its time. On 16,384 tokens, sampling varies the
# difference of two close designs by about an eighth of what the seed does, after 40,000 tokens of training.
MIN_FINAL_TOKENS, MIN_FINAL_WINDOWS, MAX_FINAL_SHARE = 2**14, 64, 0.3


def final_tokens(trained_tokens: int, sequence_length: int) -> int:
    """The held-out tokens that each run of a comparison reads at its end, at most `FINAL_EVALUATION_TOKENS`."""
    wanted = max(MIN_FINAL_TOKENS, MIN_FINAL_WINDOWS * sequence_length, int(MAX_FINAL_SHARE * trained_tokens))
    return min(FINAL_EVALUATION_TOKENS, wanted)


MAX_REPEAT = 2
SOLVED_ACCURACY = 0.995  # in two evaluations in a row
HOPELESS_SHARE = 0.1  # of the way from guessing to a perfect score, after HOPELESS_STEPS of all steps
HOPELESS_STEPS = 2 / 3  # softmax attention leaves guessing after 0.4 of MQAR's steps, the gated delta rule after 0.3
FINAL_TOKENS = 2**14  # of the evaluation at the end


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
            evaluate_every=self._evaluations.interval,
        )

    @property
    def _evaluations(self) -> Evaluations:
        return plan_evaluations(self.steps, self.batch_size * self.task_stream.task.length)

    def evaluation(self) -> EvaluationBudget:
        """What each evaluation reads, and the accuracies at which a copy needs no more training, or is given up."""
        tokens = max(1, self._evaluations.batches) * self.batch_size * self.task_stream.task.length
        chance = self.task_stream.task.chance_accuracy
        hopeless_accuracy = chance + HOPELESS_SHARE * (1 - chance)
        hopeless_steps = round(HOPELESS_STEPS * self.steps)
        return EvaluationBudget(tokens, FINAL_TOKENS, SOLVED_ACCURACY, hopeless_accuracy, hopeless_steps)

    def small_copy(self, config: ModelConfig) -> ModelConfig:
        """The small copy of a design. Raises DesignError where it cannot be built."""
        layers = [layer.replace(repeat=1, shared=False) for _, layer in config.expand()]
        all_looped = all(config.looped_layers)  # then the copy, too, visits its layers again
        if all_looped:
            layers = [layers[index] for index in sorted(set(config.weight_sources))]
        if self.mixers_only and any(layer.mixer is not None for layer in layers):
            layers = [layer.replace(feedforward=None) for layer in layers if layer.mixer is not None]
        entries = shorten_layers(layers)
        if all_looped:
            entries = (LayerConfig(repeat=MAX_REPEAT, shared=True, layers=entries),)
        return config.replace(
            layers=entries,
            vocab_size=self.task_stream.vocab_size,
            initialization=config.initialization.replace(std=config.width**-0.5),
        )

    def summary(self) -> ProbeSummary:
        """What the report says about the probe."""
        stream = self.task_stream
        return ProbeSummary(
            title=self.title,
            source=stream.argument,
            question=self.question,
            chance=stream.task.chance_accuracy,
            sequence_length=stream.task.length,
            steps=self.steps,
            batch_size=self.batch_size,
            train_tokens=self.steps * self.batch_size * stream.task.length,
        )


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
AUTO = "auto"
GONE = "curve"  # recall over the number of pairs; comparisons on disk may name it
PROBE_SETS: dict[str, tuple[str, ...]] = {AUTO: (AUTO,), "all": tuple(RECALL_PROBES), "none": ()}
PROBE_SETS |= {name: (name,) for name in RECALL_PROBES}


def select_probes(names: str) -> tuple[str, ...]:
    """Parse comma-separated probes: auto, all, none or names of tasks; "auto" stays as it is.

    Raises ConfigError for an unknown name, a repeated name, and for auto, all or none together with other names.
    """
    parts = names.split(",")
    for part in parts:
        if part == GONE:
            raise ConfigError(
                f"recall {names}: recall over the number of pairs was removed; leave {GONE} out, and train on "
                "--data recall:mqar_mixture instead"
            )
        if part not in PROBE_SETS:
            raise ConfigError(f"recall {part}: unknown choice; {choices_hint(part, PROBE_SETS)}")
    probes = tuple(probe for part in parts for probe in PROBE_SETS[part])
    if len(set(probes)) < len(probes) or (len(parts) > 1 and not set(parts).isdisjoint({AUTO, "all", "none"})):
        raise ConfigError(f"recall {names}: names a task twice, or auto, all or none with others; keep one of them")
    return probes


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
