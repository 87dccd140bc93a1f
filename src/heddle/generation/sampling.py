"""Choosing the next token: greedy, or sampled after temperature, top-k and top-p (Holtzman et al. 2020)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError, MachineError
from heddle.numerics.random import Key, keyed, uniform


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k keeps the k likeliest tokens, top_p the fewest whose probability reaches p.

    A row's draws depend on the seed, its number in the batch and the step only, so other rows change nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature {self.temperature}: must be 0 (greedy) or a number above it")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed {self.seed}: must be at least 0 and below 2^62")

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """logits [B, vocab] -> tokens int64 [B]. Ties go to the lowest index.

        Raises MachineError where a row's highest logit is not a finite number; −inf rules a token out.
        """
        if self.temperature == 0.0:
            return _highest(logits)
        probabilities, order = self._kept(logits)
        with keyed(Key(self.seed, step, torch.arange(logits.shape[0]))):
            drawn = uniform((logits.shape[0], 1), site=0, device=logits.device).double()
        return order.gather(-1, _at(probabilities, drawn)).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution that `choose` draws from: logits [..., vocab] -> float64 of the same shape; greedy is sure.

        Raises MachineError as `choose` does.
        """
        if self.temperature == 0.0:
            return functional.one_hot(_highest(logits), logits.shape[-1]).double()
        probabilities, order = self._kept(logits.flatten(0, -2))
        return torch.zeros_like(probabilities).scatter(-1, order, probabilities).view(logits.shape)

    def uniform(self, rows: Tensor, places: Tensor, site: int) -> Tensor:
        """Numbers in [0, 1), float64, each by the seed, its row of the batch, its place in the new text, and a site."""
        samples = (rows * 2**32 + places).flatten()
        with keyed(Key(self.seed, 0, samples)):
            return uniform((len(samples), 1), site, rows.device).double().view(places.shape)

    def draw(self, weights: Tensor, rows: Tensor, places: Tensor, site: int) -> Tensor:
        """Draw by weights float64 [B, vocab] -> tokens int64 [B]."""
        return _at(weights, self.uniform(rows, places, site)[:, None]).squeeze(-1)

    def _kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, likeliest first, zero where filtered out, and the tokens in that order."""
        _check(logits.amax(-1))
        ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
        highest = ordered[:, :1]
        # Dividing the distance to the highest keeps tiny temperatures finite.
        weights = ((ordered - highest) / self.temperature).exp()
        if self.top_k is not None:
            weights[:, self.top_k :] = 0.0
        if self.top_p is not None:
            share = weights / weights.sum(-1, keepdim=True)
            before = share.cumsum(-1) - share
            weights = weights.masked_fill(before >= self.top_p, 0.0)
        return weights / weights.sum(-1, keepdim=True), order


def _check(highest: Tensor) -> None:
    if not bool(highest.isfinite().all()):
        raise MachineError("generation: the model's logits are not numbers; its weights or its state are damaged")


def _highest(logits: Tensor) -> Tensor:
    """The first of the highest of logits [..., vocab]."""
    highest = logits.amax(-1, keepdim=True)
    _check(highest)
    # argmax may return any of several equal entries; the first is found by comparing.
    return (logits == highest).to(torch.uint8).argmax(-1)


def _at(weights: Tensor, drawn: Tensor) -> Tensor:
    """The index [B, 1] at which the running sum of weights [B, N] passes `drawn` [B, 1] of the whole."""
    total = weights.cumsum(-1)
    index = torch.searchsorted(total, drawn * total[:, -1:], right=True)
    # Rounding may lead past the last that has any weight.
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(-1, keepdim=True)
    return torch.minimum(index, last)
