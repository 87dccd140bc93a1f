"""One optimizer step: gradients of a whole batch in any number of pieces, clipping, and refusal of bad numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.random import Key, keyed
from heddle.parts.context.layout import Layout, Memory
from heddle.parts.feedforwards import Feedforward
from heddle.parts.modules.router_statistics import ledger
from heddle.training.optimizer import Optimizer
from heddle.training.router_metrics import Tallies, Tally


@dataclass(frozen=True)
class BatchResult:
    """loss: mean nats a target, float64 []. penalty: what balances experts, a mean real token; told apart.

    mixtures: what each mixture of experts did, by its path.
    """

    loss: Tensor
    penalty: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    mixtures: Mapping[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """loss: mean nats a target. norm: of the gradient before clipping. taken: whether weights moved."""

    loss: float
    norm: float
    taken: bool


def gradients(
    model: Decoder, batch: Batch, key: tuple[int, int], pieces: int = 1, autocast: torch.dtype | None = None
) -> BatchResult:
    """Accumulate the gradient of a batch's mean loss and penalty, run in `pieces` of equal rows.

    Where a batch scores only some targets, only those enter the loss. key is (seed, step), under which dropout draws
    by sample: the pieces do not change the result.
    """
    device = model.embed.weight.device
    total = torch.zeros((), dtype=torch.float64)
    tallies = Tallies(model, batch)
    targets_in_batch = int((batch.targets >= 0).sum())
    rows = batch.tokens.shape[0] // pieces
    for start in range(0, batch.tokens.shape[0], rows):
        tokens = torch.from_numpy(batch.tokens[start : start + rows]).to(device)
        samples = torch.from_numpy(batch.samples[start : start + rows]).to(device)
        targets = torch.from_numpy(batch.targets[start : start + rows]).to(device)
        layout = Layout.packed(batch.lengths[start : start + rows], targets.shape[1], device)
        if batch.places is not None:
            layout = layout.with_places(torch.from_numpy(batch.places[start : start + rows]).to(device))
        with keyed(Key(*key, samples)):
            with ledger() as kept, torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                if batch.source is not None:
                    layout = layout.with_memory(encoded(model, batch.source[start : start + rows]))
                hidden, _ = model(tokens[:, :-1], layout)
                if batch.answers is None:
                    hidden, targets = hidden.flatten(0, 1), targets.flatten()
                else:
                    hidden, targets = hidden[targets >= 0], targets[targets >= 0]
                loss = loss_sum(hidden, model.head.end, targets) / targets_in_batch
            # The ledger is closed: what layers that run again enter is not counted twice.
            penalty = tallies.take(kept.entries)
            # Recomputed activations must draw under the same key.
            torch.autograd.backward(loss if penalty is None else loss + penalty)
        total += loss.detach().double().cpu()
    return BatchResult(total, tallies.penalty, tallies.mixtures)


def encoded(model: Decoder, source: np.ndarray) -> Memory:
    """What the model's encoder makes of source int64 [B, S], in which −1 is padding."""
    device, real = model.embed.weight.device, source >= 0
    positions = None if real.all() else torch.from_numpy(np.where(real, real.cumsum(1) - 1, -1)).to(device)
    return model.encode(
        torch.from_numpy(np.where(real, source, 0)).to(device), None if positions is None else Layout(positions)
    )


def apply(model: Decoder, optimizer: Optimizer, batch: BatchResult, rate: float, clip: float) -> StepResult:
    """Clip and step, unless the loss or the gradient's norm is not finite: then weights and moments stay.

    After a step that was taken each mixture whose experts or router learn is told its loads, once. The gradient is
    that of all parameters that learn.
    """
    learned = list(optimizer.learned.values())
    norm = nn.utils.get_total_norm([parameter.grad for parameter in learned if parameter.grad is not None])
    finite = all(math.isfinite(float(value)) for value in (batch.loss, batch.penalty, norm))
    if finite:
        nn.utils.clip_grads_with_norm_(learned, clip, norm)
        optimizer.step(rate)
        taught = {id(parameter) for parameter in learned}
        for path, tally in batch.mixtures.items():
            part = model.get_submodule(path)
            assert isinstance(part, Feedforward)
            assert part.mixture is not None
            if any(id(one) in taught for one in (*part.mixture.router.parameters(), *part.mixture.weights)):
                part.balance(tally.loads)
    model.zero_grad(set_to_none=True)
    return StepResult(float(batch.loss), float(norm), finite)
