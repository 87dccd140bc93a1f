"""What the mixtures of experts of a step did: loads, entropy, dropped choices, and the penalty that training adds."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from heddle.data.samples import Batch
from heddle.model.decoder import Decoder
from heddle.parts.modules.router_statistics import Entry

Told = dict[str, dict[str, Any]]  # of each mixture, by its path: load, entropy, dropped


class Tally(NamedTuple):
    """Of one mixture over a step: loads int64 [experts], dropped and tokens int64 [], entropy float64 [] in nats."""

    loads: Tensor
    dropped: Tensor
    entropy: Tensor
    tokens: Tensor

    def told(self) -> dict[str, Any]:
        """For the log: each expert's share of the choices, mean entropy of a token, the share of choices dropped."""
        choices = max(1, int(self.loads.sum()))
        entropy = float(self.entropy) / max(1, int(self.tokens))
        return {
            "load": [round(load / choices, 4) for load in self.loads.tolist()],
            "entropy": round(entropy, 6) if math.isfinite(entropy) else None,
            "dropped": round(int(self.dropped) / choices, 6),
        }


class Tallies:
    """Gathers what the pieces of a batch entered into their ledgers."""

    def __init__(self, model: Decoder, batch: Batch) -> None:
        self.model = model
        self.mixtures: dict[str, Tally] = {}  # by the module's path
        self.penalty = torch.zeros((), dtype=torch.float64)  # mean a real token
        self._real = sum(map(sum, batch.lengths))
        self._real_in_source = 0 if batch.source is None else int((batch.source >= 0).sum())

    @cached_property
    def _names(self) -> dict[nn.Module, str]:
        return {module: name for name, module in self.model.named_modules()}

    def take(self, entries: Iterable[Entry]) -> Tensor | None:
        """Add up a piece's entries; returns what its loss must grow by, or None.

        Penalties are sums over tokens, so divided by the whole batch's real tokens they do not depend on the pieces.
        """
        added: Tensor | None = None
        for entry in entries:
            name = self._names[entry.mixture]
            mine = Tally(entry.loads, entry.dropped, entry.entropy, entry.tokens)
            mine = Tally(*(value.detach() for value in mine))
            before = self.mixtures.get(name)
            self.mixtures[name] = mine if before is None else Tally(*(a + b for a, b in zip(before, mine, strict=True)))
            if entry.penalty is not None:
                share = entry.penalty / (self._real_in_source if name.startswith("encoder.") else self._real)
                added = share if added is None else added + share
        if added is not None:
            self.penalty += added.detach().double().cpu()
        return added


def recent(log: Sequence[dict[str, Any]]) -> Told | None:
    """What mixtures did over the last tenth of a log's steps, averaged; None for a design without."""
    last = [line["experts"] for line in log[-max(1, len(log) // 10) :] if line["taken"] and "experts" in line]
    return average(last) if last else None


def average(told: Sequence[Told]) -> Told:
    """Loads, entropies and dropped shares of several steps or runs of one design, each averaged."""
    return {
        path: {
            "load": [_mean(loads) for loads in zip(*(one[path]["load"] for one in told), strict=True)],
            "entropy": _mean([one[path]["entropy"] for one in told]),
            "dropped": _mean([one[path]["dropped"] for one in told]),
        }
        for path in told[0]
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
