"""LongRoPE (Ding et al. 2024; Phi-3): a factor of its own for each pair, θ'_i = θ_i / factor_i.

`short_factor` serves texts of up to `original_length` tokens, `long_factor` longer ones, and for both cosines and sines
grow by `attention_factor`, or by sqrt(1 + ln(factor) / ln(original_length)).
"""

import math
from typing import Self

import torch
from pydantic import model_validator

from heddle.config import Count, DesignError, Positive, refuse
from heddle.numerics.rotary import periods
from heddle.parts.scalings import Longer, ScalingConfig, Stretched


class LongropeConfig(ScalingConfig):
    """Fields of `longrope`."""

    short_factor: tuple[Positive, ...]  # one a pair
    long_factor: tuple[Positive, ...]
    original_length: Count  # tokens up to which the short factors serve
    factor: Longer | None = None  # how many times longer texts may be; attention grows with it
    attention_factor: Positive | None = None  # of cosines and sines, in place of what factor says

    @property
    def by_length(self) -> bool:
        """The length chooses between the two lists."""
        return True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factor is None and self.attention_factor is None:
            refuse("factor", "is missing, and attention_factor too, so nobody says how much cosines grow; give one")
        if self.factor is not None and self.attention_factor is not None:
            refuse("attention_factor", "is given beside factor, which says the same; keep one of the two")
        if self.factor is not None and self.factor > 1.0 and self.original_length == 1:
            refuse("factor", f"{self.factor} grows by ln(original_length) = 0; give attention_factor instead")
        return self

    def stretch(self, dim: int, base: float, length: int, dtype: torch.dtype) -> Stretched:
        """Every frequency divided by its factor. Raises DesignError where there are not as many factors as pairs."""
        for name, given in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(given) != dim // 2:
                raise DesignError(name, f"{len(given)} given; {dim} turned dims need {dim // 2}")
        factors = self.long_factor if length > self.original_length else self.short_factor
        slower = torch.tensor(factors, dtype=dtype, device="cpu") * periods(dim, base, dtype)
        return Stretched(tuple((1.0 / slower).tolist()), self._amplitude())

    def _amplitude(self) -> float:
        if self.factor is None or self.factor == 1.0:
            return self.attention_factor or 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
