"""Llama 3.1's scaling (Meta 2024): pairs with few turns over the original length rotate `factor` times slower.

    θ'_i = θ_i · (g_i + (1 − g_i) / factor),   g_i = clamp((n_i − low) / (high − low), 0, 1)

n_i = original_length · θ_i / 2π is how many times pair i turns over the original length.
"""

import math
from typing import Self

import torch
from pydantic import model_validator

from heddle.config import PositiveFloat, PositiveInt, refuse
from heddle.numerics.rotary import pos_freqs
from heddle.parts.scalings import LongContextFactor, ScaledFrequencies, ScalingConfig


class Llama3Config(ScalingConfig):
    """Fields of `llama3`."""

    factor: LongContextFactor  # how many times slower slow pairs rotate
    original_length: PositiveInt  # the context length of training
    low_freq_factor: PositiveFloat = 1.0  # pairs with at most this many turns are slowed down
    high_freq_factor: PositiveFloat = 4.0  # pairs with at least this many turns are unchanged

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            refuse(
                "high_freq_factor",
                f"{self.high_freq_factor} is not above low_freq_factor = {self.low_freq_factor}; raise it",
            )
        return self

    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """A linear ramp from pairs that are slowed down to pairs that are unchanged."""
        theta = 1.0 / pos_freqs(dim, base, dtype)
        turns = self.original_length / (2 * math.pi / theta)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        unchanged = ramp.clamp(0.0, 1.0)
        return ScaledFrequencies(tuple(((1.0 - unchanged) * theta / self.factor + unchanged * theta).tolist()))
