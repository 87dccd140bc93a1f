"""What is measured of a design beside its loss: recall by probes, and speed."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

from heddle.config import DesignError
from heddle.data.recall import TaskStream, parse_recall
from heddle.data.samples import Batch
from heddle.errors import ConfigError, choices_hint
from heddle.lab.compare.equal_size import with_mixers
from heddle.lab.compare.results import Design, LeftOutProbe, ProbeResult, ProbeSummary, Report
from heddle.lab.compare.statistics import quartiles
from heddle.lab.compare.tables import format_percent, join_names, shared_context, value_at
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import flops_per_token, state_bytes
from heddle.model.state import State
from heddle.numerics.linear import packed_weights
from heddle.parts.mixers import MixerConfig
from heddle.runtime import fastest_seconds, synchronize
from heddle.training.built_models import BuiltModels, build_models
from heddle.training.evaluation.scores import EvaluationBudget, token_scores
from heddle.training.job import TrainingJob
from heddle.training.loop import FINAL_EVALUATION_TOKENS, INTERIM_EVALUATION_TOKENS
from heddle.training.optimizer import build_optimizer
from heddle.training.settings import Settings
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch

# Recall probes: a small copy of a design learns a task within a fixed budget; its accuracy is measured.
#
# The copy has the design's width, residual wiring and mixers, and the task's vocabulary. A run of equal layers is cut
# to two, and a repeating pattern of layers is kept once. For recall tasks the feed-forwards are left out, as Arora et
# al. (2023) do, because they look at no other token. All copies start from weights of variance 1 / width and are
# trained in the same way.
#
# `auto` trains only tasks that may distinguish the designs. Before any training it leaves out
#
# - a task for which the small copies of all designs are equal, apart from windows that hide nothing in its sequences,
# - all tasks, if every design's state keeps all tokens of a sequence: such designs recall equally well, and none of
#   them tracks a state (Hahn 2020; Merrill & Sabharwal 2023),
# - a task with which a design's tests would read more than `MAX_TOKEN_SHARE` times its own training tokens,
# - S5, which no kind of mixer learns within the budget of a probe.
#
# Equal copies are trained once. All copies read the same sequences in the same order. A run ends early once the task is
# solved, or when it is hopeless: after `HOPELESS_STEPS` of the budget the accuracy is still at chance. A task that all
# designs solve, or none, is reported in one line and not plotted.


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
        """How much each evaluation reads, and the accuracies at which a copy counts as solved or as hopeless."""
        tokens = max(1, self._evaluations.batches) * self.batch_size * self.task_stream.task.length
        chance = self.task_stream.task.chance_accuracy
        hopeless_accuracy = chance + HOPELESS_SHARE * (1 - chance)
        hopeless_steps = round(HOPELESS_STEPS * self.steps)
        return EvaluationBudget(tokens, FINAL_TOKENS, SOLVED_ACCURACY, hopeless_accuracy, hopeless_steps)

    def small_copy(self, config: ModelConfig) -> ModelConfig:
        """The small copy of a design. Raises DesignError where it cannot be built."""
        layers = [layer.replace(repeat=1, shared=False) for _, layer in config.expand()]
        all_looped = all(config.looped_layers)  # then the copy, too, visits its layers again
        if not all_looped:
            layers = [layer.replace(adapter_rank=None) for layer in layers]
        else:
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
        "Copying", "recall:copying", "8 letters are hidden among blanks. Which letters were they, in order?", 450
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
    """Parse comma-separated probes: auto, all, none or names of tasks; "auto" is returned unchanged.

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


# Which tasks are trained, and which distinguish the designs.


MAX_TOKEN_SHARE = 2.0
SKIPPED_PROBES = ("s5",)
MIN_DIFFERENCE_SHARE = 0.1  # of the way from guessing to a perfect score, between the best and the worst design
SOLVED_SHARE = 0.9  # of that way: from there on a task counts as learned


@dataclass(frozen=True)
class TaskChoice:
    """Whether a task is trained. reason: why it is not, or "".

    copies: by design, the design that provides the small copy: itself, or an earlier one with an equal copy.
    """

    probe: str
    copies: Mapping[str, str]
    reason: str = ""


def choose_tasks(designs: Mapping[str, ModelConfig], requested: Sequence[str], train_tokens: float) -> list[TaskChoice]:
    """Decide on each task before anything is trained.

    designs: configs by name, each with a vocabulary size. requested: "auto", or names of probes, which are all trained.
    train_tokens: tokens that a design reads in all of its training runs together.
    """
    choices = []
    for requested_name in requested:
        if requested_name != AUTO:
            choices.append(_choose_task(designs, requested_name))
            continue
        affordable = MAX_TOKEN_SHARE * train_tokens
        for name in RECALL_PROBES:
            choice = _choose_task(designs, name, affordable)
            affordable -= 0 if choice.reason else _tokens(RECALL_PROBES[name])
            choices.append(choice)
    return choices


def _tokens(probe: RecallProbe) -> int:
    """Training tokens of a copy that does not stop early."""
    return probe.steps * probe.batch_size * probe.task_stream.length


def _choose_task(designs: Mapping[str, ModelConfig], name: str, affordable: float | None = None) -> TaskChoice:
    """Decide on one task. affordable: tokens that a copy may still read; None: the task was requested by name."""
    probe = RECALL_PROBES[name]
    length, copies = probe.task_stream.length, {each: _copy_or_none(probe, config) for each, config in designs.items()}
    built = [copy for copy in copies.values() if copy is not None]
    seen = {design: copy and _without_long_windows(copy, length) for design, copy in copies.items()}
    first_equal = {
        design: design if copy is None else next(other for other, its_copy in seen.items() if its_copy == copy)
        for design, copy in seen.items()
    }
    if affordable is None:
        return TaskChoice(name, first_equal)
    reason = ""
    if len(set(first_equal.values())) == 1 and len(designs) > 1:
        reason = "the small copies of all designs are equal"
        if any(copy != built[0] for copy in built):
            reason += f": their windows hide none of its {length} tokens"
    elif built and all(keeps_every_token(copy, length) for copy in built):
        reason = "in every design a layer keeps all tokens of a sequence"
    elif name in SKIPPED_PROBES:
        reason = "no kind of mixer learns it within this budget"
    elif _tokens(probe) > affordable:
        reason = f"all tests together may read at most {MAX_TOKEN_SHARE:g} times a design's training tokens"
    return TaskChoice(name, first_equal, reason)


def _copy_or_none(probe: RecallProbe, config: ModelConfig) -> ModelConfig | None:
    """The small copy of a design; None if it cannot be built (its training reports why)."""
    try:
        return probe.small_copy(config)
    except DesignError:
        return None


def _without_long_windows(copy: ModelConfig, length: int) -> ModelConfig:
    """A copy equivalent on `length` tokens: without windows that hide none of them, each layer written out."""

    def widened(mixer: MixerConfig) -> MixerConfig:
        values = {name: getattr(mixer, name) for name in type(mixer).model_fields}
        changes: dict[str, Any] = {
            name: widened(each) for name, each in values.items() if isinstance(each, MixerConfig)
        }
        if (values.get("window") or 0) >= length:
            changes |= {name: value for name, value in {"window": None, "chunked": False}.items() if name in values}
        return mixer.replace(**changes)

    try:
        copy = copy if any(copy.looped_layers) else with_mixers(copy, widened)
        return copy.replace(layers=tuple(layer.replace(repeat=1) for _, layer in copy.expand()))
    except DesignError:  # a field needs its window
        return copy


def keeps_every_token(config: ModelConfig, length: int) -> bool:
    """Whether a design's state still grows at the last of `length` tokens, so that a layer keeps all."""
    try:
        return state_bytes(config, length) > state_bytes(config, length - 1)
    except ConfigError:  # beyond its learned positions
        return True


def solved_accuracy(chance: float) -> float:
    """The accuracy at which a task counts as learned."""
    return chance + SOLVED_SHARE * (1 - chance)


def describe_results(accuracies: Mapping[str, float | None], chance: float) -> str:
    """Why a task does not distinguish the designs; "" if it does, or if only one design was measured.

    accuracies: by design; None if not measured. A task is plotted only if the best and the worst design are more than
    `MIN_DIFFERENCE_SHARE` of the way from chance to a perfect score apart.
    """
    measured = {name: accuracy for name, accuracy in accuracies.items() if accuracy is not None}
    if len(measured) < 2 or len(measured) < len(accuracies):
        return ""
    low, high = min(measured.values()), max(measured.values())
    if high - low > MIN_DIFFERENCE_SHARE * (1 - chance):
        return ""
    span = " to ".join(dict.fromkeys(map(format_percent, (low, high))))
    if low >= solved_accuracy(chance):
        return f"every design learned it ({span})"
    if high <= chance + MIN_DIFFERENCE_SHARE * (1 - chance):
        return f"no design learned it within the budget ({span}, guessing {format_percent(chance)})"
    return f"all designs score alike ({span}, guessing {format_percent(chance)})"


def summarize_abilities(
    choices: Sequence[TaskChoice], results: Mapping[str, Mapping[str, ProbeResult]], is_auto: bool
) -> tuple[dict[str, ProbeSummary], list[LeftOutProbe]]:
    """The recall probes that are plotted, and the ones left out.

    results: by design and probe, for every probe that was trained. is_auto: leave out probes that do not distinguish
    the designs.
    """
    drawn: dict[str, ProbeSummary] = {}
    left_out = []
    for choice in choices:
        summary = RECALL_PROBES[choice.probe].summary()
        of_probe = {name: of_design.get(choice.probe) for name, of_design in results.items()}
        accuracies = {name: None if result is None else result.accuracy for name, result in of_probe.items()}
        unfinished = any(result is None for result in of_probe.values())
        reason = choice.reason or (describe_results(accuracies, summary.chance) if is_auto else "")
        if choice.reason or (reason and not unfinished):
            trained = accuracies if any(result is not None for result in of_probe.values()) else {}
            left_out.append(LeftOutProbe(name=choice.probe, title=summary.title, reason=reason, accuracies=trained))
        else:
            drawn[choice.probe] = summary
    return drawn, left_out


def left_out_sentences(report: Report) -> list[str]:
    """A sentence for each reason why tasks are left out: "Not tested: MQAR, Copying: every design keeps …"."""
    titles: dict[tuple[str, str], list[str]] = {}
    for row in report.recall_left_out:
        finished = {name: value for name, value in row.accuracies.items() if value is not None}
        state = "tested, not plotted" if finished else "not tested"
        if 0 < len(finished) < len(row.accuracies):
            scores = (f"{name}, {format_percent(value)} correct" for name, value in finished.items())
            state = f"finished only for {join_names(scores, 8)}"
        titles.setdefault((row.reason, state), []).append(row.title)
    return [f"{join_names(names, 8)}: {state}, because {reason}." for (reason, state), names in titles.items()]


def window_sentences(report: Report) -> list[str]:
    """Caveats on designs whose windows are too long for a task to show them."""
    sentences = []
    for design in report.designs:
        titles: dict[int, list[str]] = {}
        for probe in report.recall.values():
            if design.windows and min(design.windows) >= probe.sequence_length:
                titles.setdefault(probe.sequence_length, []).append(probe.title)
        sentences += [
            f"{design.name}: its window of {min(design.windows)} hides none of the {length} tokens of "
            f"{join_names(names, 8)}, which therefore says nothing about the window."
            for length, names in titles.items()
        ]
    return sentences


# Speed of a design with fresh weights: seconds of a training step, prefill and decode at several context lengths.
#
# A machine's speed varies over time, so designs are measured in rounds, each design once per round, and a speed is
# reported with its range over all rounds. Overlapping ranges support no ratio.


DECODED_TOKENS = 16
MAX_PREFILLS = 2
REPEAT_LIMIT_SECONDS = 2.0  # a context is not prefilled again once its prefills took this long in total
MEASURED_STEPS, WARMUP_STEPS = 5, 2
LONGEST_SECONDS = 10.0
READ_BYTES = 2**27  # more than caches hold

Value = TypeVar("Value")
Samples = list[tuple[int, list[float]]]  # (context, tokens per second, one number for each measurement)


def measure_speeds(config: ModelConfig, contexts: Sequence[int], device: str, dtype: torch.dtype) -> dict[str, Samples]:
    """{"prefill": samples, "decode": samples}, without contexts that the design cannot process."""
    model = build(config, dtype=dtype, device=device).eval()
    speeds: dict[str, Samples] = {"prefill": [], "decode": []}
    with torch.no_grad(), packed_weights():
        _prefill(model, min(64, *contexts))  # warm up
        for context in contexts:
            try:
                state, prefill_seconds = _timed_prefill(model, context)
                decode_seconds = _timed_decode(model, state)
            except ConfigError:  # the context is longer than the learned positions
                break
            speeds["prefill"].append((context, [context / seconds for seconds in prefill_seconds]))
            speeds["decode"].append((context, [1 / seconds for seconds in decode_seconds]))
    return speeds


def expected_seconds(config: ModelConfig, contexts: Sequence[int], device: str, dtype: torch.dtype) -> float:
    """About how long `measure_speeds` takes, from its shortest context: prefills grow with their FLOPs."""
    meta = build(config, device="meta")
    head = 2.0 * meta.embed.weight.numel()  # a prefill has the last token's logits only
    total, model = _timed(lambda: build(config, dtype=dtype, device=device).eval(), device)
    try:
        with torch.no_grad(), packed_weights():
            _prefill(model, min(64, *contexts))
            state, prefills = _timed_prefill(model, contexts[0])
            decoding = sum(_timed_decode(model, state))
        first = contexts[0] * (flops_per_token(meta, contexts[0]) - head)
        for context in contexts:
            seconds = min(prefills) * context * (flops_per_token(meta, context) - head) / first
            total += seconds * (MAX_PREFILLS if seconds <= REPEAT_LIMIT_SECONDS else 1) + decoding
    except ConfigError:  # the context is longer than the learned positions
        pass
    return total


def read_rate(device: str) -> float:
    """Memory read bandwidth in bytes per second; reading weights and state at this rate limits decoding."""
    words = torch.zeros(READ_BYTES // 4, device=device)
    return READ_BYTES / fastest_seconds(words.sum, device)


@dataclass(frozen=True)
class RandomText:
    """Sequences of random tokens, one document each, on which steps are timed before any text is read."""

    vocab_size: int
    length: int
    causal: ClassVar[bool] = True

    def batch(self, seed: int, first_row: int, num_rows: int) -> Batch:
        """Return rows of a seed; `first_row` selects them."""
        random = np.random.default_rng((seed, first_row))
        tokens = random.integers(self.vocab_size, size=(num_rows, self.length + 1), dtype=np.int64)
        return Batch(tokens, ((self.length,),) * num_rows, np.arange(first_row, first_row + num_rows))

    def validation_batches(self, num_rows: int, batch_size: int) -> Iterator[Batch]:
        """Return none."""
        return iter(())

    def describe(self) -> dict[str, Any]:
        """Return its fields."""
        return {"task": "random tokens", "vocab_size": self.vocab_size, "length": self.length}


def time_training_steps(job: TrainingJob, built: BuiltModels | None = None) -> list[float]:
    """Seconds of a few training steps, without evaluations, on a model that is thrown away. built: trained if given.

    Timing stops after two steps that took `LONGEST_SECONDS` in total; the second one's time is then enough.
    """
    settings = job.settings
    batch_of = job.training_data.train_batches(replace(settings, seed=0))
    model, _, teacher = built or build_models(job)
    optimizer = build_optimizer(model, settings.weight_decay, settings.optimizer, settings.lr_scale)
    times = []
    for number in range(WARMUP_STEPS + MEASURED_STEPS):

        def step(number: int = number) -> None:
            parts = settings.gradient_accumulation_steps
            batch = prepare_batch(batch_of(number), job.device, parts, job.ranks)
            result = accumulate_gradients(model, batch, (0, number), parts, job.autocast, teacher)
            apply_gradients(model, optimizer, result, 1e-4, settings.max_gradient_norm)

        times.append(time_call(step, model)[0])
        if number and sum(times) > LONGEST_SECONDS and job.ranks.count == 1:
            break
    return times[min(WARMUP_STEPS, len(times) - 1) :]


def time_reading(batch: Batch, model: Decoder) -> float:
    """Seconds to score a token of a batch, the better of two times if the first was short."""
    byte_lengths = np.ones(model.embed.weight.shape[0], dtype=np.int64)
    times: list[float] = []
    while not times or (len(times) == 1 and times[0] < LONGEST_SECONDS):
        times.append(time_call(lambda: list(token_scores(model, [batch], byte_lengths)), model)[0])
    return min(times) / batch.targets.size


def summarize_speeds(rounds: Sequence[dict[str, Samples]]) -> dict[str, list[tuple[int, float, float, float]]]:
    """{"train": [(context, median, low, high)], "prefill": …, "decode": …} of several rounds, each in its own process.

    low, high: the lowest and highest quartile of any round, so that a machine that was busy during one of them widens
    the range.
    """
    summary: dict[str, list[tuple[int, float, float, float]]] = {}
    for phase in ("train", "prefill", "decode"):
        by_context = [dict(speeds.get(phase, [])) for speeds in rounds]  # conversions train nothing
        summary[phase] = []
        for context in sorted({context for speeds in by_context for context in speeds}):
            samples = [speeds[context] for speeds in by_context if context in speeds]
            lows, highs = zip(*map(quartiles, samples), strict=True)
            median = statistics.median([speed for of_round in samples for speed in of_round])
            summary[phase].append((context, median, min(lows), max(highs)))
    return summary


def _prefill(model: Decoder, context: int) -> State:
    device = model.embed.weight.device
    vocab_size = model.embed.weight.shape[0]
    tokens = (torch.arange(context, device=device) % vocab_size)[None]
    state: State | None
    hidden, state = model(tokens, None, model.init_state(1, context + DECODED_TOKENS + 1))
    model.head(hidden[:, -1])
    assert state is not None
    return state


def _timed_prefill(model: Decoder, context: int) -> tuple[State, list[float]]:
    """The state after a prefill, and the seconds of a few of them."""
    times: list[float] = []
    while True:
        seconds, state = time_call(lambda: _prefill(model, context), model)
        times.append(seconds)
        if len(times) == MAX_PREFILLS or sum(times) > REPEAT_LIMIT_SECONDS:
            return state, times


def _timed_decode(model: Decoder, state: State) -> list[float]:
    """The seconds of each of a few tokens decoded after the state's context."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.embed.weight.device)
    times = []
    for _ in range(DECODED_TOKENS):

        def step(previous: State = state) -> State:
            following: State | None
            hidden, following = model(token, None, previous)
            model.head(hidden[:, -1]).argmax(-1)
            assert following is not None
            return following

        seconds, state = time_call(step, model)
        times.append(seconds)
    return times


def time_call(call: Callable[[], Value], model: Decoder) -> tuple[float, Value]:
    """(seconds, result) of a call; the device's queue is empty before and after."""
    return _timed(call, str(model.embed.weight.device))


def _timed(call: Callable[[], Value], device: str) -> tuple[float, Value]:
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return time.perf_counter() - start, result


MIN_READING_SHARE = 0.5


def overhead_warning(designs: Sequence[Design]) -> list[str]:
    """A caveat if decoding is not limited by reading weights and state."""
    context = shared_context(designs, "decode")
    shares = {design.name: value_at(design.reading_share, context) for design in designs}
    slow = [
        f"{name} {format_percent(1 - share)}"
        for name, share in shares.items()
        if share is not None and share < MIN_READING_SHARE
    ]
    if not slow:
        return []
    return [
        f"Decoding at these sizes is mostly overhead of small operations: {join_names(slow, 4)} of a token's time; the "
        "rest reads weights and state. These speeds say little about larger models, which memory bandwidth limits."
    ]


WIDE_RANGE = 2.0  # the highest quartile over the lowest, of a speed that other programs disturbed


def busy_warning(designs: Sequence[Design]) -> list[str]:
    """A caveat if a speed varied so much that other programs must have used the machine."""
    ranges = [
        (high / low, f"{design.name}, {what}")
        for design in designs
        for what, (low, high) in _speed_ranges(design)
        if low > 0
    ]
    ratio, where = max(ranges, default=(1.0, ""))
    if ratio <= WIDE_RANGE:
        return []
    return [
        f"The machine was busy while speeds were measured: they vary by up to {ratio:.1f} × ({where}). Do not compare "
        "them; measure on an idle machine."
    ]


def _speed_ranges(design: Design) -> Iterator[tuple[str, tuple[float, float]]]:
    if design.train_speed_range is not None:
        yield "training", design.train_speed_range
    for what, series in (("prefill", design.prefill), ("decode", design.decode)):
        yield from ((f"{what} at {context:,} tokens", (low, high)) for context, _, low, high in series)
