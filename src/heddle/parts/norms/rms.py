"""RMSNorm (Zhang & Sennrich 2019): `y = (offset + γ) ⊙ x / sqrt(mean(x²) + ε)`."""

from typing import Literal, Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import FiniteFloat, PositiveFloat, refuse
from heddle.numerics.norms import rms_norm
from heddle.numerics.random import ParameterDraws
from heddle.parts.modules.linear import SelfInitialized
from heddle.parts.norms import NormConfig, weight_shape


class RMSConfig(NormConfig):
    """`offset: 1` gives the `1 + γ` of Gemma and Qwen3-Next.

    `cast`: whether the result returns to x's dtype before the product with γ (Llama) or after it.
    `weight: false` leaves γ out: no parameter, a gain of 1 (nanochat, Karpathy 2025).
    """

    aliases = ("rmsnorm", "rms_norm")
    later_fields = ("weight",)

    eps: PositiveFloat = 1e-5
    offset: FiniteFloat = 0.0
    cast: Literal["before", "after"] = "before"
    weight: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("offset", "cast"):
            if not self.weight and getattr(self, name) != type(self).model_fields[name].default:
                refuse(name, "applies to the weight, but weight is false; leave it out, or keep the weight")
        return self

    def without_weight(self) -> Self:
        """The same eps, and a gain of 1."""
        return self.replace(offset=0.0, cast="before", weight=False)

    def build(self, width: int, heads: int | None = None) -> "RMSNorm":
        """Build a norm over the last `width` elements."""
        return RMSNorm(self, width, heads)


class RMSNorm(SelfInitialized):
    """The module. Its weight is initialized to 1 − offset, so that the gain is 1."""

    def __init__(self, config: RMSConfig, width: int, heads: int | None) -> None:
        super().__init__()
        self.eps, self.offset, self.cast = config.eps, config.offset, config.cast
        self.weight = nn.Parameter(torch.empty(weight_shape(width, heads))) if config.weight else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Gain 1."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.offset, self.cast)
