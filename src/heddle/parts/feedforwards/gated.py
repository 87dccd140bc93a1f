"""Gated feed-forward (Shazeer 2020): `down(f(gate(x)) ⊙ up(x))`; SwiGLU with silu, GeGLU with gelu, ReGLU with relu.

`swiglu_clamped` is gpt-oss's (2025): `down((clamp(up(x), ±limit) + 1) ⊙ g σ(alpha g))`, g = min(gate(x), limit).
"""

from typing import Self

from pydantic import model_validator
from torch import Tensor

from heddle.config import PositiveFloat, PositiveInt, Probability
from heddle.parts.context.build import BuildContext
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig, GatedActivation, activation, clamp_settings
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear, fused_projections


class GatedConfig(FeedforwardConfig):
    """Fields of `gated`. `limit` (default 7) and `alpha` (default 1.702) are for `swiglu_clamped` only."""

    hidden: PositiveInt
    activation: GatedActivation = "silu"
    limit: PositiveFloat | None = None
    alpha: PositiveFloat | None = None
    bias: bool = False
    dropout: Probability = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        clamp_settings(self.activation, self.limit, self.alpha)
        return self

    def resolved(self, context: BuildContext) -> Self:
        """limit and alpha written out."""
        return self.replace(**clamp_settings(self.activation, self.limit, self.alpha))

    def build(self, context: BuildContext) -> "Gated":
        """Build the module."""
        return Gated(self, context.width)


class Gated(Feedforward):
    """The module."""

    def __init__(self, config: GatedConfig, width: int) -> None:
        super().__init__()
        self.gate = Linear(width, config.hidden, config.bias)
        self.up = Linear(width, config.hidden, config.bias)
        self.down = Linear(config.hidden, width, config.bias, output_projection=True)
        self.activation = activation(config.activation, config.limit, config.alpha)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""
        gate, up = fused_projections(x, self.gate, self.up)
        y: Tensor = self.down(self.dropout(self.activation(up, gate)))
        return y
