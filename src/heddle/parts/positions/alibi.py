"""ALiBi (Press et al. 2021): `slope_h · (i − j)` is subtracted from the score of query i and key j.

Slopes are fixed to `2^(−8h/heads)` for query heads h = 1 … heads. A bidirectional mixer uses the distance `|i − j|`.
"""

import torch

from heddle.numerics.attention.mask import LinearBias, ScoreBiasFunction
from heddle.numerics.transfer import Constants
from heddle.parts.layout import Layout
from heddle.parts.positions import ScoreBias, ScoreBiasConfig


class AlibiConfig(ScoreBiasConfig):
    """No fields."""

    def build(self, heads: int, causal: bool) -> "Alibi":
        """Build the module."""
        return Alibi(tuple(2.0 ** (-8.0 * head / heads) for head in range(1, heads + 1)))


class Alibi(ScoreBias):
    """The module. Slopes are floats, not a tensor, so that no change of dtype rounds them."""

    fast_graph = True

    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__()
        self.slopes = slopes
        self._constants = Constants()

    def forward(self, layout: Layout, dtype: torch.dtype) -> ScoreBiasFunction:
        """−slope_h · |i − j|."""
        wide = torch.promote_types(dtype, torch.float32)
        return LinearBias(self._constants.tensor(self.slopes, wide, layout.positions.device))
