"""One optimizer step: accumulate the gradients of a batch, clip them, and skip the update if they are not finite.

On an accelerator the host only queues a step; it waits for the device only in `StepResult.read`. Batches are copied
through pinned memory (a thread may call `prepare_batch` ahead), losses stay on the device, and the optimizer itself
skips non-finite updates.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.distributed.ranks import ONE_PROCESS, Ranks, local_part, reduce_with_next_backward
from heddle.model.decoder import Decoder
from heddle.numerics.cross_entropy import loss_sum
from heddle.numerics.dispatch import device_type
from heddle.numerics.random import RandomKey, use_random_key
from heddle.numerics.transfer import HostCopy, to_device
from heddle.parts.feedforwards import Feedforward
from heddle.parts.layout import EncoderOutput, Layout
from heddle.parts.modules.router_statistics import IndexLoss, LargestLogits, RouterStatistics, record_router_statistics
from heddle.torch_private import TorchDispatchMode, in_backward_pass, is_mutable, tree_leaves
from heddle.training.distillation import Teacher
from heddle.training.optimizer import Optimizer, total_norm

# Metrics of mixtures of experts in a training step: expert load, router entropy, dropped choices, auxiliary loss.


RouterSummary = dict[str, dict[str, Any]]  # by the mixture's path: load, entropy, dropped


class RouterMetrics(NamedTuple):
    """Sums over one mixture and one step.

    expert_counts: int64 [experts], how often each expert was chosen. dropped: int64 [], choices dropped for lack of
    capacity. entropy: float64 [], of the router's probabilities, in nats. tokens: int64 []. All passes of a shared
    layer count as one mixture.
    """

    expert_counts: Tensor
    dropped: Tensor
    entropy: Tensor
    tokens: Tensor

    def summary(self) -> dict[str, Any]:
        """Return each expert's fraction of the choices, the mean entropy per token and the fraction dropped."""
        choices = max(1, int(self.expert_counts.sum()))
        entropy = float(self.entropy) / max(1, int(self.tokens))
        return {
            "load": [round(load / choices, 4) for load in self.expert_counts.tolist()],
            "entropy": round(entropy, 6) if math.isfinite(entropy) else None,
            "dropped": round(int(self.dropped) / choices, 6),
        }


class RouterMetricsCollector:
    """Sums the router statistics and auxiliary losses over the parts of a batch."""

    def __init__(self, model: Decoder, batch: Batch) -> None:
        self.model = model
        self.metrics: dict[str, RouterMetrics] = {}  # by the mixture's path
        self.logits: dict[str, Tensor] = {}  # the largest of each head, by the attention's path
        self.aux_loss = torch.zeros((), dtype=torch.float64, device=model.embed.weight.device)  # mean over tokens
        self._tokens = sum(map(sum, batch.doc_lengths))
        self._source_tokens = 0 if batch.encoder_tokens is None else int((batch.encoder_tokens >= 0).sum())

    @cached_property
    def _names(self) -> dict[nn.Module, str]:
        return {module: self.model.visits(name)[0] for name, module in self.model.named_modules()}

    def add(self, entries: Iterable[RouterStatistics], index_losses: Iterable[IndexLoss] = ()) -> Tensor | None:
        """Add the statistics of one part of the batch and return its auxiliary loss, or None.

        index_losses: the indexers' losses; the auxiliary loss includes them.

        Recorded losses are sums over tokens. Divided by the tokens of the whole batch, they do not depend on how the
        batch was split.
        """
        shares = [each.aux_loss / self._tokens_of(self._names[each.indexer]) for each in index_losses]
        for entry in entries:
            name = self._names[entry.mixture]
            metrics = RouterMetrics(entry.expert_counts, entry.dropped, entry.entropy, entry.tokens)
            metrics = RouterMetrics(*(value.detach() for value in metrics))
            previous = self.metrics.get(name)
            if previous is not None:
                metrics = RouterMetrics(*(a + b for a, b in zip(previous, metrics, strict=True)))
            self.metrics[name] = metrics
            if entry.aux_loss is not None:
                shares.append(entry.aux_loss / self._tokens_of(name))
        if not shares:
            return None
        aux_loss = sum(shares[1:], shares[0])
        self.aux_loss += aux_loss.detach().double()
        return aux_loss

    def add_logits(self, entries: Iterable[LargestLogits]) -> None:
        """Add the largest logits of one part of the batch."""
        for entry in entries:
            name = self._names[entry.mixer]
            previous = self.logits.get(name)
            self.logits[name] = entry.logits if previous is None else torch.maximum(previous, entry.logits)

    def _tokens_of(self, name: str) -> int:
        """Tokens of the whole batch that a module reads, by its path."""
        return self._source_tokens if name.startswith("encoder.") else self._tokens

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of the other ranks."""
        self.aux_loss = ranks.sum(self.aux_loss)
        for name in sorted(self.metrics):
            self.metrics[name] = RouterMetrics(*(ranks.sum(value) for value in self.metrics[name]))


def recent_router_summary(log: Sequence[dict[str, Any]]) -> RouterSummary | None:
    """Average the router metrics over the last tenth of a log's steps; None for a design without experts."""
    recent = log[-max(1, len(log) // 10) :]
    summaries = [line["experts"] for line in recent if not line["skipped"] and "experts" in line]
    return average_router_summaries(summaries) if summaries else None


def average_router_summaries(summaries: Sequence[RouterSummary]) -> RouterSummary:
    """Average the load, entropy and dropped fraction over several steps or runs of one design."""
    return {
        path: {
            "load": [_mean(loads) for loads in zip(*(summary[path]["load"] for summary in summaries), strict=True)],
            "entropy": _mean([summary[path]["entropy"] for summary in summaries]),
            "dropped": _mean([summary[path]["dropped"] for summary in summaries]),
        }
        for path in summaries[0]
    }


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


# The results of an optimizer step stay on the device until a loop reads them, all in one copy.


@dataclass(frozen=True)
class BatchResult:
    """The losses of a batch, on the model's device; their gradients are in the parameters.

    loss: mean over targets, in nats, float64 []. aux_loss: of experts and indexers, mean over tokens,
    float64 []; not part of `loss`. router_metrics: by the path of each mixture of experts. distillation: with a
    teacher, the KL from it ('divergence', mean over targets, in nats) and, if layers are compared, 'layer_error'; each
    without its weight. multi_token: of each depth of a design with multi-token modules, mean over its targets, without
    its weight; not part of `loss`. ranks: the ranks that share the step. largest_logits: of each head [H], by the path
    of its attention; empty unless they were asked for.
    """

    loss: Tensor
    aux_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    router_metrics: Mapping[str, RouterMetrics] = field(default_factory=dict)
    distillation: Mapping[str, Tensor] = field(default_factory=dict)
    ranks: Ranks = ONE_PROCESS
    multi_token: Sequence[Tensor] = ()
    largest_logits: Mapping[str, Tensor] = field(default_factory=dict)


class LogitSummary(NamedTuple):
    """largest_logit: of all heads. clipped_heads: how many had a larger one than QK-clip allows."""

    largest_logit: float
    clipped_heads: int


class StepNumbers(NamedTuple):
    """The results of a step on the host, for its log line.

    loss: mean nats per target. gradient_norm: before clipping. skipped: the update was not applied. aux_loss,
    distillation and multi_token: as in `BatchResult`. experts: the summary of each mixture of experts, by its path.
    logits: with QK-clip.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    aux_loss: float
    distillation: dict[str, float]
    experts: RouterSummary
    multi_token: tuple[float, ...] = ()
    logits: LogitSummary | None = None


class StepResult:
    """The results of a step, copied to the host asynchronously from when the step was queued.

    `read` waits for this step, but not for work queued after it: a loop that reads a step once the next is queued keeps
    the device busy. `loss`, `gradient_norm` and `skipped` call `read`. is_state_finite: bool [], whether weights and
    moments were finite before the step. qk_clip: the largest logit that QK-clip does not change.
    """

    def __init__(
        self, batch: BatchResult, gradient_norm: Tensor, is_state_finite: Tensor, qk_clip: float | None = None
    ) -> None:
        losses = (batch.loss, gradient_norm, batch.aux_loss, *batch.multi_token, *batch.distillation.values())
        checked = torch.stack([value.detach().to(gradient_norm.device, torch.float64) for value in losses])
        self.is_finite = checked.isfinite().all() & is_state_finite  # bool [], on the device: the update may be applied
        metrics = [value.double().flatten() for entry in batch.router_metrics.values() for value in entry]
        self._qk_clip, heads = qk_clip, [logits.double() for logits in batch.largest_logits.values()]
        self._copy = HostCopy(torch.cat((checked, self.is_finite.double()[None], *metrics, *heads)))
        self._distillation, self._depth = tuple(batch.distillation), len(batch.multi_token)
        self._experts = {path: len(entry.expert_counts) for path, entry in batch.router_metrics.items()}

    def read(self) -> StepNumbers:
        """Return the results. Only the first call may wait."""
        return self._numbers

    @cached_property
    def _numbers(self) -> StepNumbers:
        copy = self._copy.read()
        loss, norm, aux_loss, *values = copy.tolist()
        multi_token, values = tuple(values[: self._depth]), values[self._depth :]
        count = len(self._distillation)
        is_finite, start, experts = bool(values[count]), self._depth + count + 4, {}
        for path, size in self._experts.items():  # float64 holds counts below 2^53 exactly
            counts, (dropped, entropy, tokens) = copy[start : start + size], copy[start + size : start + size + 3]
            experts[path] = RouterMetrics(counts.long(), dropped.long(), entropy, tokens.long()).summary()
            start += size + 3
        distillation = dict(zip(self._distillation, values[:count], strict=True))
        logits, limit = copy[start:], self._qk_clip
        summary = None
        if limit is not None and logits.numel():
            summary = LogitSummary(float(logits.max()), int((logits > limit).sum()) if is_finite else 0)
        return StepNumbers(loss, norm, not is_finite, aux_loss, distillation, experts, multi_token, summary)

    @property
    def loss(self) -> float:
        """Mean nats per target."""
        return self.read().loss

    @property
    def gradient_norm(self) -> float:
        """Global gradient norm, before clipping."""
        return self.read().gradient_norm

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped because a loss, the norm, a weight or a moment is not finite."""
        return self.read().skipped


class BatchPart(NamedTuple):
    """A micro-batch on a device.

    tokens: int64 [B, T + 1]. samples: int64 [B], sample indices. targets: int64 [N], without −1. scored: int64 [N],
    their positions among the B · T; None: all, in order. encoder: the encoder's input, and its layout if it has
    padding. rows: the micro-batch's rows of the batch.
    """

    tokens: Tensor
    samples: Tensor
    layout: Layout
    targets: Tensor
    scored: Tensor | None
    encoder: tuple[Tensor, Layout | None] | None
    rows: slice = slice(None)


class PreparedBatch(NamedTuple):
    """A batch on a device, in parts with equal numbers of rows."""

    batch: Batch
    parts: tuple[BatchPart, ...]
    ranks: Ranks = ONE_PROCESS


def prepare_batch(
    batch: Batch, device: torch.device | str, accumulation_steps: int = 1, ranks: Ranks = ONE_PROCESS
) -> PreparedBatch:
    """Copy this rank's rows of a batch to a device, in `accumulation_steps` parts.

    The host does not wait; a thread may call it ahead. Raises ConfigError if the rows do not divide evenly into parts
    and ranks.
    """
    rows = ranks.rows(batch.tokens.shape[0], accumulation_steps)
    return PreparedBatch(batch, tuple(_prepare(batch, part, device) for part in rows), ranks)


def _prepare(batch: Batch, rows: slice, device: torch.device | str) -> BatchPart:
    targets = batch.targets[rows]
    layout = Layout.packed(batch.doc_lengths[rows], targets.shape[1], device)
    if batch.coordinates is not None:
        layout = layout.with_coordinates(to_device(torch.from_numpy(batch.coordinates[rows]), device))
    scored = None
    if batch.labels is not None:  # on the host: on the device, selecting with a mask would synchronize
        scored = torch.from_numpy(np.flatnonzero(targets >= 0))
    scored_targets = torch.from_numpy(targets).flatten()
    return BatchPart(
        to_device(torch.from_numpy(batch.tokens[rows]), device),
        to_device(torch.from_numpy(batch.sample_indices[rows]), device),
        layout,
        to_device(scored_targets if scored is None else scored_targets[scored], device),
        None if scored is None else to_device(scored, device),
        None if batch.encoder_tokens is None else _encoder_input(batch.encoder_tokens[rows], device),
        rows,
    )


class MultiTokenLosses:
    """The losses of a design's multi-token modules over the parts of a batch.

    They are divided by the targets of the whole batch at each depth, so that the split into parts does not matter.
    """

    def __init__(self, model: Decoder, batch: Batch, teacher: Teacher | None = None) -> None:
        config = model.config.multi_token if teacher is None or teacher.uses_head else None
        depth, self._weight = (0, 0.0) if config is None else (config.depth, config.loss_weight)
        self._model, self._targets = model, [targets_ahead(batch, each) for each in range(1, depth + 1)]
        self._counts = [int((targets >= 0).sum()) for targets in self._targets]
        self.losses = list(torch.zeros(depth, dtype=torch.float64, device=model.embed.weight.device))

    def add(self, part: BatchPart, hidden: Tensor, layout: Layout) -> Tensor | None:
        """Add the losses of a part with hidden states [B, T, width]; return the weighted loss to train on, or None."""
        if not self._targets:
            return None
        total: Tensor | None = None
        head = self._model.head.output_head._replace(once=True)
        predicted = self._model.predict_ahead(hidden, part.tokens[:, :-1], layout)
        for index, (ahead, _) in enumerate(predicted):
            targets = self._targets[index][part.rows].reshape(-1)
            scored = np.flatnonzero(targets >= 0)
            selected, there = (to_device(torch.from_numpy(each), ahead.device) for each in (targets[scored], scored))
            loss = loss_sum(ahead.flatten(0, 1)[there], head, selected)
            loss = loss / max(1, self._counts[index])
            self.losses[index] += loss.detach().double()
            total = loss if total is None else total + loss
        return None if total is None else total * (self._weight / len(self._targets))

    def sums_over(self, ranks: Ranks) -> list[Tensor]:
        """Return the losses of each depth, summed over ranks."""
        return [ranks.sum(loss) for loss in self.losses]


def targets_ahead(batch: Batch, depth: int) -> np.ndarray:
    """Return each input's target at a depth, the target of the input `depth` later: int64 [B, T − depth].

    −1 if that input has no target, or is in another document.
    """
    targets, length = batch.targets, batch.targets.shape[1]
    documents = np.full(targets.shape, -1)
    for row, lengths in zip(documents, batch.doc_lengths, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    first, later = documents[:, : max(0, length - depth)], documents[:, depth:]
    return np.where((first == later) & (first >= 0), targets[:, depth:], -1)


def accumulate_gradients(
    model: Decoder,
    batch: Batch | PreparedBatch,
    key: tuple[int, int],
    accumulation_steps: int = 1,
    autocast: torch.dtype | None = None,
    teacher: Teacher | None = None,
    record_logits: bool = False,
) -> BatchResult:
    """Accumulate the gradients of a batch's mean loss and auxiliary loss in `accumulation_steps` parts of equal rows.

    Multi-token modules add `loss_weight` · mean of their losses, unless a distillation compares only layers.
    Targets of −1 do not enter the loss. key: (seed, step), which keys dropout together with the sample, so that the
    number of parts does not change the result. teacher: use the distillation loss. A prepared batch is already split.
    record_logits: also compute the largest logits of attentions.
    """
    device = model.embed.weight.device
    if isinstance(batch, Batch):
        batch = prepare_batch(batch, device, accumulation_steps)
    batch_loss, divergence, layer_error = torch.zeros(3, dtype=torch.float64, device=device)
    collector, ahead = RouterMetricsCollector(model, batch.batch), MultiTokenLosses(model, batch.batch, teacher)
    targets_in_batch, tokens_in_batch = int((batch.batch.targets >= 0).sum()), sum(map(sum, batch.batch.doc_lengths))
    for index, part in enumerate(batch.parts, start=1):
        reduce_with_next_backward(model, index == len(batch.parts))
        tokens, targets, scored = part.tokens, part.targets, slice(None) if part.scored is None else part.scored
        layout = replace(part.layout, cache={})  # caches last for one micro-batch
        automatic_cast = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
        with use_random_key(RandomKey(*key, part.samples)):
            with automatic_cast:
                taught = None if teacher is None else teacher.read(model, tokens[:, :-1], layout, tokens_in_batch)
            grad_enabled = teacher is None or teacher.uses_head
            with (
                record_router_statistics(record_logits) as recorded,
                automatic_cast,
                torch.set_grad_enabled(grad_enabled),
            ):
                if part.encoder is not None:
                    layout = layout.with_encoder_output(model.encode(*part.encoder))
                shares = model.head.tied and batch.ranks.count == 1 and not len(model.multi_token)
                if shares:
                    model.embed.share(layout)
                hidden, _ = model(tokens[:, :-1], layout)
                head = model.head.output_head._replace(once=True)
                if shares:
                    head = head._replace(weight=model.embed.shared(layout))
                ahead_loss = ahead.add(part, hidden, layout)
                hidden = hidden.flatten(0, 1)[scored]
                if taught is None:
                    objective = loss = loss_sum(hidden, head, targets) / targets_in_batch
                else:
                    sums = taught.sums(hidden, head, targets, scored)
                    objective, loss, kl = (total / targets_in_batch for total in sums)
                    divergence += kl.double()
                    layer_error += taught.layer_error
            # Recording has ended: layers that the backward pass recomputes are not counted twice.
            aux_loss = collector.add(recorded.entries, recorded.index_losses)
            collector.add_logits(recorded.logits or ())
            # The backward pass stays under the random key: recomputed layers must draw the same dropout.
            if grad_enabled:
                torch.autograd.backward(sum((loss for loss in (aux_loss, ahead_loss) if loss is not None), objective))
        batch_loss += loss.detach().double()
    distillation = {} if teacher is None else {"divergence": divergence}
    if teacher is not None and teacher.layers:
        distillation["layer_error"] = layer_error
    if batch.ranks.count > 1:
        distillation = {name: batch.ranks.sum(value) for name, value in distillation.items()}
        collector.sum_over(batch.ranks)
    loss = batch.ranks.sum(batch_loss)
    multi_token = ahead.sums_over(batch.ranks)
    return BatchResult(
        loss, collector.aux_loss, collector.metrics, distillation, batch.ranks, multi_token, collector.logits
    )


def run_encoder(model: Decoder, encoder_tokens: np.ndarray) -> EncoderOutput:
    """Run the model's encoder over tokens int64 [B, S], in which −1 is padding."""
    return model.encode(*_encoder_input(encoder_tokens, model.embed.weight.device))


def _encoder_input(encoder_tokens: np.ndarray, device: torch.device | str) -> tuple[Tensor, Layout | None]:
    is_token, layout = encoder_tokens >= 0, None
    if not is_token.all():
        layout = Layout.of(torch.from_numpy(np.where(is_token, is_token.cumsum(1) - 1, -1)), device=device)
    return to_device(torch.from_numpy(np.where(is_token, encoder_tokens, 0)), device), layout


def apply_gradients(
    model: Decoder,
    optimizer: Optimizer,
    batch: BatchResult,
    learning_rate: float,
    max_gradient_norm: float,
    qk_clip: float | None = None,
) -> StepResult:
    """Clip the gradients and update the weights.

    The update is skipped, and weights and optimizer state stay unchanged, if a loss, the gradient norm, a weight or a
    moment is not finite. After an update, each mixture with trained experts or router updates its expert bias once. The
    norm is global, over all trainable parameters. qk_clip: scales q and k of heads with larger logits after an update.
    On an accelerator the host reads nothing; later kernels read a flag.
    """
    updated = optimizer.take_gradients()
    norm = total_norm([weight.grad for weight in updated if weight.grad is not None])
    bad_ranks = batch.ranks.sum((~optimizer.is_finite()).float())
    result = StepResult(batch, norm, bad_ranks == 0, qk_clip)
    on_host = device_type(norm) == "cpu" or not optimizer.skips_on_device
    if not on_host or bool(result.is_finite):
        optimizer.step(learning_rate, None if on_host else (~result.is_finite).float(), norm, max_gradient_norm)
        if qk_clip is not None:
            optimizer.clip_logits(model, batch.largest_logits, qk_clip, None if on_host else result.is_finite)
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


# To find the first non-finite number, a step runs again with checks, and nothing is updated.


# These write or read the -inf of masked pairs: their infinities are intended.
_MASKS = ("fill", "full", "where", "scalar_tensor", "constant_pad", "copy", "log", "logaddexp", "logcumsumexp")


def first_non_finite(
    model: Decoder, optimizer: Optimizer, compute_gradients: Callable[[], BatchResult] | None
) -> str | None:
    """Say where a skipped step has its first non-finite number; None if all are finite this time.

    compute_gradients: the step's forward and backward pass over the plain model; None: check only weights and optimizer
    state of this rank. Gradients are discarded afterwards.
    """
    stored = _stored(dict(model.named_parameters()), "weight") or _stored(
        {f"{name}, {key}": value for name, values in optimizer.state.items() for key, value in values.items()},
        "the optimizer's state of",
    )
    if stored is not None or compute_gradients is None:
        return stored
    watch = _Watch()
    try:
        with _module_paths(model, watch), watch:
            batch = compute_gradients()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        losses = {"loss": batch.loss, "auxiliary loss": batch.aux_loss, **batch.distillation}
        losses |= {f"multi-token loss of depth {depth}": loss for depth, loss in enumerate(batch.multi_token, start=1)}
        return watch.origin or _stored(losses, "the") or _stored(gradients, "gradient of")
    finally:
        optimizer.discard_gradients()
        model.zero_grad(set_to_none=True)


def _stored(tensors: Mapping[str, Tensor], label: str) -> str | None:
    """Name the first tensor with a non-finite number."""
    for name, tensor in tensors.items():
        values = local_part(tensor.detach())
        bad = values.numel() - int(values.isfinite().sum())
        if bad:
            return f"{label} {name} holds {_amount(bad, values)}"
    return None


def _amount(bad: int, values: Tensor) -> str:
    count = "a number that is" if bad == 1 else f"{bad:,} numbers that are"
    return f"{count} not finite" + (f" (of {values.numel():,})" if values.numel() > 1 else "")


class _Watch(TorchDispatchMode):
    """Checks the result of every operation.

    path: the running modules, outermost first. backward_path: the last module whose output the backward pass reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.path: list[str] = []
        self.backward_path: str | None = None
        self.origin: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if self.origin is not None or "empty" in name:
            return func(*args, **(kwargs or {}))
        inputs = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        operands = [tensor for tensor in tree_leaves((args, inputs)) if _is_float(tensor)]
        read = _numbers(operands) if is_mutable(func) else None  # before it is overwritten
        result = func(*args, **(kwargs or {}))
        results = [tensor for tensor in tree_leaves(result) if _is_float(tensor)]
        written = _numbers(results)
        if not written.are_finite and _is_new(written, read or _numbers(operands), any(m in name for m in _MASKS)):
            self.origin = self._describe(name, next(tensor for tensor in results if not tensor.isfinite().all()))
        return result

    def _describe(self, name: str, tensor: Tensor) -> str:
        bad = tensor.numel() - int(tensor.isfinite().sum())
        return f"{self._location()}, operation {name}: its result {list(tensor.shape)} holds {_amount(bad, tensor)}"

    def _location(self) -> str:
        if self.path:
            return f"in {self.path[-1]}"
        if not in_backward_pass():
            return "in the loss"
        below = "" if self.backward_path is None else f" below the result of {self.backward_path}"
        return f"in the backward pass{below}"


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.is_meta


class _Numbers(NamedTuple):
    are_finite: bool
    have_nan: bool


def _numbers(tensors: list[Tensor]) -> _Numbers:
    are_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
    return _Numbers(are_finite, not are_finite and any(bool(tensor.isnan().any()) for tensor in tensors))


def _is_new(result: _Numbers, read: _Numbers, may_be_infinite: bool) -> bool:
    """Whether an operation made non-finite numbers from finite ones, other than for a mask.

    NaN from infinities counts as new, such as a softmax over a fully masked row.
    """
    return not read.have_nan if result.have_nan else read.are_finite and not may_be_infinite


@contextmanager
def _module_paths(model: nn.Module, watch: _Watch) -> Iterator[None]:
    """Tell the watch which module runs: in the forward pass, and when layers are recomputed."""

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: watch.path.append(name)

    def leave(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _inputs: Any, result: Any) -> None:
            watch.path.pop()
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(lambda _: setattr(watch, "backward_path", name))

        return note

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name:
                hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
                hooks.callback(module.register_forward_hook(leave(name), always_call=True).remove)
        yield
