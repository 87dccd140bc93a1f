"""Llama 3.1's scaling (Meta 2024): pairs that turn rarely over the original length turn `factor` times slower.

    θ'_i = θ_i · (g_i + (1 − g_i) / factor),   g_i = clamp((n_i − low) / (high − low), 0, 1)

n_i = original_length · θ_i / 2π is how many times pair i turns over the original length.
"""

import math
from typing import Self

import torch
from pydantic import model_validator

from heddle.config import Count, Positive, refuse
from heddle.numerics.rotary import periods
from heddle.parts.scalings import Longer, ScalingConfig, Stretched


class Llama3Config(ScalingConfig):
    """Fields of `llama3`."""

    factor: Longer  # how many times slower slow pairs turn
    original_length: Count  # tokens that the frequencies were trained for
    low_freq_factor: Positive = 1.0  # pairs that turn so often or less are slowed
    high_freq_factor: Positive = 4.0  # pairs that turn so often or more are kept

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            refuse(
                "high_freq_factor",
                f"{self.high_freq_factor} is not above low_freq_factor = {self.low_freq_factor}; raise it",
            )
        return self

    def stretch(self, dim: int, base: float, length: int, dtype: torch.dtype) -> Stretched:
        """The ramp between pairs that are kept and pairs that are slowed."""
        theta = 1.0 / periods(dim, base, dtype)
        turns = self.original_length / (2 * math.pi / theta)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = ramp.clamp(0.0, 1.0)
        return Stretched(tuple(((1.0 - kept) * theta / self.factor + kept * theta).tolist()))
