"""Where the time of a training step and of a decode step goes: by part and operation, from torch's profiler.

A part is a mixer, a feed-forward, a norm, the embedding or the head. An operation of the backward pass belongs to the
part whose operation it differentiates. Profiling slows a step down, so its seconds are measured without it too.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from heddle.lab.bench.run import (
    PHASE,
    TOKEN,
    TOKENS,
    TRAINING,
    Workload,
    least_cost,
    measure_limits,
    training_step,
    weight_dtype,
)
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.numerics.linear import packed_weights
from heddle.parts.feedforwards import Feedforward
from heddle.parts.mixers import Mixer

PART, BACKWARD = "part: ", "autograd::engine::evaluate_function: "
STEPS, PROFILED_STEPS = 3, 2
PROFILED_TOKENS = 4 * TOKENS * (STEPS + PROFILED_STEPS)  # after the context, at most
REST = {"forward": "loss", "backward": "loss", "update": "optimizer"}  # what runs outside of all parts
OUTSIDE = "outside of operations"  # Python, and the profiler itself


class ProfiledOperation(NamedTuple):
    """One line of the table. seconds: its own in one step; share: of all. calls: in one step."""

    phase: str
    part: str
    operation: str
    calls: float
    seconds: float
    share: float


class Profile(NamedTuple):
    """A profiled step. seconds: without the profiler. limit_share: least seconds at the machine's limit over these."""

    step: str
    seconds: float
    profiled_seconds: float
    limit_share: float
    operations: list[ProfiledOperation]


def profile_design(config: ModelConfig, rows: int, length: int, precision: str) -> list[Profile]:
    """Profile a training step of `rows` sequences of `length` tokens, and a decode step after as many, on this CPU.

    precision: fp32, bf16 (training casts automatically, decoding has bfloat16 weights) or bf16-params.
    """
    limits = measure_limits("cpu")
    training, token = Workload(TRAINING, rows, length), Workload(TOKEN, 1, length)
    profiles = [_profile_training(config, training, precision, _least_seconds(config, training, precision, limits))]
    if build(config, device="meta").causal:
        profiles.append(_profile_decoding(config, token, precision, _least_seconds(config, token, precision, limits)))
    return profiles


def _least_seconds(config: ModelConfig, workload: Workload, precision: str, limits: dict[str, float]) -> float:
    """The seconds of a workload at the machine's limit."""
    limit, amount = least_cost(config, workload, precision)
    return amount / limits[limit]


def _profile_training(config: ModelConfig, workload: Workload, precision: str, least_seconds: float) -> Profile:
    model = build(config, dtype=weight_dtype(workload, precision))
    step = training_step(model, workload.rows, workload.length, precision)
    return _profile_steps(workload.name, model, step, least_seconds)


def _profile_decoding(config: ModelConfig, workload: Workload, precision: str, least_seconds: float) -> Profile:
    model = build(config, dtype=weight_dtype(workload, precision)).eval()
    with torch.no_grad(), packed_weights():
        text = torch.zeros(1, workload.length, dtype=torch.int64)
        _, state = model(text, None, model.init_state(1, workload.length + PROFILED_TOKENS))

        def step() -> None:
            nonlocal state
            with record_function(PHASE + "token"):
                hidden, state = model(text[:, :1], None, state)
                model.head(hidden[:, -1]).argmax(-1)

        return _profile_steps(workload.name, model, step, least_seconds, TOKENS)


def _profile_steps(
    name: str, model: Decoder, step: Callable[[], object], least_seconds: float, repetitions: int = 1
) -> Profile:
    """Warm up, measure without the profiler, then with it."""
    times = []
    for _ in range(1 + STEPS * repetitions):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    seconds, count = statistics.median(times[1:]), PROFILED_STEPS * repetitions
    with _named_parts(model), torch_profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(count):
            step()
    profiled_seconds, operations = summarize_events(recorded.events() or [], count)
    return Profile(name, seconds, profiled_seconds, least_seconds / seconds, operations)


@contextmanager
def _named_parts(model: nn.Module) -> Iterator[None]:
    """Within the block, the profiler sees the kind of each part that runs."""
    open_ranges: list[Any] = []
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            open_ranges.append(record_function(PART + name))
            open_ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    for module in model.modules():
        kind = type(module).__module__.rpartition(".")[2]
        is_norm = type(module).__module__.startswith("heddle.parts.norms.")
        if is_norm or isinstance(module, Mixer | Feedforward) or kind == "embedding":
            name = f"{kind} norm" if is_norm else type(module).__name__.lower() if kind == "embedding" else kind
            handles += [
                module.register_forward_pre_hook(enter(name)),
                module.register_forward_hook(leave, always_call=True),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def summarize_events(events: Iterable[Any], steps: int) -> tuple[float, list[ProfiledOperation]]:
    """The seconds of one step, and its operations with the longest first, from the profiler's events."""
    roots = [event for event in events if event.cpu_parent is None]
    collector = _Collector()
    for root in roots:
        collector.find_parts(root, "")
    for root in roots:
        if root.name.startswith(PHASE):
            collector.add(root, "", "")
    step_seconds = sum(seconds for _, seconds in collector.totals.values()) / steps
    operations = [
        ProfiledOperation(*names, calls / steps, seconds / steps, seconds / steps / max(step_seconds, 1e-12))
        for names, (calls, seconds) in collector.totals.items()
    ]
    return step_seconds, sorted(operations, key=lambda operation: -operation.seconds)


class _Collector:
    """Adds up events. totals: by phase, part and operation, the calls and the seconds."""

    def __init__(self) -> None:
        self.part_of: dict[int, str] = {}
        self.totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def find_parts(self, event: Any, part: str) -> None:
        """Record the part of each forward operation by its sequence number, which its backward operation shares."""
        part = event.name.removeprefix(PART) if event.name.startswith(PART) else part
        if part and event.sequence_nr >= 0:
            self.part_of[event.sequence_nr] = part
        for child in event.cpu_children:
            self.find_parts(child, part)

    def add(self, event: Any, phase: str, part: str) -> None:
        """Add an event, and all within it, to a phase and part."""
        operation, calls = event.name, 1.0
        if operation.startswith((PHASE, PART)):
            name = operation.partition(": ")[2]
            phase, part = (name, part) if operation.startswith(PHASE) else (phase, name)
            operation, calls = OUTSIDE, 0.0
        elif operation.startswith(BACKWARD):  # the backward pass begins within the forward phase
            phase, part = "backward", self.part_of.get(event.sequence_nr, "")
            operation = operation.removeprefix(BACKWARD)
        total = self.totals[phase, part or REST.get(phase, phase), operation]
        total[0] += calls
        total[1] += event.self_cpu_time_total / 1e6
        for child in event.cpu_children:
            self.add(child, phase, part)
