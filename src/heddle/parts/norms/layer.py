"""LayerNorm (Ba, Kiros & Hinton 2016): `y = (offset + γ) ⊙ (x − mean(x)) / sqrt(var(x) + ε) + β`."""

from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from heddle.config import FiniteFloat, PositiveFloat, refuse
from heddle.numerics.norms import layer_norm, with_offset
from heddle.numerics.random import ParameterDraws
from heddle.parts.modules.linear import SelfInitialized
from heddle.parts.norms import NormConfig, weight_shape


class LayerNormConfig(NormConfig):
    """`bias` is β. `offset: 1` gives the `1 + γ` of Nemotron.

    `weight: false` leaves γ out: no parameter, a gain of 1 (OLMo, Groeneveld et al. 2024).
    """

    aliases = ("layernorm", "layer_norm")
    later_fields = ("weight", "offset")

    eps: PositiveFloat = 1e-5
    bias: bool = True
    weight: bool = True
    offset: FiniteFloat = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bias and not self.weight:
            refuse("bias", "needs a weight, but weight is false; set bias to false, or keep the weight")
        if self.offset and not self.weight:
            refuse("offset", "applies to the weight, but weight is false; leave it out, or keep the weight")
        return self

    def without_weight(self) -> Self:
        """The same eps, a gain of 1 and no bias."""
        return self.replace(bias=False, weight=False, offset=0.0)

    def build(self, width: int, heads: int | None = None) -> "LayerNorm":
        """Build a norm over the last `width` elements."""
        return LayerNorm(self, width, heads)


class LayerNorm(SelfInitialized):
    def __init__(self, config: LayerNormConfig, width: int, heads: int | None) -> None:
        super().__init__()
        self.eps, self.offset = config.eps, config.offset
        self.weight = nn.Parameter(torch.empty(weight_shape(width, heads))) if config.weight else None
        self.bias = nn.Parameter(torch.empty(weight_shape(width, heads))) if config.bias else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """Gain 1, bias 0."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        weight = None if self.weight is None else with_offset(self.weight, self.offset, x.dtype)
        return layer_norm(x, weight, self.bias, self.eps)
