"""LongRoPE (Ding et al. 2024; Phi-3): each pair has its own factor, θ'_i = θ_i / factor_i.

`short_factor` is used for up to `original_length` tokens, `long_factor` for longer sequences. In both cases cosines
and sines are multiplied by `attention_factor`, or by sqrt(1 + ln(factor) / ln(original_length)).
"""

import math
from typing import Self

import torch
from pydantic import model_validator

from heddle.config import DesignError, PositiveFloat, PositiveInt, refuse
from heddle.numerics.rotary import pos_freqs
from heddle.parts.scalings import LongContextFactor, ScaledFrequencies, ScalingConfig


class LongropeConfig(ScalingConfig):
    """Fields of `longrope`."""

    short_factor: tuple[PositiveFloat, ...]  # one per pair
    long_factor: tuple[PositiveFloat, ...]
    original_length: PositiveInt  # the longest sequence that uses the short factors
    factor: LongContextFactor | None = None  # how many times longer sequences may be; sets the default attention_factor
    attention_factor: PositiveFloat | None = None  # of cosines and sines, instead of the one derived from factor

    @property
    def length_dependent(self) -> bool:
        """True: the length chooses between the two lists."""
        return True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factor is None and self.attention_factor is None:
            refuse(
                "factor",
                "is missing, and so is attention_factor, so the scale of cosines is unknown; give one",
            )
        if self.factor is not None and self.attention_factor is not None:
            refuse("attention_factor", "is given together with factor, which determines it; keep one of the two")
        if self.factor is not None and self.factor > 1.0 and self.original_length == 1:
            refuse("factor", f"{self.factor} is divided by ln(original_length) = 0; give attention_factor instead")
        return self

    def scale_frequencies(self, dim: int, base: float, length: int, dtype: torch.dtype) -> ScaledFrequencies:
        """Each frequency divided by its factor. Raises DesignError unless there are as many factors as pairs."""
        for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor)):
            if len(factors) != dim // 2:
                raise DesignError(name, f"{len(factors)} given; {dim} rotary dims need {dim // 2}")
        factors = self.long_factor if length > self.original_length else self.short_factor
        slower = torch.tensor(factors, dtype=dtype, device="cpu") * pos_freqs(dim, base, dtype)
        return ScaledFrequencies(tuple((1.0 / slower).tolist()), self._attention_factor())

    def _attention_factor(self) -> float:
        if self.factor is None or self.factor == 1.0:
            return self.attention_factor or 1.0
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length))
