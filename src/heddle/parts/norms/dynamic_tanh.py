"""Dynamic tanh (Zhu et al. 2025): `y = γ ⊙ tanh(α x) + β`; Derf (Chen et al. 2025): `y = γ ⊙ erf(α x + s) + β`.

No statistics: each element is squashed by itself, with a scalar α that is learned.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from heddle.config import PositiveFloat
from heddle.numerics.norms import at_least_float32
from heddle.numerics.random import ParameterDraws
from heddle.parts.modules.linear import SelfInitialized
from heddle.parts.norms import NormConfig, weight_shape


class DynamicTanhConfig(NormConfig):
    """`alpha`: the value at which α begins. `function: erf` adds the learned scalar shift s of Derf.

    `weight: false` leaves γ and β out.
    """

    aliases = ("dyt",)

    alpha: PositiveFloat = 0.5
    function: Literal["tanh", "erf"] = "tanh"
    weight: bool = True

    def build(self, width: int, heads: int | None = None) -> "DynamicTanh":
        """Build the module. With `heads`, α and s are one number per head."""
        return DynamicTanh(self, width, heads)


class DynamicTanh(SelfInitialized):
    def __init__(self, config: DynamicTanhConfig, width: int, heads: int | None) -> None:
        super().__init__()
        self.initial_alpha, self.function = config.alpha, config.function
        scalar = (1,) if heads is None else (heads, 1)
        self.alpha = nn.Parameter(torch.empty(scalar))
        self.shift = nn.Parameter(torch.empty(scalar)) if config.function == "erf" else None
        shape = weight_shape(width, heads)
        self.weight = nn.Parameter(torch.empty(shape)) if config.weight else None
        self.bias = nn.Parameter(torch.empty(shape)) if config.weight else None

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """α as configured, s and β 0, γ 1."""
        nn.init.constant_(self.alpha, self.initial_alpha)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        for bias in (self.bias, self.shift):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width] -> the same shape and dtype."""
        z = at_least_float32(x) * self.alpha
        y = torch.tanh(z) if self.shift is None else torch.erf(z + self.shift)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.to(x.dtype)
