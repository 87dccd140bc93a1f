"""MLP (Vaswani et al. 2017): `down(f(up(x)))`. `short_convolution` of `hidden` convolves up(x).

f = `xielu` (Huang & Schlag 2024, arXiv 2411.13010; Apertus 2025) has two learned numbers for all channels: it is
α_p u² + β u for u > 0, and α_n (exp(min(u, ε)) − 1 − u) + β u otherwise, with α_p = softplus(a_p) and
α_n = β + softplus(a_n). β = 1/2 and ε = −1e-6 are not trained; files hold them.
"""

import math

import torch
from torch import Tensor, nn

from heddle.config import PositiveInt, Probability
from heddle.numerics.activations import LEARNED, activation, xielu
from heddle.numerics.random import ParameterDraws
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Feedforward, FeedforwardConfig, LearnedActivation
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear, SelfInitialized
from heddle.parts.modules.short_convolution import convolve
from heddle.parts.states import ConvolvedState


class MLPConfig(FeedforwardConfig):
    """Fields of `mlp`."""

    convolved = ("input", "hidden")

    hidden: PositiveInt
    activation: LearnedActivation = "gelu"
    bias: bool = False
    dropout: Probability = 0.0

    @property
    def active_hidden(self) -> int:
        """All hidden channels."""
        return self.hidden

    def build(self, context: BuildContext) -> "MLP":
        """Build the module."""
        return MLP(self, context.width)


class XIELU(SelfInitialized):
    """The learned activation: a_p, a_n, β and ε, each of shape [1]."""

    def __init__(self) -> None:
        super().__init__()
        self.a_p, self.a_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.beta = nn.Parameter(torch.empty(1), requires_grad=False)
        self.eps = nn.Parameter(torch.empty(1), requires_grad=False)

    def init_weights(self, std: float, draws: ParameterDraws) -> None:
        """α_p = α_n = 0.8, as in the paper."""
        for parameter, value in (
            (self.a_p, math.log(math.expm1(0.8))),
            (self.a_n, math.log(math.expm1(0.8 - 0.5))),
            (self.beta, 0.5),
            (self.eps, -1e-6),
        ):
            nn.init.constant_(parameter, value)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same shape."""
        return xielu(x, *(each.to(x.dtype) for each in (self.a_p, self.a_n, self.beta, self.eps)))


class MLP(Feedforward):
    input_projections = ("up",)
    fast_graph = True

    def __init__(self, config: MLPConfig, width: int) -> None:
        super().__init__()
        self.up = Linear(width, config.hidden, config.bias, value_projection=True)
        self.down = Linear(config.hidden, width, config.bias, output_projection=True)
        self.activation = XIELU() if config.activation in LEARNED else activation(config.activation)
        self.dropout = Dropout(config.dropout)
        self.convolve_hidden(config.short_convolution, {"up": config.hidden})

    def forward(
        self, x: Tensor, layout: Layout, state: ConvolvedState | None = None
    ) -> tuple[Tensor, ConvolvedState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        (up,), state = convolve(self.convolutions, {"up": self.up(x)}, layout, state)
        return self.down(self.dropout(self.activation(up))), state
