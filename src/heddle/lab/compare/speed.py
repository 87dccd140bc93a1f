"""Speed of a design with fresh weights: seconds of a training step, prefill and decode at several context lengths.

A machine's speed varies over time, so designs are measured in rounds, each design once per round, and a speed is
reported with its range over all rounds. Overlapping ranges support no ratio.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from heddle.data.samples import Batch
from heddle.errors import ConfigError
from heddle.lab.compare.results import Design
from heddle.lab.compare.statistics import quartiles
from heddle.lab.compare.tables import format_percent, join_names, shared_context, value_at
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import flops_per_token
from heddle.model.state import State
from heddle.numerics.linear import packed_weights
from heddle.runtime import fastest_seconds, synchronize
from heddle.training.built_models import BuiltModels, build_models
from heddle.training.evaluation.scores import token_scores
from heddle.training.job import TrainingJob
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch

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
