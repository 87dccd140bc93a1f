"""A training step of one rank among many on fake tensors: what its memory, FLOPs and collectives will be.

The step is the trainer's own: FSDP2, the loss, the backward pass, clipping and AdamW, in a process group that is not
there. Long rows of equal layers are folded (`heddle.distributed.planning.layer_runs`), and the numbers of all layers
follow from those of three and four repeats. Micro-batches between the first and the last one are equal, so three are
run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from heddle.data.samples import Batch
from heddle.distributed.planning.collectives import Collective
from heddle.distributed.planning.fake_ranks import fake_ranks, fake_tensors
from heddle.distributed.planning.layer_runs import FoldedLayer, Run, extrapolate, folded, runs_of
from heddle.distributed.planning.ranks import RankLayout
from heddle.distributed.planning.step_trace import Label, StepTrace
from heddle.distributed.ranks import Ranks
from heddle.distributed.sharding import Sharding, shard_model
from heddle.errors import ConfigError
from heddle.model.config import LayerConfig, ModelConfig
from heddle.model.decoder import build
from heddle.numerics.dispatch.operation import record_choices
from heddle.parts.positions import Rotation
from heddle.training.optimizer import Optimizer, build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch

_MICRO_BATCHES = 3  # the first, one like all between, and the last


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step.

    memory: bytes by component when they are most in total. phase: when that is, such as "backward". flops: of
    products and attention, backward pass and recomputed layers included. collectives: as of a plan. layers: how many
    were run.
    """

    memory: Mapping[str, int]
    phase: str
    flops: int
    collectives: tuple[Collective, ...]
    layers: int


def dry_run(config: ModelConfig, layout: RankLayout, sequence_length: int, fold: bool = True) -> DryRun:
    """Run a step of the trainer on fake tensors. fold: equal layers are told by three and four of them.

    Raises ConfigError for a layout that the trainer does not offer, and within a process group.
    """
    _check(config, layout)
    runs = runs_of(config.layer_order) if fold else [Run((kind,), 1) for kind in config.layer_order]
    longer = {index: folded(runs, index) for index, run in enumerate(runs) if run.is_long}
    with fake_ranks(layout) as mesh:

        def traced(layers: Sequence[FoldedLayer]) -> StepTrace:
            return _traced(_with_layers(config, layers), mesh, layout, sequence_length, [x.label for x in layers])

        base = traced(folded(runs))
        traces = {index: traced(layers) for index, layers in longer.items()}

    def of_all(number: Callable[[StepTrace], float]) -> int:
        return round(extrapolate(runs, number(base), lambda index: number(traces[index])))

    repeats = _repeats(layout.accumulation)
    peaks = {
        label: {name: of_all(partial(_bytes_at, label, name)) for name in peak} for label, peak in base.peaks.items()
    }
    highest = max(peaks, key=lambda label: sum(peaks[label].values()))
    names = dict.fromkeys(name for counter in base.collectives.values() for name in counter)
    return DryRun(
        memory=peaks[highest],
        phase=str(highest[0]),
        flops=of_all(partial(_flops, repeats)),
        collectives=tuple(Collective(name[0], of_all(partial(_sent, repeats, name)), name[1]) for name in names),
        layers=sum(map(len, (folded(runs), *longer.values()))),
    )


def _bytes_at(label: Label, component: str, trace: StepTrace) -> int:
    return trace.peaks[label].get(component, 0)


def _flops(repeats: Mapping[int, int], trace: StepTrace) -> int:
    return sum(count * trace.flops[index] for index, count in repeats.items())


def _sent(repeats: Mapping[int, int], collective: tuple[str, int], trace: StepTrace) -> int:
    return sum(count * trace.collectives[index][collective] for index, count in repeats.items())


def _check(config: ModelConfig, layout: RankLayout) -> None:
    if config.encoder is not None or config.vocab_size is None:
        reason = "vocab_size: is missing" if config.vocab_size is None else "encoder: a dry run covers decoders only"
        raise ConfigError(f"{reason}; give a design without an encoder and with a vocab_size")
    if layout.recompute == "selective" or layout.whole_logits or (layout.accumulation > 1 and not layout.reduce_once):
        raise ConfigError(f"{layout}: the trainer recomputes whole layers, cuts the loss in chunks and reduces once")


def _repeats(accumulation: int) -> dict[int, int]:
    """How many micro-batches each of those that run stands for, by its number from 1."""
    last = min(accumulation, _MICRO_BATCHES)
    return {index: accumulation - 2 if (index, last) == (2, 3) else 1 for index in range(1, last + 1)}


def _with_layers(config: ModelConfig, layers: Sequence[FoldedLayer]) -> ModelConfig:
    kinds = [distinct.config for distinct in config.distinct_layers]
    entries = (LayerConfig(mixer=kinds[x.kind].mixer, feedforward=kinds[x.kind].feedforward) for x in layers)
    return config.replace(layers=tuple(entries))


def _traced(
    config: ModelConfig, mesh: Any, layout: RankLayout, sequence_length: int, labels: Sequence[object]
) -> StepTrace:
    """A step after one that has allocated the moments."""
    model = build(config, device="meta")
    for module in model.modules():
        if isinstance(module, Rotation):
            module.prepare_length(sequence_length)
    sharding = Sharding(torch.bfloat16, torch.float32 if layout.reduce_bytes == 4 else None, layout.reshard)
    shard_model(model, mesh, sharding)
    ranks = Ranks(0, layout.gpus)
    fake = fake_tensors()
    with fake, record_choices("cuda"):
        model.to_empty(device="cpu")
        model.tie()
        model.train()
        model.checkpointing = layout.recompute == "layers"
        optimizer = build_optimizer(model, weight_decay=0.1)
        trace = StepTrace(fake)
        trace.record_layers(model, list(model.layers), labels)
        batch = prepare_batch(_batch(layout, sequence_length), "cpu", min(layout.accumulation, _MICRO_BATCHES))
        with trace:
            trace.begin("start", None)
            trace.label(model.parameters(), "parameters")
            _allocate_moments(optimizer, trace)
            result = accumulate_gradients(model, batch._replace(ranks=ranks), (0, 0))
            trace.begin("optimizer", "root")
            trace.begin("update", None)  # it allocates nothing, but DTensor computes shapes of whole parameters
            apply_gradients(model, optimizer, result, 0.0, 1.0)
    return trace


def _batch(layout: RankLayout, sequence_length: int) -> Batch:
    """One document in each row of this rank."""
    rows = layout.rows * min(layout.accumulation, _MICRO_BATCHES)
    tokens = np.zeros((rows, sequence_length + 1), np.int64)
    return Batch(tokens, ((sequence_length,),) * rows, np.arange(rows))


def _allocate_moments(optimizer: Optimizer, trace: StepTrace) -> None:
    for parameter in optimizer.trainable.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.0)
    trace.label((tensor for state in optimizer.state.values() for tensor in state.values()), "moments")
