"""Measure sides in rounds: each design by heddle and, if transformers is the peer, by it at its defaults and tuned.

Each side is its own process, because process settings (the allocator, how products are computed) must not leak.
"""

import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import record_function

from heddle.data.samples import Batch
from heddle.errors import ConfigError, HeddleError, MachineError, pip_install
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.size import size
from heddle.numerics.linear import PackedWeightCache, packed_weights
from heddle.runtime import fastest_seconds
from heddle.session import dtype_of
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients

# Measurements in rounds: each side takes one timed step at a time, so that noise of the machine affects all alike.
#
# Before and after each round a product is timed. If it was slow, something else used the machine, and the round is
# repeated.


SLOW = 1.15  # times the seconds of the calibration product
CALIBRATION_WIDTH = 1024


class Calibration:
    """A float32 product whose seconds say how fast the machine is. threads: of this process; None: as set."""

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.x = torch.ones(CALIBRATION_WIDTH, CALIBRATION_WIDTH)
        self.usual = statistics.median(self.seconds() for _ in range(7))

    def seconds(self) -> float:
        """The fastest of three products."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            torch.mm(self.x, self.x)
            times.append(time.perf_counter() - began)
        return min(times)

    def is_slow(self) -> bool:
        """Whether the product is now slower than the fastest one so far."""
        seconds = self.seconds()
        self.usual = min(self.usual, seconds)
        return seconds > SLOW * self.usual


class RoundSeconds(NamedTuple):
    """The seconds of each round by step, and how many rounds were repeated."""

    seconds: dict[Any, list[float]]
    repeated: int

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was slow for so many rounds that some slow ones count."""
        return self.repeated >= max(map(len, self.seconds.values()), default=1)


def measure_in_rounds(steps: Mapping[Any, Callable[[], float]], rounds: int, calibration: Calibration) -> RoundSeconds:
    """Take each step once per round. A round during which the machine was slow is repeated, at most `rounds` times.

    steps: by name, or any other key, a call that returns its seconds.
    """
    names = list(steps)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    repeated = 0
    for number in range(2 * rounds):
        was_slow, times = calibration.is_slow(), {}
        for offset in range(len(names)):  # a different one starts each time
            name = names[(number + offset) % len(names)]
            times[name] = steps[name]()
        if (calibration.is_slow() or was_slow) and repeated < rounds:
            repeated += 1
            continue
        for name, time_of_step in times.items():
            seconds[name].append(time_of_step)
        if len(seconds[names[0]]) == rounds:
            break
    return RoundSeconds(seconds, repeated)


class Quartiles(NamedTuple):
    """A median and its quartiles."""

    median: float
    low: float
    high: float


def quartiles_of(values: Sequence[float]) -> Quartiles:
    """The median and quartiles of some values, at least one."""
    median = statistics.median(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median, median, median)
    return Quartiles(median, low, high)


def ratio_of(values: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """`quartiles_of` the ratios of two sides, round by round."""
    return quartiles_of([above / below for above, below in zip(values, reference, strict=True)])


# The workload whose seconds are measured: a training step, the prefill of a prompt, and tokens after a context.


PHASE = "phase: "  # begins the names of a step's phases in a profile
HEDDLE, DEFAULTS, TUNED = "heddle", "transformers", "transformers tuned"  # sides of a design
TRAINING, PREFILL, TOKEN = "training", "prefill", "token"
TOKENS = 8  # decoded per measurement
COMPARED_LOGITS = 8
WEIGHT_DECAY, LEARNING_RATE, MAX_GRADIENT_NORM = 0.1, 1e-4, 1.0


class Workload(NamedTuple):
    """A kind of work (training, prefill or token), its sequences, and their length or context in tokens."""

    kind: str
    rows: int
    length: int

    @property
    def name(self) -> str:
        """Its name in a table."""
        if self.kind == TRAINING:
            return f"training step of {self.rows} × {self.length:,} tokens"
        return f"prefill of {self.length:,} tokens" if self.kind == PREFILL else f"one token after {self.length:,}"

    @property
    def tokens(self) -> int:
        """The number of tokens it processes."""
        return self.rows if self.kind == TOKEN else self.rows * self.length


def least_cost(config: ModelConfig, workload: Workload, precision: str) -> tuple[str, float]:
    """(name of a limit of `measure_limits`, amount that the workload takes): FLOPs of products, or bytes read."""
    dtype = dtype_of(precision)
    sizes = size(config, workload.length, dtype=dtype)
    if workload.kind == TOKEN:
        read = sizes.active_parameters * dtype.itemsize + workload.rows * sizes.state_bytes
        return "read_bytes_per_second", read
    passes = 3 if workload.kind == TRAINING else 1
    limit = "fp32_flops_per_second" if precision == "fp32" else "bf16_flops_per_second"
    return limit, passes * workload.tokens * sizes.flops_per_token


def benchmark_tokens(config: ModelConfig, rows: int, length: int) -> np.ndarray:
    """int64 [rows, length]: equal in every process."""
    return np.random.default_rng(0).integers(0, config.vocab_size or 1, (rows, length))


def weight_dtype(workload: Workload, precision: str) -> torch.dtype:
    """The dtype of the weights: training in bf16 keeps float32 weights and casts, decoding has bfloat16 ones."""
    is_wide = precision == "fp32" or (precision == "bf16" and workload.kind == TRAINING)
    return torch.float32 if is_wide else torch.bfloat16


def training_step(model: Decoder, rows: int, length: int, precision: str) -> Callable[[], float]:
    """An AdamW step on the same sequences each time, as in `heddle train`. It returns the loss before the step."""
    model.train()
    optimizer = build_optimizer(model, WEIGHT_DECAY)
    batch = Batch(benchmark_tokens(model.config, rows, length + 1), ((length,),) * rows, np.arange(rows))
    autocast = torch.bfloat16 if precision == "bf16" else None

    def step() -> float:
        with record_function(PHASE + "forward"):
            result = accumulate_gradients(model, batch, (0, 0), autocast=autocast)
        with record_function(PHASE + "update"):
            apply_gradients(model, optimizer, result, LEARNING_RATE, MAX_GRADIENT_NORM)
        return float(result.loss)

    return step


class Prepared(NamedTuple):
    """A workload that is ready: `run(before())` does it once, and `before` is not timed.

    values: the loss of the first step, or the first logits after the prompt, which other sides must reproduce.
    """

    before: Callable[[], Any]
    run: Callable[[Any], object]
    values: list[float]


def prepare_heddle(config: ModelConfig, workload: Workload, precision: str, device: str) -> Prepared:
    """Build a model and prepare the workload."""
    model = build(config, dtype=weight_dtype(workload, precision), device=device)
    if workload.kind == TRAINING:
        step = training_step(model, workload.rows, workload.length, precision)
        return Prepared(_nothing, lambda _: step(), [step()])
    model.eval()
    cache = PackedWeightCache()  # a generation packs its weights once

    def read(texts: Tensor, state: Any) -> tuple[Tensor, Any]:
        with torch.no_grad(), packed_weights(cache):
            hidden, after = model(texts, None, state)
            return model.head(hidden[:, -1:]), after

    return _reading(read, config, workload, device, lambda: model.init_state(workload.rows, workload.length + TOKENS))


def prepare_transformers(model: Any, config: ModelConfig, workload: Workload, precision: str) -> Prepared:
    """The same workload with a transformers model: causal sequences, torch's fused AdamW, a dynamic cache."""
    from heddle.exchange.transformers.cache import CACHE_NAME

    model = model.to(weight_dtype(workload, precision))
    if workload.kind == TRAINING:
        tokens = torch.from_numpy(benchmark_tokens(config, workload.rows, workload.length + 1)[:, :-1]).to(model.device)
        step = _transformers_step(model.train(), tokens, precision)
        return Prepared(_nothing, lambda _: step(), [step()])
    model.eval()

    def read(texts: Tensor, cache: Any) -> tuple[Tensor, Any]:
        with torch.no_grad():
            output = model(input_ids=texts, **{CACHE_NAME: cache}, use_cache=True, logits_to_keep=1)
            return output.logits, getattr(output, CACHE_NAME)

    return _reading(read, config, workload, str(model.device), _nothing)


def _nothing() -> None:
    return None


def _reading(
    read: Callable[[Tensor, Any], tuple[Tensor, Any]],
    config: ModelConfig,
    workload: Workload,
    device: str,
    first_state: Callable[[], Any],
) -> Prepared:
    """A prefill, or tokens decoded from a copy of the state after it. read: (tokens, state) -> (logits, state)."""
    prompt = torch.from_numpy(benchmark_tokens(config, workload.rows, workload.length)).to(device)
    logits, start = read(prompt, first_state())
    first, values = logits.argmax(-1), logits[0, -1, :COMPARED_LOGITS].tolist()

    def decode(state: Any) -> None:
        token = first
        for _ in range(TOKENS):
            logits, state = read(token, state)
            token = logits.argmax(-1)

    if workload.kind == PREFILL:
        return Prepared(first_state, lambda state: read(prompt, state)[0].argmax(-1), values)
    return Prepared(lambda: copy.deepcopy(start), decode, values)


def _transformers_step(model: Any, tokens: Tensor, precision: str) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True
    )
    autocast = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=precision == "bf16")

    def step() -> float:
        with autocast:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


WORKER_MODULE = "heddle.lab.bench.worker"
_TOLERANCES = {"fp32": 0.02, "bf16": 0.1}  # relative; transformers' loss leaves out the last token of each sequence
PEER_PROCESSES = {None: (HEDDLE,), "transformers": (HEDDLE, DEFAULTS, TUNED)}  # by the name of a peer


@dataclass(frozen=True)
class Bench:
    """What to measure.

    designs: by name. peer: None, or "transformers". device: resolved. threads: per process. rounds: per workload of
    `measured`.
    """

    designs: Mapping[str, ModelConfig]
    measured: Sequence[Workload]
    rounds: int
    precision: str = "fp32"
    peer: str | None = None
    device: str = "cpu"
    threads: int = 1
    choices: Mapping[str, Any] = field(default_factory=dict)
    part_files: Sequence[str] = ()


class Measurement(NamedTuple):
    """One side's seconds for a workload, and their ratio to heddle's with the first design, round by round.

    limit_share: the fewest possible seconds, at this machine's limit, over the median.
    """

    design: str
    side: str
    seconds: Quartiles
    tokens_per_second: float
    limit_share: float
    ratio: Quartiles


class MeasuredWorkload(NamedTuple):
    """The measurements of one workload. repeated: rounds during which the machine was slow. is_noisy: too many."""

    workload: Workload
    measurements: list[Measurement]
    repeated: int
    is_noisy: bool


class SideProcess:
    """The worker process of one side of a design, which answers requests."""

    def __init__(self, label: str, request: dict[str, Any]) -> None:
        self.label, self.request = label, request
        command = [sys.executable, "-m", WORKER_MODULE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises HeddleError if the worker rejects it or ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MachineError(f"{self.label}: its process ended with code {self.process.wait()}; choose smaller sizes")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = MachineError if answer["exit_code"] == MachineError.exit_code else ConfigError
            raise kind(f"{self.label}: {answer['error']}")
        return answer

    def prepare(self, workload: Workload) -> list[float]:
        """Build and warm up a workload in the worker. Returns its values."""
        values: list[float] = self.call(self.request | {"workload": list(workload)})["values"]
        return values

    def seconds(self) -> float:
        """Run the workload once in the worker."""
        return float(self.call({})["seconds"])

    def close(self) -> None:
        """End the worker."""
        self.process.kill()
        self.process.communicate()


def run_bench(
    bench: Bench, limits: Mapping[str, float], report: Callable[[MeasuredWorkload], None] = lambda _: None
) -> list[MeasuredWorkload]:
    """Measure every workload of every side. limits: from `measure_limits`. report: called with each measured workload.

    A workload that a design cannot run (a prompt longer than its learned positions) raises HeddleError with the reason.
    """
    calibration = Calibration(bench.threads)
    results = []
    with ExitStack() as stack:
        sides = {
            (name, side): _start(bench, name, side) for name in bench.designs for side in PEER_PROCESSES[bench.peer]
        }
        for process in sides.values():
            stack.callback(process.close)
        for workload in bench.measured:
            values = {key: process.prepare(workload) for key, process in sides.items()}
            for (name, side), computed in values.items():
                check_values(f"{name}, {side}", values[name, HEDDLE], computed, bench.precision)
            steps = {key: process.seconds for key, process in sides.items()}
            results.append(_measure(bench, workload, limits, steps, calibration))
            report(results[-1])
    return results


def check_values(label: str, reference: Sequence[float], values: Sequence[float], precision: str) -> None:
    """Raise MachineError if a side's values differ from heddle's by more than rounding and the last target explain."""
    size = max(map(abs, reference))
    difference = max(abs(a - b) for a, b in zip(reference, values, strict=True)) / size
    limit = _TOLERANCES["fp32" if precision == "fp32" else "bf16"]
    if not difference <= limit:
        raise MachineError(
            f"{label}: results differ from heddle's by {100 * difference:.2g} %; their times cannot be compared"
        )


def _start(bench: Bench, name: str, side: str) -> SideProcess:
    request = {
        "design": bench.designs[name].dump(),
        "side": side,
        "precision": bench.precision,
        "device": bench.device,
        "threads": bench.threads,
        "choices": dict(bench.choices),
        "part_files": list(bench.part_files),
    }
    return SideProcess(name if side == HEDDLE else f"{name}, {side}", request)


def _measure(
    bench: Bench,
    workload: Workload,
    limits: Mapping[str, float],
    steps: Mapping[tuple[str, str], Callable[[], float]],
    calibration: Calibration,
) -> MeasuredWorkload:
    """Take the rounds of one workload. steps: by design and side."""
    rounds = measure_in_rounds(steps, bench.rounds, calibration)
    first = next(iter(rounds.seconds.values()))
    measurements = []
    for (design, side), times in rounds.seconds.items():
        seconds = quartiles_of(times)
        limit, amount = least_cost(bench.designs[design], workload, bench.precision)
        share = amount / limits[limit] / seconds.median
        ratio = ratio_of(times, first)
        measurements.append(Measurement(design, side, seconds, workload.tokens / seconds.median, share, ratio))
    return MeasuredWorkload(workload, measurements, rounds.repeated, rounds.is_noisy)


def check_peer(peer: str | None, designs: Mapping[str, ModelConfig]) -> None:
    """Raise ConfigError for a peer that is unknown or not installed, or that cannot compute one of the designs."""
    if peer is None:
        return
    if peer not in PEER_PROCESSES:
        raise ConfigError(f"--peer {peer}: unknown peer; the choice is transformers")
    if find_spec(peer) is None:
        raise ConfigError(f"--peer transformers: is not installed; {pip_install('hf')}")
    from heddle.exchange.family_match import HEDDLE as OWN
    from heddle.exchange.family_match import best_match

    for name, config in designs.items():
        try:
            model_type = best_match(config, None).family.model_type
        except HeddleError as error:
            raise ConfigError(f"--peer transformers: {name}: {error}") from error
        if model_type == OWN:
            raise ConfigError(
                f"--peer transformers: {name} matches no family (`heddle show` names the nearest); leave --peer out"
            )


# What a machine reaches: products by dtype and shape, reading and copying memory, and starting a small operation.
#
# The fastest of several measurements counts: a limit is what the machine can do, not what it does under other load.


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SMALL_OPERATIONS = 200


def measure_limits(device: str) -> dict[str, float]:
    """Bytes per second of a read and of a copy, FLOP/s of square products, seconds of a small operation."""
    size, width = (2**28, 1024) if device == "cpu" else (2**30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    target, little = torch.empty_like(source), torch.zeros(1, device=device)
    words = source.view(torch.float32)
    limits = {
        "read_bytes_per_second": size / fastest_seconds(words.sum, device),
        "copy_bytes_per_second": 2 * size / fastest_seconds(lambda: target.copy_(source), device),
    }
    for name, dtype in DTYPES.items():
        limits[f"{name}_flops_per_second"] = product_rate(dtype, (width, width, width), device)
    limits["launch_seconds"] = (
        fastest_seconds(lambda: [little.add_(1.0) for _ in range(SMALL_OPERATIONS)], device) / SMALL_OPERATIONS
    )
    return limits


def product_rate(dtype: torch.dtype, shape: tuple[int, int, int], device: str = "cpu") -> float:
    """FLOP/s of x Wᵀ with x [rows, inputs] and W [outputs, inputs], for shape (rows, inputs, outputs)."""
    rows, inputs, outputs = shape
    x, weight = (torch.ones(count, inputs, dtype=dtype, device=device) for count in (rows, outputs))
    return 2 * rows * inputs * outputs / fastest_seconds(partial(functional.linear, x, weight), device)
