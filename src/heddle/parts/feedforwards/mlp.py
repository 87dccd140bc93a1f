"""MLP (Vaswani et al. 2017): `down(f(up(x)))`. `short_convolution` of `hidden` convolves up(x)."""

from torch import Tensor

from heddle.config import PositiveInt, Probability
from heddle.numerics.activations import activation
from heddle.parts.build import BuildContext
from heddle.parts.feedforwards import Activation, Feedforward, FeedforwardConfig
from heddle.parts.layout import Layout
from heddle.parts.modules.dropout import Dropout
from heddle.parts.modules.linear import Linear
from heddle.parts.modules.short_convolution import convolve
from heddle.parts.states import ConvolvedState


class MLPConfig(FeedforwardConfig):
    """Fields of `mlp`."""

    convolved = ("input", "hidden")

    hidden: PositiveInt
    activation: Activation = "gelu"
    bias: bool = False
    dropout: Probability = 0.0

    @property
    def active_hidden(self) -> int:
        """All hidden channels."""
        return self.hidden

    def build(self, context: BuildContext) -> "MLP":
        """Build the module."""
        return MLP(self, context.width)


class MLP(Feedforward):
    input_projections = ("up",)

    def __init__(self, config: MLPConfig, width: int) -> None:
        super().__init__()
        self.up = Linear(width, config.hidden, config.bias, value_projection=True)
        self.down = Linear(config.hidden, width, config.bias, output_projection=True)
        self.activation = activation(config.activation)
        self.dropout = Dropout(config.dropout)
        self.convolve_hidden(config.short_convolution, {"up": config.hidden})

    def forward(
        self, x: Tensor, layout: Layout, state: ConvolvedState | None = None
    ) -> tuple[Tensor, ConvolvedState | None]:
        """x [B, T, width] -> ([B, T, width], new state)."""
        (up,), state = convolve(self.convolutions, {"up": self.up(x)}, layout, state)
        return self.down(self.dropout(self.activation(up))), state
