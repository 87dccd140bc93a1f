"""One optimizer step: accumulate the gradients of a batch, clip them, and skip the update if they are not finite.

On an accelerator the host only queues a step; it waits for the device nowhere but in `StepResult.read`. Batches come
through pinned memory (a thread may call `prepare_batch` ahead), losses stay on the device, and the optimizer itself
skips an update that is not finite.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.distributed.ranks import ONE_PROCESS, Ranks, reduce_with_next_backward, whole
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.dispatch.operation import device_type
from heddle.numerics.dispatch.transfer import to_device
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.context.encoder_output import EncoderOutput
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward
from heddle.parts.modules.router_statistics import record_router_statistics
from heddle.training.distillation import Teacher
from heddle.training.optimizer import Optimizer
from heddle.training.router_metrics import RouterMetricsCollector
from heddle.training.step_result import BatchResult, StepResult


class BatchPart(NamedTuple):
    """Some rows of a batch on a device.

    tokens: int64 [B, T + 1]. samples: int64 [B], their indices. targets: int64 [N], those that are not −1. scored:
    which of the B · T positions they belong to, int64 [N]; None: all, in order. encoder: the encoder's input, and its
    layout if it has padding.
    """

    tokens: Tensor
    samples: Tensor
    layout: Layout
    targets: Tensor
    scored: Tensor | None
    encoder: tuple[Tensor, Layout | None] | None


class PreparedBatch(NamedTuple):
    """A batch on a device, in parts of equal rows."""

    batch: Batch
    parts: tuple[BatchPart, ...]
    ranks: Ranks = ONE_PROCESS


def prepare_batch(
    batch: Batch, device: torch.device | str, accumulation_steps: int = 1, ranks: Ranks = ONE_PROCESS
) -> PreparedBatch:
    """Copy this rank's rows of a batch to a device, in `accumulation_steps` parts.

    The host does not wait; a thread may do it ahead. Raises ConfigError if the rows are not the same number in each
    part and rank.
    """
    rows = ranks.rows(batch.tokens.shape[0], accumulation_steps)
    return PreparedBatch(batch, tuple(_prepare(batch, part, device) for part in rows), ranks)


def _prepare(batch: Batch, rows: slice, device: torch.device | str) -> BatchPart:
    targets = batch.targets[rows]
    layout = Layout.packed(batch.doc_lengths[rows], targets.shape[1], device)
    if batch.coordinates is not None:
        layout = layout.with_coordinates(to_device(torch.from_numpy(batch.coordinates[rows]), device))
    scored = None
    if batch.labels is not None:  # found on the host: on the device, a mask must be counted before it can select
        scored = torch.from_numpy(np.flatnonzero(targets >= 0))
    scored_targets = torch.from_numpy(targets).flatten()
    return BatchPart(
        to_device(torch.from_numpy(batch.tokens[rows]), device),
        to_device(torch.from_numpy(batch.sample_indices[rows]), device),
        layout,
        to_device(scored_targets if scored is None else scored_targets[scored], device),
        None if scored is None else to_device(scored, device),
        None if batch.encoder_tokens is None else _encoder_input(batch.encoder_tokens[rows], device),
    )


def accumulate_gradients(
    model: Decoder,
    batch: Batch | PreparedBatch,
    key: tuple[int, int],
    accumulation_steps: int = 1,
    autocast: torch.dtype | None = None,
    teacher: Teacher | None = None,
) -> BatchResult:
    """Accumulate the gradients of a batch's mean loss and auxiliary loss in `accumulation_steps` parts of equal rows.

    Targets of −1 do not enter the loss. key: (seed, step), from which dropout draws for each sample, so that the number
    of parts does not change the result. teacher: the loss is that of a distillation. A prepared batch has its parts.
    """
    device = model.embed.weight.device
    if isinstance(batch, Batch):
        batch = prepare_batch(batch, device, accumulation_steps)
    batch_loss, divergence, layer_error = torch.zeros(3, dtype=torch.float64, device=device)
    collector = RouterMetricsCollector(model, batch.batch)
    targets_in_batch, tokens_in_batch = int((batch.batch.targets >= 0).sum()), sum(map(sum, batch.batch.doc_lengths))
    for index, part in enumerate(batch.parts, start=1):
        reduce_with_next_backward(model, index == len(batch.parts))
        tokens, targets, scored = part.tokens, part.targets, slice(None) if part.scored is None else part.scored
        layout = replace(part.layout, cache={})  # what a call stores in it ends with the call
        automatic_cast = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
        with use_random_key(RandomKey(*key, part.samples)):
            with automatic_cast:
                taught = None if teacher is None else teacher.read(model, tokens[:, :-1], layout, tokens_in_batch)
            grad_enabled = teacher is None or teacher.uses_head
            with record_router_statistics() as recorded, automatic_cast, torch.set_grad_enabled(grad_enabled):
                if part.encoder is not None:
                    layout = layout.with_encoder_output(model.encode(*part.encoder))
                hidden, _ = model(tokens[:, :-1], layout)
                hidden = hidden.flatten(0, 1)[scored]
                if taught is None:
                    objective = loss = loss_sum(hidden, model.head.output_head, targets) / targets_in_batch
                else:
                    sums = taught.sums(hidden, model.head.output_head, targets, scored)
                    objective, loss, kl = (total / targets_in_batch for total in sums)
                    divergence += kl.double()
                    layer_error += taught.layer_error
            # Recording has ended: layers that the backward pass recomputes are not counted twice.
            aux_loss = collector.add(recorded.entries)
            # The backward pass stays under the random key: recomputed layers must draw the same dropout.
            if grad_enabled:
                torch.autograd.backward(objective if aux_loss is None else objective + aux_loss)
        batch_loss += loss.detach().double()
    distillation = {} if teacher is None else {"divergence": divergence}
    if teacher is not None and teacher.layers:
        distillation["layer_error"] = layer_error
    if batch.ranks.count > 1:
        distillation = {name: batch.ranks.sum(value) for name, value in distillation.items()}
        collector.sum_over(batch.ranks)
    return BatchResult(batch.ranks.sum(batch_loss), collector.aux_loss, collector.metrics, distillation, batch.ranks)


def run_encoder(model: Decoder, encoder_tokens: np.ndarray) -> EncoderOutput:
    """Run the model's encoder over tokens int64 [B, S], in which −1 is padding."""
    return model.encode(*_encoder_input(encoder_tokens, model.embed.weight.device))


def _encoder_input(encoder_tokens: np.ndarray, device: torch.device | str) -> tuple[Tensor, Layout | None]:
    is_token, layout = encoder_tokens >= 0, None
    if not is_token.all():
        layout = Layout.of(torch.from_numpy(np.where(is_token, is_token.cumsum(1) - 1, -1)), device=device)
    return to_device(torch.from_numpy(np.where(is_token, encoder_tokens, 0)), device), layout


def apply_gradients(
    model: Decoder, optimizer: Optimizer, batch: BatchResult, learning_rate: float, max_gradient_norm: float
) -> StepResult:
    """Clip the gradients and update the weights.

    The update is skipped, and weights and optimizer state stay, if a loss, the gradient norm, a weight or a moment is
    not finite. After an update, each mixture whose experts or router are trained updates its expert bias, once. The
    norm is that of all trainable parameters together. On an accelerator nothing is read: what follows reads a flag.
    """
    updated = optimizer.take_gradients()
    norm = whole(nn.utils.get_total_norm([weight.grad for weight in updated if weight.grad is not None]))
    bad_ranks = batch.ranks.sum((~optimizer.is_finite()).float())
    result = StepResult(batch, norm, bad_ranks == 0)
    on_host = device_type(norm) == "cpu" or not optimizer.skips_on_device
    if not on_host or bool(result.is_finite):
        nn.utils.clip_grads_with_norm_(updated, max_gradient_norm, norm)
        optimizer.step(learning_rate, None if on_host else (~result.is_finite).float())
        trainable_ids = {id(parameter) for parameter in optimizer.trainable.values()}
        for path, metrics in batch.router_metrics.items():
            feedforward = model.get_submodule(path)
            assert isinstance(feedforward, Feedforward)
            experts = feedforward.expert_info
            assert experts is not None
            parameters = (*experts.router.parameters(), *experts.weights)
            if any(id(parameter) in trainable_ids for parameter in parameters):
                counts = metrics.expert_counts  # equal counts change no bias
                feedforward.update_expert_bias(counts if on_host else counts * result.is_finite)
    optimizer.discard_gradients()
    model.zero_grad(set_to_none=True)
    return result
