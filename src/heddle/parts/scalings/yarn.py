"""YaRN (Peng et al. 2023): slow pairs rotate `factor` times slower, fast pairs as before, with a ramp between them.

    θ'_i = θ_i (1 − γ_i) + θ_i / factor · γ_i,   γ_i = clamp((i − fast) / (slow − fast), 0, 1)

where pair `fast` makes beta_fast turns over the original length, and pair `slow` beta_slow turns. With
m(s) = 0.1 s ln(factor) + 1, cosines and sines are multiplied by m(1), or by m(mscale) / m(mscale_all_dim) if these are
given. In the second case latent attention multiplies its scores by m(mscale_all_dim)² (DeepSeek).
"""

import math
from typing import Self

import torch
from pydantic import model_validator

from heddle.config import PositiveFloat, PositiveInt, refuse
from heddle.numerics.rotary import pos_freqs
from heddle.parts.scalings import LongContextFactor, ScaledFrequencies, ScalingConfig


class YarnConfig(ScalingConfig):
    """Fields of `yarn`."""

    factor: LongContextFactor  # how many times longer sequences may be
    original_length: PositiveInt  # the context length of training
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True  # round `fast` and `slow` outwards to whole pairs
    attention_factor: PositiveFloat | None = None  # of cosines and sines, instead of m(1)
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast < self.beta_slow:
            refuse("beta_fast", f"{self.beta_fast} is below beta_slow = {self.beta_slow}; swap them")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            missing = "mscale" if self.mscale is None else "mscale_all_dim"
            refuse(missing, "is missing; give both mscale and mscale_all_dim, or neither")
        if self.mscale is not None and self.attention_factor is not None:
            refuse("attention_factor", "is given together with mscale, which determines it; keep one of the two")
        return self

    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """The ramp between the pairs, and the factors of cosines and scores."""
        fast, slow = (self._pair(turns, dim, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, dim - 1)
        span = slow - fast or 0.001  # if both are the same pair, the ramp is a step
        period = pos_freqs(dim, base, dtype)
        unchanged = 1.0 - ((torch.arange(dim // 2, dtype=dtype, device="cpu") - fast) / span).clamp(0.0, 1.0)
        inv_freq = (1.0 / (self.factor * period) * (1.0 - unchanged) + 1.0 / period * unchanged).tolist()
        if self.mscale is None or self.mscale_all_dim is None:
            return ScaledFrequencies(tuple(inv_freq), self.attention_factor or self._mscale(1.0))
        all_dim = self._mscale(self.mscale_all_dim)
        return ScaledFrequencies(tuple(inv_freq), self._mscale(self.mscale) / all_dim, all_dim * all_dim)

    def _pair(self, turns: float, dim: int, base: float) -> float:
        """The (fractional) index of the pair with this many turns over the original length, within ±dim."""
        logarithm = math.log(self.original_length) - math.log(turns) - math.log(2 * math.pi)
        return min(max(dim * logarithm / (2 * math.log(base)), -dim), dim)

    def _mscale(self, strength: float) -> float:
        return 0.1 * strength * math.log(self.factor) + 1.0
