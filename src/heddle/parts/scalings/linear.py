"""Position interpolation (Chen et al. 2023): every pair turns `factor` times slower, θ'_i = θ_i / factor.

Positions of a text `factor` times longer then fall between those that the frequencies were trained for.
"""

import torch

from heddle.numerics.rotary import periods
from heddle.parts.scalings import Longer, ScalingConfig, Stretched


class LinearConfig(ScalingConfig):
    """Fields of `linear`."""

    factor: Longer  # how many times slower pairs turn

    def stretch(self, dim: int, base: float, length: int, dtype: torch.dtype) -> Stretched:
        """Every frequency divided by the factor."""
        return Stretched(tuple((1.0 / periods(dim, base, dtype) / self.factor).tolist()))
