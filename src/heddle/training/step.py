"""One optimizer step: accumulate the gradients of a batch, clip them, and skip the update if they are not finite."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.random import RandomKey, use_random_key
from heddle.parts.context.encoder_output import EncoderOutput
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward
from heddle.parts.modules.router_statistics import record_router_statistics
from heddle.training.distillation import Teacher
from heddle.training.optimizer import Optimizer
from heddle.training.router_metrics import RouterMetrics, RouterMetricsCollector


@dataclass(frozen=True)
class BatchResult:
    """The losses of a batch, whose gradients are in the parameters.

    loss: mean over targets, in nats, float64 []. aux_loss: the load balancing loss of experts, mean over tokens,
    float64 []; not part of `loss`. router_metrics: by the path of each mixture of experts. distillation: with a
    teacher, the KL from it ('divergence', mean over targets, in nats) and, if layers are compared, 'layer_error'; each
    without its weight.
    """

    loss: Tensor
    aux_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    router_metrics: Mapping[str, RouterMetrics] = field(default_factory=dict)
    distillation: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """loss: mean nats per target. gradient_norm: before clipping. skipped: the update was not applied."""

    loss: float
    gradient_norm: float
    skipped: bool


def accumulate_gradients(
    model: Decoder,
    batch: Batch,
    key: tuple[int, int],
    accumulation_steps: int = 1,
    autocast: torch.dtype | None = None,
    teacher: Teacher | None = None,
) -> BatchResult:
    """Accumulate the gradients of a batch's mean loss and auxiliary loss in `accumulation_steps` parts of equal rows.

    Targets of −1 do not enter the loss. key: (seed, step), from which dropout draws for each sample, so that the number
    of parts does not change the result. teacher: the loss is that of a distillation.
    """
    device = model.embed.weight.device
    batch_loss, divergence, layer_error = torch.zeros(3, dtype=torch.float64)
    collector = RouterMetricsCollector(model, batch)
    targets_in_batch, tokens_in_batch = int((batch.targets >= 0).sum()), sum(map(sum, batch.doc_lengths))
    rows = batch.tokens.shape[0] // accumulation_steps
    for start in range(0, batch.tokens.shape[0], rows):
        tokens = torch.from_numpy(batch.tokens[start : start + rows]).to(device)
        samples = torch.from_numpy(batch.sample_indices[start : start + rows]).to(device)
        targets = torch.from_numpy(batch.targets[start : start + rows]).to(device)
        layout = Layout.packed(batch.doc_lengths[start : start + rows], targets.shape[1], device)
        if batch.coordinates is not None:
            layout = layout.with_coordinates(torch.from_numpy(batch.coordinates[start : start + rows]).to(device))
        automatic_cast = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
        with use_random_key(RandomKey(*key, samples)):
            with automatic_cast:
                taught = None if teacher is None else teacher.read(model, tokens[:, :-1], layout, tokens_in_batch)
            grad_enabled = teacher is None or teacher.uses_head
            with record_router_statistics() as recorded, automatic_cast, torch.set_grad_enabled(grad_enabled):
                if batch.encoder_tokens is not None:
                    layout = layout.with_encoder_output(run_encoder(model, batch.encoder_tokens[start : start + rows]))
                hidden, _ = model(tokens[:, :-1], layout)
                scored = slice(None) if batch.labels is None else (targets >= 0).flatten()
                hidden, targets = hidden.flatten(0, 1)[scored], targets.flatten()[scored]
                if taught is None:
                    objective = loss = loss_sum(hidden, model.head.output_head, targets) / targets_in_batch
                else:
                    sums = taught.sums(hidden, model.head.output_head, targets, scored)
                    objective, loss, kl = (total / targets_in_batch for total in sums)
                    divergence += kl.double().cpu()
                    layer_error += taught.layer_error
            # Recording has ended: layers that the backward pass recomputes are not counted twice.
            aux_loss = collector.add(recorded.entries)
            # The backward pass stays under the random key: recomputed layers must draw the same dropout.
            if grad_enabled:
                torch.autograd.backward(objective if aux_loss is None else objective + aux_loss)
        batch_loss += loss.detach().double().cpu()
    distillation = {} if teacher is None else {"divergence": divergence}
    if teacher is not None and teacher.layers:
        distillation["layer_error"] = layer_error
    return BatchResult(batch_loss, collector.aux_loss, collector.metrics, distillation)


def run_encoder(model: Decoder, encoder_tokens: np.ndarray) -> EncoderOutput:
    """Run the model's encoder over tokens int64 [B, S], in which −1 is padding."""
    device, is_token = model.embed.weight.device, encoder_tokens >= 0
    layout = None
    if not is_token.all():
        layout = Layout.of(torch.from_numpy(np.where(is_token, is_token.cumsum(1) - 1, -1)), device=device)
    return model.encode(torch.from_numpy(np.where(is_token, encoder_tokens, 0)).to(device), layout)


def apply_gradients(
    model: Decoder, optimizer: Optimizer, batch: BatchResult, learning_rate: float, max_gradient_norm: float
) -> StepResult:
    """Clip the gradients and update the weights.

    The update is skipped, and weights and optimizer state stay, if a loss or the gradient norm is not finite. After an
    update, each mixture whose experts or router are trained updates its expert bias, once. The norm is that of all
    trainable parameters together.
    """
    trainable = list(optimizer.trainable.values())
    norm = nn.utils.get_total_norm([parameter.grad for parameter in trainable if parameter.grad is not None])
    finite = all(
        math.isfinite(float(value)) for value in (batch.loss, batch.aux_loss, norm, *batch.distillation.values())
    )
    if finite:
        nn.utils.clip_grads_with_norm_(trainable, max_gradient_norm, norm)
        optimizer.step(learning_rate)
        trainable_ids = {id(parameter) for parameter in trainable}
        for path, metrics in batch.router_metrics.items():
            feedforward = model.get_submodule(path)
            assert isinstance(feedforward, Feedforward)
            experts = feedforward.expert_info
            assert experts is not None
            parameters = (*experts.router.parameters(), *experts.weights)
            if any(id(parameter) in trainable_ids for parameter in parameters):
                feedforward.update_expert_bias(metrics.expert_counts)
    model.zero_grad(set_to_none=True)
    return StepResult(float(batch.loss), float(norm), skipped=not finite)
