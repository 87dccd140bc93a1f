"""Metrics of mixtures of experts in a training step: expert load, router entropy, dropped choices, auxiliary loss."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.distributed.ranks import Ranks
from heddle.model.decoder import Decoder
from heddle.parts.modules.router_statistics import RouterStatistics

RouterSummary = dict[str, dict[str, Any]]  # by the mixture's path: load, entropy, dropped


class RouterMetrics(NamedTuple):
    """Sums over one mixture and one step.

    expert_counts: int64 [experts], how often each expert was chosen. dropped: int64 [], choices dropped for lack of
    capacity. entropy: float64 [], of the router's probabilities, in nats. tokens: int64 [].
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
    """Adds up the router statistics of the parts of a batch."""

    def __init__(self, model: Decoder, batch: Batch) -> None:
        self.model = model
        self.metrics: dict[str, RouterMetrics] = {}  # by the mixture's path
        self.aux_loss = torch.zeros((), dtype=torch.float64, device=model.embed.weight.device)  # mean over tokens
        self._tokens = sum(map(sum, batch.doc_lengths))
        self._source_tokens = 0 if batch.encoder_tokens is None else int((batch.encoder_tokens >= 0).sum())

    @cached_property
    def _names(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    def add(self, entries: Iterable[RouterStatistics]) -> Tensor | None:
        """Add the statistics of one part of the batch and return its auxiliary loss, or None.

        The losses recorded are sums over tokens. Divided by the tokens of the whole batch, they do not depend on how
        the batch was split.
        """
        aux_loss: Tensor | None = None
        for entry in entries:
            name = self._names[entry.mixture]
            metrics = RouterMetrics(entry.expert_counts, entry.dropped, entry.entropy, entry.tokens)
            metrics = RouterMetrics(*(value.detach() for value in metrics))
            previous = self.metrics.get(name)
            if previous is not None:
                metrics = RouterMetrics(*(a + b for a, b in zip(previous, metrics, strict=True)))
            self.metrics[name] = metrics
            if entry.aux_loss is not None:
                share = entry.aux_loss / (self._source_tokens if name.startswith("encoder.") else self._tokens)
                aux_loss = share if aux_loss is None else aux_loss + share
        if aux_loss is not None:
            self.aux_loss += aux_loss.detach().double()
        return aux_loss

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
