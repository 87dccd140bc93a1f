"""NTK-aware scaling (bloc97 2023; Peng et al. 2023, §3.1): a larger base, which slows slow pairs down most.

    base' = base · s^(dim/(dim − 2)),   so θ'_i = θ_i · s^(−2i/(dim − 2))

The first pair is unchanged, the last one rotates s times slower. s is `factor`. If `original_length` is given, s grows
with the sequence length (dynamic NTK, emozilla 2023):
s = 1 + factor · (max(length, original_length) / original_length − 1), which is 1 up to the original length.
"""

import torch

from heddle.config import DesignError, PositiveInt
from heddle.numerics.rotary import pos_freqs
from heddle.parts.scalings import LongContextFactor, ScaledFrequencies, ScalingConfig


class NtkConfig(ScalingConfig):
    """Fields of `ntk`."""

    factor: LongContextFactor  # how many times slower the slowest pair rotates
    original_length: PositiveInt | None = None  # the context length of training; makes s dynamic

    @property
    def length_dependent(self) -> bool:
        """Whether this is dynamic NTK."""
        return self.original_length is not None

    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """Each frequency scaled by its own power of s. Raises DesignError for a single pair."""
        if dim == 2:
            raise DesignError("", "ntk leaves a single pair unchanged; rotate more dims, or use the scaling linear")
        scale = self.factor
        if self.original_length is not None:
            scale = 1.0 + self.factor * max(0.0, length / self.original_length - 1.0)
        exponents = torch.arange(0, dim, 2, dtype=dtype, device="cpu") / (dim - 2)
        return ScaledFrequencies(tuple((scale**-exponents / pos_freqs(dim, base, dtype)).tolist()))
