"""Gated feed-forward (Shazeer 2020): `down(f(gate(x)) ⊙ up(x))`; SwiGLU with silu, GeGLU with gelu, ReGLU with relu.

`swiglu_clamped` is gpt-oss's (2025): `down((clamp(up(x), ±limit) + 1) ⊙ g σ(alpha g))`, g = min(gate(x), limit).
"""

from typing import Self

from pydantic import model_validator
from torch import Tensor

from heddle.config import Count, Positive, Rate
from heddle.parts.context.layout import Layout
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig, GatedActivation, activation, clamps
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear, together


class GatedConfig(FeedforwardConfig):
    """Fields of `gated`; `limit` (7) and `alpha` (1.702) belong to `swiglu_clamped`."""

    hidden: Count
    activation: GatedActivation = "silu"
    limit: Positive | None = None
    alpha: Positive | None = None
    bias: bool = False
    dropout: Rate = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        clamps(self.activation, self.limit, self.alpha)
        return self

    def resolved(self) -> Self:
        """Limit and alpha written out."""
        return self.replace(**clamps(self.activation, self.limit, self.alpha))

    def build(self, width: int) -> "Gated":
        """Make the module."""
        return Gated(self, width)


class Gated(Feedforward):
    """The module."""

    def __init__(self, config: GatedConfig, width: int) -> None:
        super().__init__()
        self.gate = Linear(width, config.hidden, config.bias)
        self.up = Linear(width, config.hidden, config.bias)
        self.down = Linear(config.hidden, width, config.bias, last=True)
        self.activation = activation(config.activation, config.limit, config.alpha)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """x [B, T, width] -> the same shape."""
        gate, up = together(x, self.gate, self.up)
        return self.down(self.dropout(self.activation(up, gate)))
