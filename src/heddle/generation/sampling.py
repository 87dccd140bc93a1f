"""Choose the next token: greedy, or sampled after temperature, top-k and top-p (Holtzman et al. 2020)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError, MachineError
from heddle.numerics.random import uniform_double


@dataclass(frozen=True)
class Sampler:
    """temperature 0 is greedy. top_k keeps the k most likely tokens, top_p the fewest whose probability reaches p.

    A row's random numbers depend only on the seed, its index in the batch and the step, so other rows change nothing.
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

    def sample(self, logits: Tensor, step: int) -> Tensor:
        """logits [B, vocab] -> tokens int64 [B]. Of equally likely tokens, greedy takes the lowest.

        Raises MachineError if a row's highest logit is not a finite number; −inf excludes a token.
        """
        if self.temperature == 0.0:
            return _argmax(logits)
        probabilities, order = self._filtered_probabilities(logits)
        rows = torch.arange(logits.shape[0], device=logits.device)
        uniforms = self.uniform(rows, torch.full_like(rows, step), site=0)[:, None]
        return order.gather(-1, _inverse_cdf(probabilities, uniforms)).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution `sample` draws from: logits [..., vocab] -> float64 of that shape; one-hot if greedy.

        Raises MachineError as `sample` does.
        """
        if self.temperature == 0.0:
            return functional.one_hot(_argmax(logits), logits.shape[-1]).double()
        probabilities, order = self._filtered_probabilities(logits.flatten(0, -2))
        return torch.zeros_like(probabilities).scatter(-1, order, probabilities).view(logits.shape)

    def uniform(self, rows: Tensor, positions: Tensor, site: int) -> Tensor:
        """float64 in [0, 1) of 53 bits: a function of seed, row in the batch, position in the new text, and `site`."""
        return uniform_double(self.seed, site, rows * 2**32 + positions)

    def draw(self, weights: Tensor, rows: Tensor, positions: Tensor, site: int) -> Tensor:
        """Draw tokens int64 [B] in proportion to weights float64 [B, vocab]; random numbers as in `uniform`."""
        return _inverse_cdf(weights, self.uniform(rows, positions, site)[:, None]).squeeze(-1)

    def _filtered_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities after top-k and top-p, highest first, zero where filtered out; and the tokens in that order."""
        _check_finite(logits.amax(-1))
        sorted_logits, order = logits.double().sort(dim=-1, descending=True, stable=True)
        highest = sorted_logits[:, :1]
        # Dividing the difference from the highest logit stays finite at tiny temperatures.
        weights = ((sorted_logits - highest) / self.temperature).exp()
        if self.top_k is not None:
            weights[:, self.top_k :] = 0.0
        if self.top_p is not None:
            probabilities = weights / weights.sum(-1, keepdim=True)
            preceding = probabilities.cumsum(-1) - probabilities
            weights = weights.masked_fill(preceding >= self.top_p, 0.0)
        return weights / weights.sum(-1, keepdim=True), order


def _check_finite(highest: Tensor) -> None:
    if not bool(highest.isfinite().all()):
        raise MachineError("generation: the model's logits are not numbers; its weights or its state are damaged")


def _argmax(logits: Tensor) -> Tensor:
    """The lowest index of the highest of logits [..., vocab]."""
    highest = logits.amax(-1, keepdim=True)
    _check_finite(highest)
    # torch.argmax may return any of several equal entries; on this 0/1 mask it returns the first.
    return (logits == highest).to(torch.uint8).argmax(-1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index [B, 1] where the running sum of weights [B, N] exceeds `uniforms` [B, 1] times their total."""
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # Rounding may lead past the last index with a nonzero weight.
    indices = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, indices, 0).amax(-1, keepdim=True)
    return torch.minimum(index, last)
