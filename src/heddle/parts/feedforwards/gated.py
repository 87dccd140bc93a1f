"""Gated feed-forward (Shazeer 2020): `down(f(gate(x)) ⊙ up(x))`; SwiGLU with silu, GeGLU with gelu, ReGLU with relu.

`swiglu_clamped` is gpt-oss's (2025): `down((clamp(up(x), ±limit) + 1) ⊙ g σ(alpha g))`, g = min(gate(x), limit).
`swiglu_limited` is DeepSeek V4's (2026): `down(clamp(up(x), ±limit) ⊙ silu(g))`.
With multipliers it is `m · down(f(g · gate(x)) ⊙ up(x))` (Falcon-H1, 2025). `short_convolution` of `hidden` convolves
gate(x) and up(x).

With `sparsity` s the activation reads relu(g − mean g − Φ⁻¹(s) std g) in place of the gate g, over the hidden channels
of a token: if g is normally distributed, a share s becomes 0 (Gemma 3n, 2025). Φ⁻¹ is computed in float32, as
published. All channels are still computed, so no time is saved.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from torch import Tensor

from heddle.config import PositiveFloat, PositiveInt, Probability, refuse, with_implied
from heddle.numerics.activations import above_quantile, activation, normal_quantile
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig, GatedActivation, activation_settings
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear, fused_projections
from heddle.parts.modules.short_convolution import convolve
from heddle.parts.states import ConvolvedState


class GatedConfig(FeedforwardConfig):
    """Fields of `gated`. `limit` is for `swiglu_clamped` (default 7) and `swiglu_limited` (10), `alpha` for the first.

    By default `alpha` is 1.702.
    """

    aliases = ("swiglu", "geglu", "reglu")
    convolved = ("input", "hidden")
    later_fields = ("sparsity",)

    hidden: PositiveInt
    activation: GatedActivation = "silu"
    limit: PositiveFloat | None = None
    alpha: PositiveFloat | None = None
    bias: bool = False
    dropout: Probability = 0.0
    gate_multiplier: PositiveFloat | None = None  # of the gate, before its activation
    multiplier: PositiveFloat | None = None  # of the output
    sparsity: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None  # share of a token's hidden channels set to zero

    @model_validator(mode="after")
    def _check(self) -> Self:
        activation_settings(self.activation, self.limit, self.alpha)
        if self.sparsity is not None and self.hidden == 1:
            refuse("sparsity", "leaves nothing of one hidden channel; give more, or leave it out")
        return self

    @classmethod
    def fields_of_alias(cls, alias: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The activation that an alias, such as `swiglu`, stands for."""
        activation = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}[alias]
        return with_implied(alias, fields, "activation", activation)

    def resolved(self, context: BuildContext) -> Self:
        """limit and alpha written out."""
        return self.replace(**activation_settings(self.activation, self.limit, self.alpha))

    @property
    def active_hidden(self) -> int:
        """All hidden channels."""
        return self.hidden

    def build(self, context: BuildContext) -> "Gated":
        """Build the module."""
        return Gated(self, context.width)


class Gated(Feedforward):
    input_projections = ("gate", "up")
    fast_graph = True

    def __init__(self, config: GatedConfig, width: int) -> None:
        super().__init__()
        self.gate = Linear(width, config.hidden, config.bias, value_projection=True)
        self.up = Linear(width, config.hidden, config.bias, value_projection=True)
        self.down = Linear(config.hidden, width, config.bias, output_projection=True)
        settings = activation_settings(config.activation, config.limit, config.alpha)
        self.activation = activation(config.activation, settings)
        self.dropout = Dropout(config.dropout)
        self.gate_multiplier, self.multiplier = config.gate_multiplier, config.multiplier
        self.quantile = None if config.sparsity is None else normal_quantile(config.sparsity)
        self.convolve_hidden(config.short_convolution, {"gate": config.hidden, "up": config.hidden})

    def forward(
        self, x: Tensor, layout: Layout, state: ConvolvedState | None = None
    ) -> tuple[Tensor, ConvolvedState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        gate, up = fused_projections(x, self.gate, self.up)
        (gate, up), state = convolve(self.convolutions, {"gate": gate, "up": up}, layout, state)
        if self.gate_multiplier is not None:
            gate = gate * self.gate_multiplier
        if self.quantile is not None:
            gate = above_quantile(gate, self.quantile)
        y: Tensor = self.down(self.dropout(self.activation(up, gate)))
        return y if self.multiplier is None else y * self.multiplier, state
