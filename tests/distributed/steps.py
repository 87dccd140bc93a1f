"""Training steps of a design on one process and on ranks as threads, with all numbers, for comparison."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

from heddle.data.samples import Batch
from heddle.distributed.ranks import ONE_PROCESS, Ranks, whole
from heddle.distributed.sharding import Sharding, initialize_shards, shard_model
from heddle.lab.plan.costs import RankLayout, model_cost, rank_memory
from heddle.lab.plan.dry_run import StepTrace
from heddle.model.config import ModelConfig
from heddle.model.decoder import Decoder, build
from heddle.model.load_config import load_config
from heddle.training.optimizer import build_optimizer
from heddle.training.step import accumulate_gradients, apply_gradients, prepare_batch
from tests.distributed.ranks import on_ranks

ROWS, LENGTH, STEPS, RATE = 8, 12, 3, 1e-2
MESHES = {"DDP-2": (2, 1), "FSDP-2": (1, 2), "FSDP-4": (1, 4), "HSDP-2×2": (2, 2)}  # replicate, shard


@dataclass(frozen=True)
class Way:
    """How a batch is computed: accumulated in parts, layers recomputed, some targets not scored."""

    parts: int = 1
    recompute: bool = False
    uneven_targets: bool = False
    optimizer: str = "adamw"


WAYS = {
    "plain": Way(),
    "accumulated": Way(parts=2),
    "recomputed": Way(recompute=True),
    "uneven targets": Way(uneven_targets=True),
    "muon": Way(optimizer="muon"),
    "everything": Way(parts=2, recompute=True, uneven_targets=True, optimizer="muon"),
}
# Vectors that a caller gives to cross-attention have no training step.
WITHOUT_ENCODER = {"cross-alone", "cross-double-softmax", "cross-grouped", "cross-own-widths", "pair-cross"}


def batch_of(config: ModelConfig, step: int, way: Way, encoder: Decoder | None) -> Batch:
    """Packed rows of several documents; the last half of the rows have fewer targets if they are uneven."""
    numbers = np.random.default_rng(step)
    tokens = numbers.integers(0, config.vocab_size or 2, (ROWS, LENGTH + 1))
    lengths = ((LENGTH,), (5, 7), (1, 1, 10), (3, 9)) * (ROWS // 4)
    labels = None
    if way.uneven_targets:
        labels = tokens[:, 1:].copy()
        labels[ROWS // 2 :, 2:] = -1
    source = None
    if encoder is not None:
        source = numbers.integers(0, encoder.embed.weight.shape[0], (ROWS, 7))
        source[::2, 5:] = -1
    coordinates = numbers.integers(0, 5, (ROWS, LENGTH, 2))
    return Batch(tokens, lengths, np.arange(ROWS) + step * ROWS, source, labels, coordinates)


def run_steps(model: Decoder, config: ModelConfig, way: Way, ranks: Ranks) -> dict[str, Any]:
    """Losses, norms and weights after a few steps. `gradients` are those of the first one."""
    model.train()
    model.checkpointing = way.recompute
    optimizer = build_optimizer(model, 0.1, way.optimizer)
    losses, norms, penalties, gradients = [], [], [], dict[str, torch.Tensor]()
    for step in range(STEPS):
        batch = batch_of(config, step, way, model.encoder)
        prepared = prepare_batch(batch, "cpu", way.parts, ranks)
        result = accumulate_gradients(model, prepared, (0, step))
        if step == 0:
            named = model.named_parameters()
            gradients = {name: whole(p.grad).clone() for name, p in named if p.grad is not None}
        numbers = apply_gradients(model, optimizer, result, RATE, 1.0).read()
        losses.append(numbers.loss)
        norms.append(numbers.gradient_norm)
        penalties.append(numbers.aux_loss)
    weights = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, "penalties": penalties, "gradients": gradients, "weights": weights}


@contextmanager
def exact_muon() -> Iterator[None]:
    """Muon orthogonalizes in float64: in bfloat16, a difference in the last bit of a gradient may tip a rounding."""
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        yield


@exact_muon()
def on_one_process(config: ModelConfig, way: Way) -> dict[str, Any]:
    return run_steps(build(config, torch.float64), config, way, ONE_PROCESS)


@exact_muon()
def on_mesh(config: ModelConfig, way: Way, mesh: tuple[int, int]) -> list[dict[str, Any]]:
    """The numbers of each rank."""

    count = mesh[0] * mesh[1]
    return on_ranks(count, lambda rank: run_steps(sharded(config, mesh), config, way, Ranks(rank, count)))


def sharded(config: ModelConfig, mesh: tuple[int, int]) -> Decoder:
    """A model in float64 on a mesh of the ranks that call this at once."""
    model = build(config, torch.float64, device="meta")
    shape, names = ((mesh[1],), ("shard",)) if mesh[0] == 1 else (mesh, ("replicate", "shard"))
    shard_model(model, init_device_mesh("cpu", shape, mesh_dim_names=names), Sharding())
    initialize_shards(model, 0)
    return model


def largest_difference(expected: dict[str, Any], actual: dict[str, Any]) -> float:
    """Of all numbers; a missing one is infinitely far."""
    differences = [0.0]
    for name in ("losses", "norms", "penalties"):
        differences += [abs(a - b) for a, b in zip(expected[name], actual[name], strict=True)]
    for name in ("gradients", "weights"):
        if expected[name].keys() != actual[name].keys():
            return float("inf")
        differences += [
            float((value - actual[name][key]).abs().max()) for key, value in expected[name].items() if value.numel()
        ]
    return max(differences)


def memory_of_four_ranks(width: int) -> tuple[int, int]:
    """Bytes of the storages of one rank of FSDP-4 at the peak of a step of a small design, and the planned bytes."""
    mixer = {"kind": "attention", "heads": 4, "kv_heads": 2, "position": {"kind": "rope"}}
    layer = {"repeat": 4, "mixer": mixer, "feedforward": {"kind": "gated", "hidden": 2 * width}}
    config = load_config({"vocab_size": 512, "width": width, "layers": [layer]})

    def step(rank: int) -> int:
        model = build(config, device="meta")
        shard_model(model, init_device_mesh("cpu", (4,)), Sharding(torch.bfloat16, torch.float32))
        initialize_shards(model, 0)
        model.train()
        optimizer = build_optimizer(model, 0.1)
        trace = StepTrace()
        trace.record_layers(model, list(model.layers), list(range(config.depth)))
        with trace:
            trace.label(model.parameters(), "parameters")
            for index in range(2):  # the second one has moments
                prepared = prepare_batch(batch_of(config, index, Way(), None), "cpu", 1, Ranks(rank, 4))
                result = accumulate_gradients(model, prepared, (0, index))
                apply_gradients(model, optimizer, result, 1e-3, 1.0)
        return max(sum(peak.values()) for peak in trace.peaks.values())

    planned = sum(rank_memory(model_cost(config, LENGTH), RankLayout(1, 4, rows=ROWS // 4)).values())
    return min(on_ranks(4, step)), planned  # the thread that comes last also copies for the others
