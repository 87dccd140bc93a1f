"""Choose the next token: greedy, or sampled after temperature, top-k and top-p (Holtzman et al. 2020)."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from heddle.errors import ConfigError, MachineError
from heddle.numerics.random import RandomStream, uniform_double

LOGITS_NOT_FINITE = "generation: the model's logits are not finite; its weights or its state are damaged"
NOT_FINITE = -1  # stands for the token of a row whose logits are not finite


@dataclass(frozen=True)
class Sampler:
    """temperature 0 is greedy. top_k keeps the k most likely tokens, top_p the fewest whose probability reaches p.

    A row's random numbers depend only on the seed, its index in the batch and the step, not on other rows. first_row:
    the index of the first row, where the batch has only some of a caller's rows.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    first_row: int = 0
    _streams: dict[int, RandomStream] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature {self.temperature}: must be 0 (greedy) or a number above it")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k {self.top_k}: must be at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < 2**62:
            raise ConfigError(f"seed {self.seed}: must be at least 0 and below 2^62")

    @property
    def can_share(self) -> bool:
        """Whether one sampler can choose for rows of several requests: greedy ones draw no random numbers."""
        return self.temperature == 0.0

    def sample(self, logits: Tensor, step: int) -> Tensor:
        """logits [B, vocab] -> tokens int64 [B]. Greedy ties go to the lowest token.

        Raises MachineError if a row's highest logit is not a finite number; −inf excludes a token.
        """
        tokens = self.choose(logits, torch.full((), step, device=logits.device))
        check_chosen(tokens.tolist())
        return tokens

    def choose(self, logits: Tensor, position: Tensor) -> Tensor:
        """As `sample` for the token at `position` (int64 []) of the new text, but without waiting for the device.

        The token of a row whose highest logit is not a finite number is NOT_FINITE: see `check_chosen`.
        """
        highest = logits.amax(-1)
        if self.temperature == 0.0:
            tokens = _argmax(logits, highest)
        else:
            probabilities, order = self._filtered_probabilities(logits)
            rows = torch.arange(self.first_row, self.first_row + logits.shape[0], device=logits.device)
            uniforms = self.uniform(rows, position, site=0)[:, None]
            tokens = order.gather(-1, _inverse_cdf(probabilities, uniforms)).squeeze(-1)
        return torch.where(highest.isfinite(), tokens, NOT_FINITE)

    def probabilities(self, logits: Tensor) -> Tensor:
        """The distribution `sample` draws from: logits [..., vocab] -> float64 of that shape; one-hot if greedy.

        The distribution of a row whose highest logit is not finite is meaningless: see `all_finite`.
        """
        if self.temperature == 0.0:
            return functional.one_hot(_argmax(logits, logits.amax(-1)), logits.shape[-1]).double()
        probabilities, order = self._filtered_probabilities(logits.flatten(0, -2))
        return torch.zeros_like(probabilities).scatter(-1, order, probabilities).view(logits.shape)

    def uniform(self, rows: Tensor, positions: Tensor, site: int) -> Tensor:
        """Uniform float64 in [0, 1), 53 bits: a function of seed, row in the batch, position in the new text, site."""
        if site not in self._streams:  # a graph that is traced finds the stream of its first call
            self._streams[site] = RandomStream.of(self.seed, 0, site)
        return uniform_double(self._streams[site], rows * 2**32 + positions)

    def draw(self, weights: Tensor, rows: Tensor, positions: Tensor, site: int) -> Tensor:
        """Draw tokens int64 [B] in proportion to weights float64 [B, vocab]; random numbers as in `uniform`."""
        return _inverse_cdf(weights, self.uniform(rows, positions, site)[:, None]).squeeze(-1)

    def _filtered_probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities after top-k and top-p, highest first, zero where filtered out; and the tokens in that order."""
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


def check_chosen(tokens: list[int]) -> None:
    """Raise MachineError if a token from `Sampler.choose` is NOT_FINITE."""
    if NOT_FINITE in tokens:
        raise MachineError(LOGITS_NOT_FINITE)


def all_finite(logits: Tensor) -> Tensor:
    """Whether the highest logit of each row is a finite number, bool []."""
    return logits.amax(-1).isfinite().all()


def _argmax(logits: Tensor, highest: Tensor) -> Tensor:
    """The lowest index of the highest of logits [..., vocab]."""
    # torch.argmax may return any of several equal entries; on this 0/1 mask it returns the first.
    return (logits == highest[..., None]).to(torch.uint8).argmax(-1)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index [B, 1] where the running sum of weights [B, N] exceeds `uniforms` [B, 1] times their total."""
    cumulative = weights.cumsum(-1)
    index = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # Rounding may lead past the last index with a nonzero weight.
    indices = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, indices, 0).amax(-1, keepdim=True)
    return torch.minimum(index, last)
