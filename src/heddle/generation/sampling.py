"""Choosing the next token: greedy, or sampled after temperature, top-k and top-p (Holtzman et al. 2020)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from heddle.errors import ConfigError, MachineError
from heddle.numerics.noise import Key, keyed, uniform


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
        highest = logits.amax(-1, keepdim=True)
        if not bool(highest.isfinite().all()):
            raise MachineError("generation: the model's logits are not numbers; its weights or its state are damaged")
        if self.temperature == 0.0:
            # argmax may return any of several equal entries; the first is found by comparing.
            return (logits == highest).to(torch.uint8).argmax(-1)
        probabilities, order = self._kept(logits)
        with keyed(Key(self.seed, step, torch.arange(logits.shape[0]))):
            drawn = uniform((logits.shape[0], 1), site=0, device=logits.device).double()
        total = probabilities.cumsum(-1)
        index = torch.searchsorted(total, drawn * total[:, -1:], right=True)
        # Rounding may lead past the last token that has any probability.
        last = (probabilities > 0).sum(-1, keepdim=True) - 1
        return order.gather(-1, torch.minimum(index, last)).squeeze(-1)

    def _kept(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, likeliest first, zero where filtered out, and the tokens in that order."""
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
