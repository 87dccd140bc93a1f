"""Position interpolation (Chen et al. 2023): every pair rotates `factor` times slower, θ'_i = θ_i / factor.

The positions of a sequence that is `factor` times longer then fall within the trained range.
"""

import torch

from heddle.numerics.rotary import pos_freqs
from heddle.parts.scalings import LongContextFactor, ScaledFrequencies, ScalingConfig


class LinearConfig(ScalingConfig):
    """Fields of `linear`."""

    factor: LongContextFactor  # how many times slower pairs rotate

    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """Every frequency divided by the factor."""
        return ScaledFrequencies(tuple((1.0 / pos_freqs(dim, base, dtype) / self.factor).tolist()))
