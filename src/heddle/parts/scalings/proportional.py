"""Proportional RoPE (Gemma 4, 2026): the fastest pairs rotate as if all did, `θ_i = base^(−2i/dim)`; the others do not.

    θ'_i = θ_i / factor   (i < n),   n = ⌊rotated_share · dim / 2⌋
    θ'_i = 0              (i ≥ n)

A partial rotary embedding (`rotary_dim`) spreads all frequencies over the dims that it rotates, and pairs only these.
Here slow pairs stand still, and in the layout `half` dim i is paired with i + dim/2.
"""

from typing import Annotated

import torch
from pydantic import Field

from heddle.config import DesignError
from heddle.numerics.rotary import pos_freqs
from heddle.parts.scalings import LongContextFactor, ScaledFrequencies, ScalingConfig


class ProportionalConfig(ScalingConfig):
    """Fields of `proportional`."""

    rotated_share: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)]  # of all pairs, the fastest
    factor: LongContextFactor = 1.0  # how much slower these rotate

    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """The fastest pairs slowed by the factor, zero for the others. Raises DesignError if no pair would rotate."""
        rotated = int(self.rotated_share * dim // 2)
        if not rotated:
            raise DesignError("rotated_share", "leaves no pair to rotate; give a larger share, or wider heads")
        frequencies = 1.0 / pos_freqs(dim, base, dtype)[:rotated] / self.factor
        return ScaledFrequencies((*frequencies.tolist(), *[0.0] * (dim // 2 - rotated)))
