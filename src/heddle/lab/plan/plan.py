"""The layouts of ranks for a design and a number of GPUs, fastest first, and why others do not fit."""

from collections.abc import Iterator
from dataclasses import dataclass

from heddle.errors import ConfigError
from heddle.lab.plan.costs import (
    Collective,
    ModelCost,
    RankLayout,
    Recompute,
    StepTime,
    collectives,
    model_cost,
    rank_memory,
    step_time,
)
from heddle.lab.plan.gpus import GIB, Gpu
from heddle.model.config import ModelConfig

USABLE = 0.92  # of a GPU's memory; the allocator's gaps, NCCL and CUDA take the rest
MAX_ROWS = 64  # of a micro-batch
MAX_GPUS = 2**20
_TRAINER_CHOICES: tuple[Recompute, ...] = ("none", "layers")


@dataclass(frozen=True)
class Candidate:
    """One layout and what it takes. memory: bytes by component. time: of one step."""

    layout: RankLayout
    memory: dict[str, int]
    collectives: tuple[Collective, ...]
    time: StepTime
    tokens_per_second: float

    @property
    def bytes(self) -> int:
        """All memory of the fullest rank."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """candidates: those that fit, fastest first. too_large: the leanest of each shard degree that does not fit."""

    cost: ModelCost
    gpu: Gpu
    gpus: int
    candidates: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]

    def utilization(self, candidate: Candidate) -> tuple[float, float]:
        """Model FLOPs utilization of a candidate: with causal attention halved, and with full attention counted."""
        forward = self.cost.forward_flops / self.cost.sequence_length
        doubled = forward + self.cost.attention_flops / self.cost.sequence_length
        peak = self.gpu.tflops * 1e12 / candidate.tokens_per_second
        return 3 * forward / peak, 3 * doubled / peak


def plan_training(
    config: ModelConfig, gpu: Gpu, gpus: int, sequence_length: int = 4096, batch_size: int | None = None
) -> Plan:
    """Rank the data-parallel layouts of a training.

    batch_size: sequences of a step on all ranks; None: whatever is fastest in one micro-batch. Raises ConfigError for
    one that is no multiple of the GPUs.
    """
    if not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"gpus {gpus}: must be between 1 and {MAX_GPUS}")
    if sequence_length < 1:
        raise ConfigError(f"sequence_length {sequence_length}: must be at least 1")
    if batch_size is not None and (batch_size < gpus or batch_size % gpus):
        below, above = batch_size // gpus * gpus, (batch_size // gpus + 1) * gpus
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(f"batch_size {batch_size}: each of {gpus} GPUs needs as many sequences; take {near}")
    cost = model_cost(config, sequence_length)
    fitting, too_large = [], []
    for shard in _shard_degrees(gpus, gpu.gpus_per_node):
        leanest = None
        for recompute in _TRAINER_CHOICES:
            best = None
            for layout in _layouts(gpus, shard, recompute, batch_size):
                candidate = _candidate(cost, layout, gpu)
                if leanest is None or candidate.bytes < leanest.bytes:
                    leanest = candidate
                if candidate.bytes > USABLE * gpu.memory * GIB:
                    continue
                if best is None or candidate.tokens_per_second > best.tokens_per_second:
                    best = candidate
            if best is not None:
                fitting.append(best)
        if leanest is not None and leanest.bytes > USABLE * gpu.memory * GIB:
            too_large.append(leanest)
    fitting.sort(key=lambda candidate: -candidate.tokens_per_second)
    return Plan(cost, gpu, gpus, tuple(fitting), tuple(too_large))


def _candidate(cost: ModelCost, layout: RankLayout, gpu: Gpu) -> Candidate:
    time = step_time(cost, layout, gpu)
    tokens = layout.rows * layout.accumulation * cost.sequence_length
    return Candidate(
        layout, rank_memory(cost, layout), collectives(cost, layout), time, tokens_per_second=tokens / time.seconds
    )


def _shard_degrees(gpus: int, gpus_per_node: int) -> list[int]:
    """Divisors of the ranks that are whole nodes or parts of one."""
    divisors = [degree for degree in range(1, int(gpus**0.5) + 1) if gpus % degree == 0]
    degrees = sorted({*divisors, *(gpus // degree for degree in divisors)})
    return [
        degree for degree in degrees if degree % gpus_per_node == 0 or gpus_per_node % degree == 0 or degree == gpus
    ]


def _layouts(gpus: int, shard: int, recompute: Recompute, batch_size: int | None) -> Iterator[RankLayout]:
    """With more and more rows in a micro-batch."""
    rows_of_step = MAX_ROWS if batch_size is None else batch_size // gpus
    rows = 1
    while rows <= min(rows_of_step, MAX_ROWS):
        if batch_size is None or rows_of_step % rows == 0:
            accumulation = 1 if batch_size is None else rows_of_step // rows
            yield RankLayout(gpus // shard, shard, rows, accumulation, recompute)
            if accumulation > 1:
                yield RankLayout(gpus // shard, shard, rows, accumulation, recompute, reduce_once=True)
        rows *= 2
