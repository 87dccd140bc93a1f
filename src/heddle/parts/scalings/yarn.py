"""YaRN (Peng et al. 2023): slow pairs turn `factor` times slower, fast ones as before, those between by a ramp.

    θ'_i = θ_i (1 − γ_i) + θ_i / factor · γ_i,   γ_i = clamp((i − fast) / (slow − fast), 0, 1)

where pair `fast` turns beta_fast times over the original length, and pair `slow` beta_slow times. With
m(s) = 0.1 s ln(factor) + 1 cosines and sines grow by m(1), or by m(mscale) / m(mscale_all_dim) where these are given;
then latent attention multiplies its scores by m(mscale_all_dim)² (DeepSeek).
"""

import math
from typing import Self

import torch
from pydantic import model_validator

from heddle.config import Count, Positive, refuse
from heddle.numerics.rotary import periods
from heddle.parts.scalings import Longer, ScalingConfig, Stretched


class YarnConfig(ScalingConfig):
    """Fields of `yarn`."""

    factor: Longer  # how many times longer texts may be
    original_length: Count  # tokens that the frequencies were trained for
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True  # `fast` and `slow` are rounded outwards to whole pairs
    attention_factor: Positive | None = None  # of cosines and sines, in place of m(1)
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.beta_fast < self.beta_slow:
            refuse("beta_fast", f"{self.beta_fast} is below beta_slow = {self.beta_slow}; exchange them")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            missing = "mscale" if self.mscale is None else "mscale_all_dim"
            refuse(missing, "is missing beside its pair; give both mscale and mscale_all_dim, or neither")
        if self.mscale is not None and self.attention_factor is not None:
            refuse("attention_factor", "is given beside mscale, which says the same; keep one of the two")
        return self

    def stretch(self, dim: int, base: float, length: int, dtype: torch.dtype) -> Stretched:
        """The ramp between pairs, and the factors of cosines and scores."""
        fast, slow = (self._pair(turns, dim, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, dim - 1)
        span = slow - fast or 0.001  # a step where both are one pair
        period = periods(dim, base, dtype)
        kept = 1.0 - ((torch.arange(dim // 2, dtype=dtype, device="cpu") - fast) / span).clamp(0.0, 1.0)
        thetas = (1.0 / (self.factor * period) * (1.0 - kept) + 1.0 / period * kept).tolist()
        if self.mscale is None or self.mscale_all_dim is None:
            return Stretched(tuple(thetas), self.attention_factor or self._growth(1.0))
        whole = self._growth(self.mscale_all_dim)
        return Stretched(tuple(thetas), self._growth(self.mscale) / whole, whole * whole)

    def _pair(self, turns: float, dim: int, base: float) -> float:
        """The (fractional) pair that turns so many times over the original length, kept near the pairs there are."""
        logarithm = math.log(self.original_length) - math.log(turns) - math.log(2 * math.pi)
        return min(max(dim * logarithm / (2 * math.log(base)), -dim), dim)

    def _growth(self, strength: float) -> float:
        return 0.1 * strength * math.log(self.factor) + 1.0
