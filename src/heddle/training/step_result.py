"""The numbers of an optimizer step: they stay on the device until a loop reads them, all in one copy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from heddle.distributed.ranks import ONE_PROCESS, Ranks
from heddle.numerics.dispatch.transfer import HostCopy
from heddle.training.router_metrics import RouterMetrics, RouterSummary


@dataclass(frozen=True)
class BatchResult:
    """The losses of a batch, whose gradients are in the parameters. They are on the model's device.

    loss: mean over targets, in nats, float64 []. aux_loss: the load balancing loss of experts, mean over tokens,
    float64 []; not part of `loss`. router_metrics: by the path of each mixture of experts. distillation: with a
    teacher, the KL from it ('divergence', mean over targets, in nats) and, if layers are compared, 'layer_error'; each
    without its weight. ranks: those that share the step.
    """

    loss: Tensor
    aux_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    router_metrics: Mapping[str, RouterMetrics] = field(default_factory=dict)
    distillation: Mapping[str, Tensor] = field(default_factory=dict)
    ranks: Ranks = ONE_PROCESS


class StepNumbers(NamedTuple):
    """The numbers of a step on the host, for its log.

    loss: mean nats per target. gradient_norm: before clipping. skipped: the update was not applied. aux_loss and
    distillation: as in `BatchResult`. experts: the summary of each mixture of experts, by its path.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    aux_loss: float
    distillation: dict[str, float]
    experts: RouterSummary


class StepResult:
    """The numbers of a step, on their way to the host since the step was queued.

    `read` waits until the device has finished this step, and not for what was queued after it. A loop that reads a step
    when it has queued the next one lets the device work without a pause. `loss`, `gradient_norm` and `skipped` also
    read. is_state_finite: whether weights and moments were finite before the step, bool [].
    """

    def __init__(self, batch: BatchResult, gradient_norm: Tensor, is_state_finite: Tensor) -> None:
        losses = (batch.loss, gradient_norm, batch.aux_loss, *batch.distillation.values())
        checked = torch.stack([value.detach().to(gradient_norm.device, torch.float64) for value in losses])
        self.is_finite = checked.isfinite().all() & is_state_finite  # bool [], on the device: the update may be applied
        metrics = [value.double().flatten() for entry in batch.router_metrics.values() for value in entry]
        self._copy = HostCopy(torch.cat((checked, self.is_finite.double()[None], *metrics)))
        self._distillation = tuple(batch.distillation)
        self._experts = {path: len(entry.expert_counts) for path, entry in batch.router_metrics.items()}

    def read(self) -> StepNumbers:
        """The numbers. Only the first call may wait."""
        return self._numbers

    @cached_property
    def _numbers(self) -> StepNumbers:
        copy = self._copy.read()
        loss, norm, aux_loss, *values = copy.tolist()
        count = len(self._distillation)
        is_finite, start, experts = bool(values[count]), count + 4, {}
        for path, size in self._experts.items():  # float64 holds counts below 2^53 exactly
            counts, (dropped, entropy, tokens) = copy[start : start + size], copy[start + size : start + size + 3]
            experts[path] = RouterMetrics(counts.long(), dropped.long(), entropy, tokens.long()).summary()
            start += size + 3
        distillation = dict(zip(self._distillation, values[:count], strict=True))
        return StepNumbers(loss, norm, not is_finite, aux_loss, distillation, experts)

    @property
    def loss(self) -> float:
        """Mean nats per target."""
        return self.read().loss

    @property
    def gradient_norm(self) -> float:
        """The norm of all gradients together, before clipping."""
        return self.read().gradient_norm

    @property
    def skipped(self) -> bool:
        """Whether the update was not applied, because a loss, the norm, a weight or a moment is not finite."""
        return self.read().skipped
