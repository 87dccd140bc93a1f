"""RMSNorm (Zhang & Sennrich 2019): `y = (offset + γ) ⊙ x / sqrt(mean(x²) + ε)`."""

from typing import Literal

import torch
from torch import Tensor, nn

from heddle.config import Finite, Positive
from heddle.numerics.norms import rms_norm
from heddle.parts.modules.linear import Leaf
from heddle.parts.norms import NormConfig, weight_shape


class RMSConfig(NormConfig):
    """`offset` 1 is Gemma's and Qwen3-Next's `1 + γ`; `cast` returns to x's dtype before γ (Llama) or after."""

    eps: Positive = 1e-5
    offset: Finite = 0.0
    cast: Literal["before", "after"] = "before"

    def build(self, width: int, heads: int | None = None) -> "RMSNorm":
        """A norm over `width` dims."""
        return RMSNorm(self, width, heads)


class RMSNorm(Leaf):
    """The module; its weight starts at 1 − offset, so the gain starts at 1."""

    def __init__(self, config: RMSConfig, width: int, heads: int | None) -> None:
        super().__init__()
        self.eps, self.offset, self.cast = config.eps, config.offset, config.cast
        self.weight = nn.Parameter(torch.empty(weight_shape(width, heads)))

    def initialise(self, std: float, generator: torch.Generator) -> None:
        """Gain one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps, self.offset, self.cast)
